"""What a model is worth and what its sinks do: benchmarks, likelihoods and held-out loss with and without sinks, and
studies of its writing.

Names load where first used: settings alone must not cost the models. A function that is called like its module
(`masking_curve`, `sink_contents`, `table1`, `two_stage_settings`) is imported from there.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sinklab.evaluation.battery import score_battery
    from sinklab.evaluation.battery_settings import BatterySettings
    from sinklab.evaluation.benchmark_settings import EvalSettings
    from sinklab.evaluation.cache_settings import CacheSettings
    from sinklab.evaluation.cache_study import cache_fidelity
    from sinklab.evaluation.code_runs import CodeLimits, CodeResult, run_program
    from sinklab.evaluation.contents_settings import ContentsSettings
    from sinklab.evaluation.curve_settings import CurveSettings
    from sinklab.evaluation.gsm8k_two_stage import TwoStageAnswer, two_stage
    from sinklab.evaluation.harness import evaluate
    from sinklab.evaluation.harness_model import SinklabLM
    from sinklab.evaluation.harness_tables import score_lines
    from sinklab.evaluation.heldout import HeldoutRows, heldout_curve, heldout_rows, row_losses
    from sinklab.evaluation.hidden_columns import hidden_losses
    from sinklab.evaluation.likelihood import exact, rolling, score
    from sinklab.evaluation.likelihood_settings import LikelihoodSettings, Scored
    from sinklab.evaluation.masking_curve import check_curve
    from sinklab.evaluation.observation import check_study, study
    from sinklab.evaluation.progress import Progress
    from sinklab.evaluation.prompts import Prompt, encode, read_prompts
    from sinklab.evaluation.settings import StudySettings
    from sinklab.evaluation.writing import agreement

__all__ = [
    "BatterySettings",
    "CacheSettings",
    "CodeLimits",
    "CodeResult",
    "ContentsSettings",
    "CurveSettings",
    "EvalSettings",
    "HeldoutRows",
    "LikelihoodSettings",
    "Progress",
    "Prompt",
    "Scored",
    "SinklabLM",
    "StudySettings",
    "TwoStageAnswer",
    "agreement",
    "cache_fidelity",
    "check_curve",
    "check_study",
    "encode",
    "evaluate",
    "exact",
    "heldout_curve",
    "heldout_rows",
    "hidden_losses",
    "read_prompts",
    "rolling",
    "row_losses",
    "run_program",
    "score",
    "score_battery",
    "score_lines",
    "study",
    "two_stage",
]

_HOMES = {
    "BatterySettings": "battery_settings",
    "CacheSettings": "cache_settings",
    "CodeLimits": "code_runs",
    "CodeResult": "code_runs",
    "ContentsSettings": "contents_settings",
    "CurveSettings": "curve_settings",
    "EvalSettings": "benchmark_settings",
    "HeldoutRows": "heldout",
    "LikelihoodSettings": "likelihood_settings",
    "Progress": "progress",
    "Prompt": "prompts",
    "Scored": "likelihood_settings",
    "SinklabLM": "harness_model",
    "StudySettings": "settings",
    "TwoStageAnswer": "gsm8k_two_stage",
    "agreement": "writing",
    "cache_fidelity": "cache_study",
    "check_curve": "masking_curve",
    "check_study": "observation",
    "encode": "prompts",
    "evaluate": "harness",
    "exact": "likelihood",
    "heldout_curve": "heldout",
    "heldout_rows": "heldout",
    "hidden_losses": "hidden_columns",
    "read_prompts": "prompts",
    "rolling": "likelihood",
    "row_losses": "heldout",
    "run_program": "code_runs",
    "score": "likelihood",
    "score_battery": "battery",
    "score_lines": "harness_tables",
    "study": "observation",
    "two_stage": "gsm8k_two_stage",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
