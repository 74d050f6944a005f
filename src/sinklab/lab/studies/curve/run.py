"""The loss of held-out text over the number of blocked columns: the cheap stand-in for benchmarks,
for any model.
"""

# R rows
import math
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
import torch

from sinklab.core.probing.dose import Dose
from sinklab.core.probing.interventions.mask_sinks import MaskSinks
from sinklab.core.registry import interventions
from sinklab.core.sinks.rules import Gu
from sinklab.lab.analysis.estimates import mean_over
from sinklab.lab.checkpoints.loading import Loaded
from sinklab.lab.records.info import of_twin
from sinklab.lab.scoring.heldout import EditedLosses, HeldoutRows, edited_losses, heldout_rows
from sinklab.lab.scoring.writing import is_random
from sinklab.lab.studies import twins
from sinklab.lab.studies.base import Work, check_fits, columns_of, heldout_text
from sinklab.lab.studies.curve.study import CurveSettings
from sinklab.lab.studies.processes import Progress

Choice = tuple[int, str]
"""k keys, and the keys blocked: "none"; "top", the most attended; "sinks", those of them that are
sinks by a rule; "matched", the same in the heads alone that have a control of equal mass; another
control of `MaskSinks`; the text of an edit.
"""
AGAINST = {"top": "random", "sinks": "random", "matched": "equal_mass"}
"""Arm -> the control that its excess is over."""
DOSE = ("columns", "sinks", "held", "removed", "matched")


def score(work: Work) -> None:
    """Write the tables of a curve, and those of the model's untrained twins."""
    started = time.perf_counter()
    work.progress.stage(
        f"scoring {len(work.plan.ids_RS)} rows of {work.settings.length} tokens with "
        f"{work.loaded.name}"
    )
    write_scores(work, work.loaded)
    taken = time.perf_counter() - started
    twins.write_twins(work, lambda: taken, lambda twin, kind: write_scores(work, twin, kind))


def write_scores(work: Work, loaded: Loaded, kind: str = "") -> None:
    """Write the tables of a model, or of its twin of a kind."""
    settings, text = work.settings, work.plan
    losses, doses = _scored(loaded, text, settings, work.progress)
    work.run.table(of_twin("curve", kind), curve_table(losses, doses, text))
    rows = len(text.ids_RS)
    columns = {
        "row": np.tile(np.arange(rows), len(losses)),
        "k": np.repeat([k for k, _ in losses], rows),
    }
    columns["control"] = np.repeat(np.array([control for _, control in losses], dtype=object), rows)
    work.run.table(
        of_twin("curve_rows", kind), {**columns, "loss": np.concatenate(list(losses.values()))}
    )
    # Gu et al.'s metric (arXiv 2410.10781), of the key that receives most
    looks = [[MaskSinks(k=1, counted_by=Gu())]]
    if text.ids_RS.shape[1] > 2:
        # with two keys masked the attention of the second one is known
        looks.append([MaskSinks(k=2)])
    count = work.progress.counter(len(looks) * math.ceil(rows / settings.batch))
    found = edited_losses(
        loaded, text.ids_RS, looks, seed=settings.seed, batch=settings.batch, progress=count
    )
    seen = found[0].doses_by_row()
    columns = {"row": np.arange(rows), "main": seen["held"].numpy(), "gu": seen["sinks"].numpy()}
    work.run.table(of_twin("phenomenon", kind), columns)
    if len(found) > 1:
        added = getattr(loaded.model.config, "sink_count", 0)
        work.run.table(of_twin("grown", kind), grown_table(found[0], found[1], added))


def grown_table(one: EditedLosses, two: EditedLosses, added: int) -> pd.DataFrame:
    """The table ``grown``: change of the other keys of a head when its most attended one is masked.

    A line per row of text, layer and head. before: share of the attention (0 to 1) on the strongest
    of the others with nothing masked; after: on the strongest of them with one masked; at: the text
    position of that one, below 0 for an added sink.

    Args:
        one: scores with one key of every head masked.
        two: the same with two.
        added: added sinks in front of the text.
    """
    first, second = _by_head(one), _by_head(two)
    table = pd.DataFrame({"before": second["mass"] - first["mass"], "after": first["strongest"]})
    table["at"] = first["strongest_at"].astype(int) - added
    return table.reset_index()


def _by_head(scored: EditedLosses) -> pd.DataFrame:
    """The numbers of every `RemovalRecord`, by row of text, layer and head."""
    parts, start = [], 0
    for removals in scored.removals:
        for record in removals:
            columns = record.columns()
            columns["row"] = columns["row"] + start
            parts.append(pd.DataFrame(columns))
        start += len(removals[0].removed_BLH)
    return pd.concat(parts).set_index(["row", "layer", "head"]).sort_index()


def prepare(loaded: Loaded, settings: CurveSettings, progress: Progress) -> HeldoutRows:
    """The text to score, once the model is known to score it.

    Raises:
        ValueError: for a model without a mask token or a tokenizer, rows that do not fit its
            context, and a k that leaves no columns.
    """
    loaded.needed_tokenizer()
    check_fits(loaded, "curve", settings.length, "choose a smaller length")
    keys = settings.length + getattr(loaded.model.config, "sink_count", 0)
    alone = not {*settings.controls} - {"sinks", "equal_mass"}
    most = keys - 1 if alone else keys // 2
    if settings.ks[-1] > most:
        others = "" if alone else " and as many others as controls"
        raise ValueError(
            f"k keys{others} must leave something of the {keys} keys of a row, but k is "
            f"{settings.ks[-1]}; choose at most {most}, or a greater length"
        )
    return heldout_rows(
        loaded, heldout_text(settings.heldout), rows=settings.rows, length=settings.length
    )


def arms_of(settings: CurveSettings) -> dict[Choice, list[Any]]:
    """Edits of every pass, no edit first."""
    arms: dict[Choice, list[Any]] = {(0, "none"): []}
    for k in settings.ks[1:]:
        for control in settings.controls:
            how: dict[str, Any] = {"k": k, "rule": settings.sink_rule}
            name = "top" if control == "sinks" and settings.sink_rule is None else control
            arms[k, name] = [MaskSinks(**how, control=control)]
            if control == "equal_mass":
                arms[k, "matched"] = [MaskSinks(**how, matched=True)]
    return arms | {(0, interventions.as_text(edit)): [edit] for edit in settings.edits}


def _scored(
    loaded: Loaded, text: HeldoutRows, settings: CurveSettings, progress: Progress
) -> tuple[dict[Choice, np.ndarray], dict[Choice, Dose]]:
    """Loss of every row, (R,), mean over draws, and the dose, by choice."""
    arms = arms_of(settings)
    # without noise only random edits change from draw to draw
    redrawn = [choice for choice in arms if loaded.family == "diffusion" or is_random(arms[choice])]
    batches = math.ceil(len(text.ids_RS) / settings.batch)
    count = progress.counter((len(arms) + len(redrawn) * (settings.draws - 1)) * batches)
    drawn: dict[Choice, list[EditedLosses]] = {choice: [] for choice in arms}
    for draw, seed in enumerate(_seeds(settings)):
        some = redrawn if draw else [*arms]
        if some:
            edits = [arms[choice] for choice in some]
            found = edited_losses(
                loaded, text.ids_RS, edits, seed=seed, batch=settings.batch, progress=count
            )
            for choice, one in zip(some, found, strict=True):
                drawn[choice].append(one)
    losses = {
        choice: torch.stack([one.losses_R for one in of_choice]).double().mean(0).numpy()
        for choice, of_choice in drawn.items()
    }
    if wrong := [choice for choice, loss_R in losses.items() if not np.isfinite(loss_R).all()]:
        raise ValueError(
            f"{loaded.name} gave a loss that is no number at (k, control) {wrong[0]}; try another "
            "dtype"
        )
    return losses, {
        choice: Dose.pooled(one.dose for one in of_choice) for choice, of_choice in drawn.items()
    }


def _seeds(settings: CurveSettings) -> list[int]:
    """Seeds of the draws; the first has the seed itself, so that it equals `row_losses`."""
    more = np.random.SeedSequence(settings.seed).generate_state(settings.draws, np.uint64) >> 2
    return [settings.seed, *map(int, more[1:])]


def curve_table(
    losses: Mapping[Choice, np.ndarray], doses: Mapping[Choice, Dose], text: HeldoutRows
) -> dict[str, list[Any]]:
    """The columns of the table ``curve``.

    loss: mean over rows, nats per token. delta: that less the loss with nothing blocked. excess:
    delta less that of as many random keys, or of "matched" less that of the keys of equal mass; NaN
    without them. low and high: ends of the 95 % interval over rows (`mean_over`), NaN with fewer
    than 8; differences are paired. relative: delta over the loss. columns, sinks, held, removed,
    matched: the dose (`Dose`), 0 removed if nothing is blocked. bits_per_byte: of the text,
    comparable across tokenizers.

    Rows are taken as independent; rows of one book are alike, so over other texts the spread is
    wider.
    """
    clean_R = losses[0, "none"]
    rows, tokens = len(clean_R), text.ids_RS.numel()

    def measured(name: str, values_R: np.ndarray | None) -> dict[str, float]:
        found = mean_over([] if values_R is None else values_R)
        return dict(
            zip((name, f"{name}_low", f"{name}_high"), (found.value, *found.interval), strict=True)
        )

    lines = []
    for (k, control), loss_R in losses.items():
        other_R = losses.get((k, AGAINST.get(control, "")))
        line = {
            "k": k,
            "control": control,
            **measured("loss", loss_R),
            **measured("delta", loss_R - clean_R),
        }
        line |= measured("excess", None if other_R is None else loss_R - other_R)
        line["relative"] = float((loss_R - clean_R).mean() / clean_R.mean())
        dose = doses[k, control].row()
        dose |= {} if doses[k, control].weight else {"columns": 0.0, "held": 0.0, "removed": 0.0}
        line |= {name: dose[name] for name in DOSE} | {"rows": rows, "tokens": tokens}
        lines.append(
            line | {"bits_per_byte": float(loss_R.mean()) * tokens / math.log(2) / text.size}
        )
    return columns_of(lines)
