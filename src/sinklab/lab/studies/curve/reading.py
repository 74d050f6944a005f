"""The cost of blocking keys while text is read: the loss of held-out rows under every arm, as a
curve over the number of keys or as a map over layers and heads.
"""

# R rows, B batch, H query heads, E heads of all layers, S keys
import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from sinklab.core.instrument import (
    BlockKeys,
    Call,
    InterventionLog,
    Listener,
    Selector,
    SinkKeys,
    TopKeys,
)
from sinklab.core.instrument.call import real_queries_B1
from sinklab.core.registry import interventions
from sinklab.core.sinks import Gu, find_sinks
from sinklab.lab.analysis.doses import told_apart
from sinklab.lab.checkpoints import Loaded
from sinklab.lab.measures import MaskSinks
from sinklab.lab.measures.protocols import in_place_of
from sinklab.lab.records import Run
from sinklab.lab.scoring import EditedLosses, HeldoutRows, edited_losses, heldout_rows
from sinklab.lab.scoring.hidden_states import columns_of
from sinklab.lab.scoring.writing import is_random
from sinklab.lab.studies import (
    Arm,
    Block,
    Progress,
    Rows,
    Trial,
    check_fits,
    heldout_text,
    less_other,
    mean_table,
    wide,
)
from sinklab.lab.studies.curve.study import CELL, DOSE, CostStudy, CurveSettings

ARM = ["k", "control"]
"""k keys, and the keys blocked: "none"; "top", the most attended; "sinks", those of them that are
sinks by a rule; "matched", the same in the heads alone that have a control of equal mass; another
control; the text of an edit.
"""
CLEAN = (0, "none")
FIRST = (1, "top")
"""Arm in which every head loses the key that receives most."""
UNEDITED = (-1, -1)
AGAINST = {"top": "random", "sinks": "random", "matched": "equal_mass"}
"""Arm -> the control that its excess is over."""
ALONE = {"sinks", "equal_mass"}
"""Controls that do not need as many other keys beside the blocked ones."""


class Reading(CostStudy):
    """A study of the loss of held-out rows."""

    def text(self, loaded: Loaded, settings: CurveSettings) -> HeldoutRows:
        """The rows to score. Raises ValueError for a model without a mask token or a tokenizer, and
        rows that do not fit it.
        """
        check_fits(loaded, "curve", settings.length, "choose a smaller length")
        source = heldout_text(settings.heldout)
        return heldout_rows(loaded, source, rows=settings.rows or 0, length=settings.length)


class CostCurve(Reading):
    """Loss over the number of keys that are blocked in the whole model, and controls."""

    kind = "curve"
    row_tables = ("curve_rows", "phenomenon", "grown")
    keeps = True
    defaults: ClassVar = {
        "ks": (1, 2, 5, 10, 20),
        "controls": ("sinks", "random", "equal_mass"),
        "rows": 48,
        "batch": 16,
    }
    reads = ("sink_rule", "edits", "heldout", "length", "draws", "seed", "twin")

    def filled(self, settings: CurveSettings) -> CurveSettings:
        """The settings with defaults where they are left out; 0 keys are always scored."""
        found = super().filled(settings)
        return replace(found, ks=tuple(sorted({0, *found.ks})))

    def read_samples(
        self, loaded: Loaded, settings: CurveSettings, progress: Progress
    ) -> HeldoutRows:
        """The text to score, once the model is known to score it.

        Raises:
            ValueError: for a model without a mask token or a tokenizer, rows that do not fit its
                context, and a k that leaves no columns.
        """
        text = self.text(loaded, settings)
        keys = settings.length + loaded.added_sinks
        needs_others = bool({*settings.controls} - ALONE)
        most = keys - 1
        if needs_others:
            # as many others are the controls
            most = keys // 2
        if settings.ks[-1] > most:
            raise ValueError(
                f"k keys and their controls must leave something of the {keys} keys of a row, but "
                f"k is {settings.ks[-1]}; choose at most {most}, or a greater length"
            )
        return text

    def arms(self, loaded: Any, settings: CurveSettings, samples: Any) -> dict[Arm, list[Any]]:
        """Edits by (k, control), no edit first; those of all models and rows."""
        arms: dict[Arm, list[Any]] = {CLEAN: []}
        for k, control in itertools.product(settings.ks[1:], settings.controls):
            keys = _keys(k, settings.sink_rule)
            name = control
            if control == "sinks" and settings.sink_rule is None:
                name = "top"
            arms[k, name] = [BlockKeys(in_place_of(keys, control))]
            if control == "equal_mass":
                arms[k, "matched"] = [BlockKeys(in_place_of(keys, "matched"))]
        return arms | {(0, interventions.as_text(edit)): [edit] for edit in settings.edits}

    def steps(self, settings: CurveSettings, block: Block) -> int:
        """A pass for each arm and draw, and perhaps one to see what grows."""
        return len(block.arms) * settings.draws + 1

    def measure(self, trial: Trial) -> Rows:
        """Loss of each row under each arm, mean over draws, and the dose; table ``phenomenon``, and
        ``grown`` where a row has more than two tokens.
        """
        settings, loaded = trial.settings, trial.loaded
        drawn: dict[Arm, list[EditedLosses]] = {name: [] for name in trial.arms}
        strongest = StrongestKeys()
        # the first draw has the seed itself, so that it equals `row_losses`
        more = np.random.SeedSequence(settings.seed).generate_state(settings.draws, np.uint64) >> 2
        for draw, seed in enumerate([settings.seed, *map(int, more[1:])]):
            names = [*trial.arms]
            if draw and not loaded.is_diffusion:
                # without noise only random edits change from draw to draw
                names = [name for name in names if is_random(trial.arms[name])]
            edits = {name: trial.arms[name] for name in names}
            if not draw:
                # what grows, in an arm of its own if no other one is it
                edits[FIRST] = [MaskSinks(k=1), strongest]
            found = dict(zip(edits, _losses(trial, [*edits.values()], seed), strict=True))
            for name in names:
                drawn[name].append(found[name])
            if not draw:
                first = found[FIRST]
        frames = []
        for (k, control), some in drawn.items():
            each = [{"loss": one.losses_R, **one.doses_by_row()} for one in some]
            means = {
                name: torch.stack([one[name] for one in each]).double().mean(0)
                for name in ("loss", *DOSE)
            }
            frame = pd.DataFrame({"row": trial.rows, "k": k, "control": control, **means})
            if not any(any(one.removals) for one in some):
                frame[["keys", "held", "removed"]] = 0.0
            if not np.isfinite(frame["loss"]).all():
                raise ValueError(
                    f"{loaded.name} gave a loss that is no number at (k, control) {(k, control)}; "
                    "try another dtype"
                )
            frames.append(frame)
        first_RE, second_RE, sink_RE = torch.cat(strongest.batches).unbind(-1)
        columns = {"row": np.array(trial.rows), "main": first_RE.mean(1).numpy()}
        tables = {"phenomenon": pd.DataFrame(columns | {"gu": sink_RE.mean(1).numpy()})}
        if trial.samples.ids_RS.shape[1] > 2:
            added = loaded.added_sinks
            grown = grown_table(first, second_RE, added)
            tables["grown"] = grown.assign(row=grown["row"] + trial.rows.start)
        return tables | {"curve_rows": pd.concat(frames, ignore_index=True)}

    def contrasts(self, trial: Trial, rows: Rows) -> Rows:
        """The table ``curve``."""
        return {"curve": curve_table(rows["curve_rows"], trial.samples)}

    def sentences(self, runs: list[Run]) -> list[str]:
        """Costs in words."""
        from sinklab.lab.studies.curve.figures import masking_curve_sentences

        return masking_curve_sentences(runs)

    def draw(self, runs: list[Run], out: Path, options: Any) -> list[Path]:
        """Tables and figures of the costs."""
        from sinklab.lab.studies.curve.figures import draw_masking_curves

        return draw_masking_curves(runs, out, options)


class CostMap(Reading):
    """Loss with keys blocked in one layer or head at a time."""

    kind = "ablate"
    row_tables = ("ablation",)
    defaults: ClassVar = {
        "ks": (1,),
        "controls": ("sinks",),
        "removals": ("mask",),
        "rows": 48,
        "batch": 16,
    }
    reads = ("by", "sink_rule", "layers", "heldout", "length", "seed", "twin")

    def filled(self, settings: CurveSettings) -> CurveSettings:
        """The settings with defaults where they are left out. Raises ValueError for more than one
        k, control or removal.
        """
        found = super().filled(settings)
        for name in ("ks", "controls", "removals"):
            values = getattr(found, name)
            if len(values) > 1:
                raise ValueError(
                    f"a map by {settings.by} has one of {name}, got {values}; make a run for each"
                )
        return found

    def read_samples(
        self, loaded: Loaded, settings: CurveSettings, progress: Progress
    ) -> HeldoutRows:
        """The text to score, once the model is known to score it.

        Raises:
            ValueError: for a model without a mask token or a tokenizer, rows that do not fit its
                context, more keys than a row has, and layers that are not there.
        """
        text = self.text(loaded, settings)
        (k,) = settings.ks
        if not 1 <= k < settings.length:
            raise ValueError(
                f"k keys must be some and leave something of a row, but k is {k} and a row has "
                f"{settings.length} tokens; choose a smaller k"
            )
        layers, _ = layers_and_heads(loaded)
        absent = [layer for layer in settings.layers if layer not in layers]
        if absent:
            raise ValueError(
                f"{loaded.name} has layers 0 to {layers[-1]}, but no {absent[0]}; leave it out"
            )
        return text

    def arms(
        self, loaded: Loaded, settings: CurveSettings, samples: HeldoutRows
    ) -> dict[Arm, list[Any]]:
        """Edits by (layer, head), no edit first."""
        layers, heads = layers_and_heads(loaded)
        if settings.by == "layer":
            heads = range(-1, 0)
        keys = in_place_of(_keys(settings.ks[0], settings.sink_rule), settings.controls[0])
        how: Any = settings.removals[0]
        arms: dict[Arm, list[Any]] = {UNEDITED: []}
        for cell in itertools.product(settings.layers or layers, heads):
            layer, head = cell
            only = None
            if head >= 0:
                only = (head,)
            arms[cell] = [BlockKeys(keys, how=how, layers=(layer,), heads=only)]
        return arms

    def measure(self, trial: Trial) -> Rows:
        """Lines of the table ``ablation``: row; layer; head; loss and clean, nats per token with
        the keys blocked and without; and the dose of the row, over the heads that are edited.
        """
        found = _losses(trial, [*trial.arms.values()], trial.settings.seed)
        clean_R = found[0].losses_R.numpy()
        frames = []
        for (layer, head), one in zip(trial.arms, found, strict=True):
            if (layer, head) == UNEDITED:
                continue
            columns = {"row": np.array(trial.rows), "layer": layer, "head": head}
            columns |= {"loss": one.losses_R.numpy(), "clean": clean_R}
            doses = one.doses_by_row()
            columns |= {name: doses[name].numpy() for name in DOSE[:-1]}
            frames.append(pd.DataFrame(columns))
        return {"ablation": pd.concat(frames, ignore_index=True)}

    def contrasts(self, trial: Trial, rows: Rows) -> Rows:
        """The table ``map``."""
        return {"map": ablation_map(rows["ablation"])}

    def sentences(self, runs: list[Run]) -> list[str]:
        """Costs in words."""
        from sinklab.lab.studies.curve.figures import ablation_sentences

        return ablation_sentences(runs)

    def draw(self, runs: list[Run], out: Path, options: Any) -> list[Path]:
        """Tables and figures of the costs."""
        from sinklab.lab.studies.curve.figures import draw_ablation

        return draw_ablation(runs, out, options)


def _keys(k: int, rule: Any) -> Selector:
    """The k most attended keys, or those among them that a rule calls sinks."""
    if rule is None:
        return TopKeys(k)
    return SinkKeys(rule, k)


def layers_and_heads(loaded: Loaded) -> tuple[range, range]:
    """Numbers of the layers of a model, and of the heads of each."""
    backbone = loaded.backbone
    return range(backbone.num_hidden_layers), range(backbone.num_attention_heads)


class StrongestKeys(Listener):
    """The two keys of every head that receive most in clean passes: a listener that stands beside
    edits and changes nothing.
    """

    def __init__(self) -> None:
        self.batches: list[Tensor] = []
        """Of each pass, (B, E, 3): shares of attention (0 to 1) of the first key and the second,
        and 1 if the first is a sink by Gu et al.'s rule (arXiv 2410.10781), else 0.
        """
        self.discard()

    def handler(self, log: InterventionLog, forwards_per_step: int) -> Listener:
        """This listener itself."""
        self.log = log
        return self

    def observe(self, call: Call, out: Tensor) -> None:
        if not self.log.is_probing:
            return
        sinks_BHS = find_sinks(call.received_BHS, Gu(), call.visibility.visible_BHS)
        two_BH2 = call.received_BHS.topk(2, dim=-1)
        shares_BH2 = two_BH2.values / real_queries_B1(call).unsqueeze(-1)
        sink_BH1 = sinks_BHS.gather(-1, two_BH2.indices[..., :1])
        self.layers.append(torch.cat([shares_BH2, sink_BH1], -1).cpu())

    def finish(self) -> None:
        if self.layers:
            self.batches.append(torch.cat(self.layers, 1))
        self.discard()

    def discard(self) -> None:
        self.layers: list[Tensor] = []


def _losses(trial: Trial, edits: list[list[Any]], seed: int) -> list[EditedLosses]:
    """Losses of the rows of a trial, under the noise that they have among all rows."""
    return edited_losses(
        trial.loaded,
        trial.samples.ids_RS,
        edits,
        seed=seed,
        batch=len(trial.rows),
        only=trial.rows,
        progress=trial.step,
    )


def curve_table(rows: pd.DataFrame, text: HeldoutRows) -> pd.DataFrame:
    """The table ``curve``.

    loss: mean over rows, nats per token. delta: that less the loss with nothing blocked. excess:
    delta less that of as many random keys, or of "matched" less that of the keys of equal mass; NaN
    without them. low and high: ends of the 95 % interval over rows (`mean_over`), NaN with fewer
    than 8; differences are paired. relative: delta over the loss. keys, sinks, held, removed,
    matched: the dose (`Dose`), 0 removed if nothing is blocked. bits_per_byte: of the text,
    comparable across tokenizers.

    Rows are taken as independent; rows of one book are alike, so over other texts the spread is
    wider.

    Args:
        rows: the table ``curve_rows``.
        text: the rows of text.
    """
    arms = [*rows.groupby(ARM, sort=False).groups]
    others = {(k, control): (k, AGAINST.get(control)) for k, control in arms}
    rows = rows.assign(
        delta=less_other(rows, ARM, "loss", dict.fromkeys(arms, CLEAN)),
        excess=less_other(rows, ARM, "loss", others),
    )
    table = mean_table(rows, ARM, ("loss", "delta", "excess"), DOSE)
    clean = rows.loc[rows["control"] == "none", "loss"].mean()
    tokens = text.ids_RS.numel()
    return table.assign(
        relative=table["delta"] / clean,
        tokens=tokens,
        bits_per_byte=table["loss"] * tokens / math.log(2) / text.size,
    )


def grown_table(one: EditedLosses, second_RE: Tensor, added: int) -> pd.DataFrame:
    """The table ``grown``: change of the other keys of a head when its most attended one is
    blocked.

    A line per row of text, layer and head. before: share of the attention (0 to 1) on the strongest
    of the others with nothing blocked; after: on the strongest of them with one blocked; at: the
    text position of that one, below 0 for an added sink.

    Args:
        one: scores with one key of every head masked.
        second_RE: share of the second key of every head in the clean pass (`StrongestKeys`).
        added: added sinks in front of the text.
    """
    parts, start = [], 0
    for removals in one.removals:
        for record in removals:
            columns = columns_of(record)
            columns["row"] = columns["row"] + start
            parts.append(pd.DataFrame(columns))
        start += len(removals[0]["keys"])
    first = pd.concat(parts).set_index(["row", "layer", "head"]).sort_index()
    table = pd.DataFrame({"before": second_RE.flatten().numpy(), "after": first["strongest"]})
    table["at"] = first["strongest_at"].astype(int) - added
    return table.reset_index()


def ablation_map(rows: pd.DataFrame) -> pd.DataFrame:
    """A line per cell: means over rows of loss, delta (loss less clean) with its 95 % interval, and
    the dose.

    told: 1 if the delta is above zero, −1 if it is below, 0 if inconclusive (`told_apart`).
    """
    rows = rows.assign(delta=rows["loss"] - rows["clean"]).sort_values(CELL, kind="stable")
    table = mean_table(rows, CELL, ("delta",), ("loss", *DOSE[:-1]))
    return table.assign(told=told_apart(wide(rows, CELL, "delta").to_numpy()))
