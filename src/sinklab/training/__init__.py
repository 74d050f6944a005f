"""Training recipes over `transformers.Trainer`.

Names load where first used: settings alone must not cost the Trainer.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sinklab.training.run import train
    from sinklab.training.settings import TrainSettings
    from sinklab.training.trainer import DiffusionTrainer, causal_loss, diffusion_loss

__all__ = ["DiffusionTrainer", "TrainSettings", "causal_loss", "diffusion_loss", "train"]

_HOMES = {
    "DiffusionTrainer": "trainer",
    "TrainSettings": "settings",
    "causal_loss": "trainer",
    "diffusion_loss": "trainer",
    "train": "run",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
