"""Training recipes over `transformers.Trainer`.

Names load where first used: settings alone must not cost the Trainer.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sinklab.training.objective import causal_loss, diffusion_loss
    from sinklab.training.recipes import RECIPES, VARIANTS, recipe
    from sinklab.training.run import settings_of, train
    from sinklab.training.settings import TrainSettings
    from sinklab.training.trainer import DiffusionTrainer

__all__ = [
    "RECIPES",
    "VARIANTS",
    "DiffusionTrainer",
    "TrainSettings",
    "causal_loss",
    "diffusion_loss",
    "recipe",
    "settings_of",
    "train",
]

_HOMES = {
    "RECIPES": "recipes",
    "VARIANTS": "recipes",
    "DiffusionTrainer": "trainer",
    "TrainSettings": "settings",
    "causal_loss": "objective",
    "diffusion_loss": "objective",
    "recipe": "recipes",
    "settings_of": "run",
    "train": "run",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
