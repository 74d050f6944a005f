"""What a training run left, and runs that stop on the way."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainerCallback

from sinklab.lab.records import open_run
from sinklab.lab.training import run, train, trainer


def losses_of(folder):
    """The logged losses of a run."""
    return open_run(folder).table("history").dropna(subset="loss")["loss"].tolist()


def weights_of(folder):
    """The weights by name, of a run or of a model's folder."""
    inside = Path(folder, "model", "model.safetensors")
    return load_file(inside if inside.exists() else Path(folder, "model.safetensors"))


def same_weights(one, other):
    """Whether two folders hold the same weights, bit for bit."""
    ours, theirs = weights_of(one), weights_of(other)
    return ours.keys() == theirs.keys() and all(
        torch.equal(ours[name], theirs[name]) for name in ours
    )


class Stopper(TrainerCallback):
    """Raises at the end of a step, as Ctrl-C does."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **_):
        if state.global_step == self.step:
            raise KeyboardInterrupt


def interrupted(settings, step):
    """Train until the end of this step."""

    class Stopped(trainer.DiffusionTrainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.add_callback(Stopper(step))

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(run, "DiffusionTrainer", Stopped)
        train(settings)
