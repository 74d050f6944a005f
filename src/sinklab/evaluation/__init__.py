"""What a model is worth and what its sinks do: held-out loss with and without sinks, and studies of its writing.

Names load where first used: settings alone must not cost the models.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sinklab.evaluation.heldout import HeldoutRows, heldout_curve, heldout_rows, row_losses
    from sinklab.evaluation.observation import check_study, study
    from sinklab.evaluation.progress import Progress
    from sinklab.evaluation.prompts import Prompt, encode, read_prompts
    from sinklab.evaluation.settings import StudySettings
    from sinklab.evaluation.writing import agreement

__all__ = [
    "HeldoutRows",
    "Progress",
    "Prompt",
    "StudySettings",
    "agreement",
    "check_study",
    "encode",
    "heldout_curve",
    "heldout_rows",
    "read_prompts",
    "row_losses",
    "study",
]

_HOMES = {
    "HeldoutRows": "heldout",
    "Progress": "progress",
    "Prompt": "prompts",
    "StudySettings": "settings",
    "agreement": "writing",
    "check_study": "observation",
    "encode": "prompts",
    "heldout_curve": "heldout",
    "heldout_rows": "heldout",
    "read_prompts": "prompts",
    "row_losses": "heldout",
    "study": "observation",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
