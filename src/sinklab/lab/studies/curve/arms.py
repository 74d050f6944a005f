"""The arms of a curve or a map, their rows, and the table of costs."""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import pandas as pd

from sinklab.core.instrument import BlockKeys, Selector, SinkKeys, TopKeys
from sinklab.core.registry import interventions
from sinklab.lab.analysis.differences import effects
from sinklab.lab.checkpoints import Loaded
from sinklab.lab.measures.partial import Weaken
from sinklab.lab.measures.protocols import in_place_of
from sinklab.lab.measures.screen import screen
from sinklab.lab.scoring.arms import DOSE, HeldoutRows, arm_losses
from sinklab.lab.studies.curve.study import CurveSettings, Plan

ARM = ["k", "control", "layer", "head"]
"""k keys; the keys blocked: "none"; "top", the most attended; "sinks", those of them that are sinks
by a rule; "matched", the same in the heads alone that have a control of equal mass; another
control; the text of an edit; the layer and the head in which they are, −1 for all. With `beta` one
column more, the part of their weight that they keep.
"""
CLEAN = (0, "none", -1, -1)
FIRST = 10
"""Heads of a screen that are blocked for real."""
WORDS = ("costs", "helps")


def arms_of(loaded: Loaded, settings: CurveSettings) -> dict[tuple[Any, ...], list[Any]]:
    """Edits by arm, no edit first. Raises ValueError for a k or a layer that does not fit."""
    keys = settings.length + loaded.added_sinks
    most = keys - 1
    if "random" in settings.controls:
        # as many others are the control
        most = keys // 2
    if settings.ks[-1] > most:
        raise ValueError(
            f"k keys and their controls must leave something of the {keys} keys of a row, but k is "
            f"{settings.ks[-1]}; choose at most {most}, or a greater length"
        )
    backbone = loaded.backbone
    layers, heads = range(backbone.num_hidden_layers), range(backbone.num_attention_heads)
    absent = [layer for layer in settings.layers if layer not in layers]
    if absent:
        raise ValueError(
            f"{loaded.name} has layers 0 to {layers[-1]}, but no {absent[0]}; leave it out"
        )
    places: dict[str, Any] = {
        "model": [(-1, -1)],
        "layer": [(layer, -1) for layer in settings.layers or layers],
        "head": itertools.product(settings.layers or layers, heads),
    }
    degrees: list[tuple[float, ...]] = [(beta,) for beta in settings.beta] or [()]
    _, clean = columns_of(settings)
    arms: dict[tuple[Any, ...], list[Any]] = {clean: []}
    for place, k, control, degree in itertools.product(
        places[settings.by], settings.ks[1:], settings.controls, degrees
    ):
        layer, head = place
        where: dict[str, Any] = {"layers": settings.layers or None}
        if degree:
            where["how"] = Weaken(*degree)
        if layer >= 0:
            where["layers"] = (layer,)
        if head >= 0:
            where["heads"] = (head,)
        chosen: Selector = TopKeys(k)
        main = "top"
        if settings.sink_rule is not None:
            chosen, main = SinkKeys(settings.sink_rule, k), "sinks"
        names = [control, "matched"] if control == "equal_mass" else [control]
        for name in names:
            arm = (k, main if name == "sinks" else name, *place, *degree)
            arms[arm] = [BlockKeys(in_place_of(chosen, name), **where)]
    return arms | {(0, interventions.as_text(edit), *clean[2:]): [edit] for edit in settings.edits}


def columns_of(settings: CurveSettings) -> tuple[list[str], tuple[Any, ...]]:
    """Columns that tell arms apart, and the arm without edits."""
    if settings.beta:
        return [*ARM, "beta"], (*CLEAN, 1.0)
    return ARM, CLEAN


def screened(
    loaded: Loaded, settings: CurveSettings, text: HeldoutRows, arms: dict[tuple[Any, ...], Any]
) -> tuple[pd.DataFrame, dict[tuple[Any, ...], Any]]:
    """Heads by their first-order cost, the greatest first (columns layer, head, screen), and the
    arms without those of all but the `FIRST`.
    """
    how: dict[str, Any] = {"samples": settings.samples, "seed": settings.seed}
    cost_LH = screen(loaded, text.ids_RS.tolist(), batch=settings.batch, **how).mean(0)
    heads = {arm[2:] for arm in arms if arm != CLEAN}
    costs = [(*place, float(cost_LH[place])) for place in sorted(heads)]
    table = pd.DataFrame(costs, columns=["layer", "head", "screen"])
    table = table.sort_values("screen", ascending=False, kind="stable", ignore_index=True)
    dropped = heads - {*zip(table["layer"][:FIRST], table["head"][:FIRST], strict=True)}
    return table, {arm: edits for arm, edits in arms.items() if arm[2:] not in dropped}


def rows_of(
    loaded: Loaded,
    settings: CurveSettings,
    plan: Plan,
    rows: Sequence[int],
    tick: Callable[[], object] | None = None,
) -> pd.DataFrame:
    """Loss and dose of rows that follow each other under each arm, a line each."""
    texts = plan.text.ids_RS[rows[0] : rows[-1] + 1].tolist()
    how: dict[str, Any] = {"samples": settings.samples, "seed": settings.seed, "tick": tick}
    columns, _ = columns_of(settings)
    found = arm_losses(loaded, plan.arms, texts, first=rows[0], batch=settings.batch, **how)
    lines = [
        {"row": one.text, **dict(zip(columns, one.arm, strict=True)), "loss": one.loss, **one.about}
        for one in found
    ]
    return pd.DataFrame(lines)


def cost_table(rows: pd.DataFrame, settings: CurveSettings, text: HeldoutRows) -> pd.DataFrame:
    """The table ``curve``: of every arm the cost, `effects` of its losses less those with nothing
    blocked, whose own line comes first.

    Besides, means over rows of the loss, nats per token, of the dose, 0 removed if nothing is
    blocked, and of regrown (`ArmLoss.about`); relative, the cost in shares of the loss with nothing
    blocked; bits_per_byte, comparable across tokenizers. Of a map the false discovery rate is held
    at 5 %, for a curve every word.

    Args:
        rows: the table ``curve_rows``.
        settings: of the run.
        text: the rows of text.
    """
    doses = ["loss", *DOSE, "regrown"]
    correction = "holm" if settings.by == "model" else "discoveries"
    how: dict[str, Any] = {"doses": doses, "words": WORDS, "correction": correction}
    clean = rows.loc[rows["control"] == "none"]
    columns, clean_arm = columns_of(settings)
    line = dict(zip(columns, clean_arm, strict=True)) | dict.fromkeys(("mean", "low", "high"), 0.0)
    line |= {"caution": "", "verdict": ""}
    table = pd.DataFrame([line | {"n": len(clean)} | clean[doses].mean().to_dict()])
    if len(rows) > len(clean):
        costs = effects(rows, "loss", arm=columns, unit="row", base=clean_arm, **how)
        table = pd.concat([table, costs.drop(columns="less")], ignore_index=True)
    tokens = text.ids_RS.numel()
    return table.assign(
        relative=table["mean"] / clean["loss"].mean(),
        tokens=tokens,
        bits_per_byte=table["loss"] * tokens / math.log(2) / text.size,
    )
