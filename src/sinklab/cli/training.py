"""`sinklab train`: a recipe, a variant of the model, and whatever is given over them."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import tyro

from sinklab.cli.command import value_of
from sinklab.cli.progress import working
from sinklab.training.recipes import RECIPES, VARIANTS, recipe
from sinklab.training.settings import TrainSettings

DEFAULT = "laptop-scratch"


def train_command(arguments: Sequence[str]) -> Callable[..., None]:
    """The command with the defaults of the recipe that these arguments name, so that --help shows what would run.

    Args:
        arguments: what stands behind ``sinklab train``.

    Raises:
        ValueError: for an unknown recipe or variant, or a run folder that cannot be reproduced.
    """
    name = arguments[0] if arguments and not arguments[0].startswith("-") else DEFAULT
    variant, again = value_of(arguments, "--variant"), value_of(arguments, "--reproduce")
    if again is None:
        settings = recipe(name, variant)
    elif variant is None and name == DEFAULT:
        from sinklab.training.run import settings_of

        settings = settings_of(Path(again))
    else:
        raise ValueError("--reproduce takes every setting from the run folder; leave out the recipe and --variant")

    def train(
        recipe: Annotated[str, tyro.conf.Positional] = DEFAULT,
        variant: str | None = None,
        reproduce: Path | None = None,
        settings: tyro.conf.OmitArgPrefixes[TrainSettings] = settings,
    ) -> None:
        """Train a diffusion language model: from scratch, from a causal model, or its sink alone.

        The first word is a recipe; it sets every flag below, and flags given override it. Without one, a small model
        learns from Python's own documentation, which is on every machine, in a few minutes. The run folder keeps all
        settings, and --resume continues an interrupted run exactly. After the name of a recipe, --help shows its
        settings.

        Recipes
            {recipes}

        Try
            sinklab train --out runs/plain && sinklab report runs/plain
            sinklab train laptop-scratch --variant sink
            sinklab train --corpus my_texts/ --heldout my_valid/ --steps 5000 --causal-start 0.4 --compile
            sinklab train laptop-causal && sinklab train laptop-from-causal --variant sink
            sinklab train --reproduce runs/plain --out runs/again
            sinklab train qwen-0.5b --variant gate --init-from /models/Qwen2.5-0.5B --corpus /data/fineweb
            accelerate launch --config_file launch/eight_gpus.yaml -m sinklab.cli train scratch-472m --variant sink

        Args:
            recipe: one of the recipes above.
            variant: the sink or gate of the model: {variants}.
            reproduce: run folder whose settings to take, all of them; compares the weights at the end.
            settings: what to train, on what, and how.
        """
        if recipe != name:
            raise ValueError(f"the recipe comes first: sinklab train {recipe} …")
        _train(settings, reproduce)

    recipes = "\n    ".join(f"{name}: {about}" for name, about in RECIPES.items())
    train.__doc__ = inspect.cleandoc(train.__doc__ or "").format(recipes=recipes, variants=", ".join(VARIANTS))
    return train


def _train(settings: TrainSettings, again: Path | None) -> None:
    from transformers.utils import logging

    from sinklab.training.run import train as run

    if again is not None and Path(settings.out).resolve() == again.resolve():
        raise ValueError(f"a run is reproduced in a folder of its own, but --out is {again} too; give another --out")
    logging.disable_progress_bar()
    with working() as say:
        folder = run(settings, progress=say)
    if os.environ.get("RANK", "0") != "0":
        return
    print(f"model: {folder}")
    before = None if again is None else again / "model" / "weights.sha256"
    if before is not None and not before.is_file():
        print(f"{again} was not finished, so there are no weights to compare with")
    elif before is not None:
        same = (folder / "weights.sha256").read_text() == before.read_text()
        print(f"the weights {'equal' if same else 'differ from'} those of {again}, compared bit for bit")
    print(f"next: sinklab report {folder.parent}, or sinklab trace --model {folder}")
    if settings.train_only == "sink":
        print(f"the sink alone: sinklab trace --model {settings.init_from} --sink {folder.parent / 'sink.safetensors'}")
