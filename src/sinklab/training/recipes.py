"""Recipes: the runs of «One Token Is Enough» and their laptop twins, each with every variant of the model.

They stand in recipes.toml. The variant is the one thing that differs between two runs of a recipe.
"""

from __future__ import annotations

import tomllib
from dataclasses import replace
from importlib.resources import files
from typing import Any

from sinklab.errors import one_of
from sinklab.training.settings import TrainSettings

_READ: dict[str, dict[str, Any]] = tomllib.loads((files(__package__) / "recipes.toml").read_text("utf-8"))

VARIANTS: dict[str, dict[str, Any]] = _READ["variants"]
"""Name to the settings of the model that make the variant."""

RECIPES: dict[str, str] = {name: fields["about"] for name, fields in _READ["recipes"].items()}
"""Name to what it trains, in the order of the help."""


def recipe(name: str, variant: str | None = None, **changes: Any) -> TrainSettings:
    """The settings of a recipe with this variant of the model; ``changes`` are fields of :class:`TrainSettings`.

    A gate that a pretrained model is given starts open (bias 4): at 0.5 it would halve what the model has learned. The
    run folder is ``runs/<recipe>``, with the variant behind it where it is not the recipe's own. Fine-tuning on
    questions goes on with the model that was trained with the same variant: ``runs/<recipe before>-<variant>/model``.

    Args:
        name: one of :data:`RECIPES`.
        variant: one of :data:`VARIANTS`; None is ``plain``, or ``sink`` for a retrofit.

    Raises:
        ValueError: for an unknown recipe or variant, naming the near one, or an autoregressive model with a sink.
        TypeError: for a change that is no field.
    """
    one_of("recipe", name, RECIPES)
    own = _READ["recipes"][name].get("variant", "plain")
    chosen = variant or own
    one_of("variant", chosen, VARIANTS)
    settings = TrainSettings(**_fields(name))
    fields = dict(VARIANTS[chosen])
    if settings.objective == "autoregressive" and fields:
        raise ValueError(f"{name} trains a plain autoregressive model, so it has no variant {chosen!r}; leave it out")
    if settings.pairs in ("published", "corrected") and chosen != own:
        fields["init_from"] = str(settings.init_from).replace("/model", f"-{chosen}/model")
    elif settings.init_from and fields.get("gate"):
        fields["gate_bias"] = 4.0
    out = f"runs/{name}" if chosen == own else f"runs/{name}-{chosen}"
    return replace(settings, **{**fields, "out": out, **changes})


def _fields(name: str) -> dict[str, Any]:
    """The settings that a recipe names, and those of what it is like."""
    given = (_READ["bases"] | _READ["recipes"])[name]
    fields = (_fields(given["like"]) if "like" in given else {}) | given
    if "tokens" in given:
        fields["steps"] = round(given["tokens"] / (fields["batch"] * fields["length"]))
    return {key: value for key, value in fields.items() if key not in ("about", "like", "tokens", "variant")}
