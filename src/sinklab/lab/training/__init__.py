"""Training recipes over `transformers.Trainer`."""

from sinklab.core.registry import exports

__getattr__, __dir__, __all__ = exports(
    __name__,
    model="freeze merge_lora trainable_parameters",
    run="settings_of train",
    settings="RECIPES TrainSettings VARIANTS recipe",
    snapshots="MEASURES Snapshot snapshot",
    trainer="DiffusionTrainer causal_loss",
)
