"""The loss of held-out text over the number of hidden columns: the cheap stand-in for benchmarks, for any model."""

# R rows
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from sinklab.analysis.estimates import mean_over
from sinklab.checkpoints.loading import Loaded
from sinklab.probing.interventions.mask_sinks import MaskSinks
from sinklab.scoring.heldout import EditedLosses, HeldoutRows, edited_losses, heldout_rows
from sinklab.studies.base import Work, check_fits, columns_of, heldout_text
from sinklab.studies.curve.study import CurveSettings
from sinklab.studies.processes import Progress

Choice = tuple[int, str]
"""k keys and the control of `MaskSinks` that says which; k = 0 hides nothing."""


def score(work: Work) -> None:
    """Write the tables of a curve."""
    settings, text, loaded = work.settings, work.plan, work.loaded
    work.progress.stage(f"scoring {len(text.ids_RS)} rows of {settings.length} tokens with {loaded.name}")
    losses, masses = _scored(loaded, text, settings, work.progress)
    work.run.table("curve", curve_table(losses, masses, text))
    rows = len(text.ids_RS)
    columns = {"row": np.tile(np.arange(rows), len(losses)), "k": np.repeat([k for k, _ in losses], rows)}
    columns["control"] = np.repeat(np.array([control for _, control in losses], dtype=object), rows)
    work.run.table("curve_rows", {**columns, "loss": np.concatenate(list(losses.values()))})


def prepare(loaded: Loaded, settings: CurveSettings, progress: Progress) -> HeldoutRows:
    """The text to score, once the model is known to score it.

    Raises:
        ValueError: for a model without a mask token or a tokenizer, rows that do not fit its context, and a k that
            leaves no columns.
    """
    loaded.needed_tokenizer()
    check_fits(loaded, "curve", settings.length, "choose a smaller length")
    keys = settings.length + getattr(loaded.model.config, "sink_count", 0)
    alone = settings.controls == ("sinks",)
    most = keys - 1 if alone else keys // 2
    if settings.ks[-1] > most:
        others = "" if alone else " and as many others as controls"
        raise ValueError(
            f"k columns{others} must leave something of the {keys} keys of a row, but k is {settings.ks[-1]}; choose "
            f"at most {most}, or a greater length"
        )
    return heldout_rows(loaded, heldout_text(settings.heldout), rows=settings.rows, length=settings.length)


def _scored(
    loaded: Loaded, text: HeldoutRows, settings: CurveSettings, progress: Progress
) -> tuple[dict[Choice, np.ndarray], dict[Choice, float]]:
    """Loss of every row, (R,), and share of attention that the hidden columns held, by choice; means over draws."""
    choices = [(k, control) for k in settings.ks for control in (settings.controls if k else ("none",))]
    # without noise nothing but random columns changes from draw to draw
    redrawn = choices if loaded.family == "diffusion" else [choice for choice in choices if choice[1] == "random"]
    batches = math.ceil(len(text.ids_RS) / settings.batch)
    count = progress.counter((len(choices) + len(redrawn) * (settings.draws - 1)) * batches)
    drawn: dict[Choice, list[EditedLosses]] = {choice: [] for choice in choices}
    for draw, seed in enumerate(_seeds(settings)):
        some = redrawn if draw else choices
        if some:
            arms = [[MaskSinks(k=k, control=control)] if k else [] for k, control in some]
            found = edited_losses(loaded, text.ids_RS, arms, seed=seed, batch=settings.batch, progress=count)
            for choice, one in zip(some, found, strict=True):
                drawn[choice].append(one)
    losses = {
        choice: torch.stack([one.losses_R for one in of_choice]).double().mean(0).numpy()
        for choice, of_choice in drawn.items()
    }
    masses = {
        choice: float(np.mean([one.dose.held for one in of_choice])) if choice[0] else 0.0
        for choice, of_choice in drawn.items()
    }
    if wrong := [choice for choice, loss_R in losses.items() if not np.isfinite(loss_R).all()]:
        raise ValueError(f"{loaded.name} gave a loss that is no number at (k, control) {wrong[0]}; try another dtype")
    return losses, masses


def _seeds(settings: CurveSettings) -> list[int]:
    """The first draw has the seed itself, so that it is what `row_losses` gives."""
    more = np.random.SeedSequence(settings.seed).generate_state(settings.draws, np.uint64) >> 2
    return [settings.seed, *map(int, more[1:])]


def curve_table(
    losses: Mapping[Choice, np.ndarray], masses: Mapping[Choice, float], text: HeldoutRows
) -> dict[str, list[Any]]:
    """The columns of the table ``curve``.

    loss: mean over rows, nats per token. delta: that less the loss with nothing hidden. excess: delta less that of as
    many random columns, NaN without them. low and high: ends of the 95 % interval over rows (`mean_over`), NaN with
    fewer than 6; differences are paired. relative: delta over the loss. mass: share of
    attention that the columns held before they were hidden. bits_per_byte: of the text, comparable across tokenizers.

    Rows are taken as independent; rows of one book are alike, so over other texts the spread is wider.
    """
    clean_R = losses[0, "none"]
    rows, tokens = len(clean_R), text.ids_RS.numel()

    def measured(name: str, values_R: np.ndarray | None) -> dict[str, float]:
        found = mean_over([] if values_R is None else values_R)
        return dict(zip((name, f"{name}_low", f"{name}_high"), (found.value, *found.interval), strict=True))

    lines = []
    for (k, control), loss_R in losses.items():
        random_R = losses.get((k, "random")) if control != "random" else None
        line = {"k": k, "control": control, **measured("loss", loss_R), **measured("delta", loss_R - clean_R)}
        line |= measured("excess", None if random_R is None else loss_R - random_R)
        line["relative"] = float((loss_R - clean_R).mean() / clean_R.mean())
        line |= {"mass": masses[k, control], "rows": rows, "tokens": tokens}
        lines.append(line | {"bits_per_byte": float(loss_R.mean()) * tokens / math.log(2) / text.size})
    return columns_of(lines)
