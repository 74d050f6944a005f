"""Costs of edits on some texts, position by position: `LM.compare` and its result."""

# T texts
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Any, cast

import numpy as np
import pandas as pd

from sinklab.core.instrument import BlockKeys, Intervention
from sinklab.core.registry import interventions
from sinklab.lab.analysis.differences import effects
from sinklab.lab.analysis.estimates import FEWEST, mean_over
from sinklab.lab.analysis.words import CONTROLS, counted
from sinklab.lab.checkpoints.controls import UNTRAINED
from sinklab.lab.checkpoints.loading import Loaded
from sinklab.lab.measures.controls import other_arm
from sinklab.lab.scoring.arms import (
    arm_losses,
    heldout_rows,
    without_closing,
)
from sinklab.lab.scoring.prompts import ids_to_score
from sinklab.lab.scoring.requests import check_ids, check_positions, limit_of, scoring_edits
from sinklab.lab.studies.settings import heldout_text

NONE = "none"
"""Arm without edits, which every comparison has."""
TEXTS, LENGTH = 8, 64
"""Texts that are compared when none are given, and tokens of each."""
DOSES = ("removed", "regrown")
"""What is known of an arm beside its losses."""
Edits = Intervention | str | Sequence[Intervention | str]


@dataclass(frozen=True)
class Summary:
    """Results of a comparison: sentences when printed, and numbers."""

    sentences: tuple[str, ...]
    table: pd.DataFrame
    """A line per arm less no edit, then per pair of the first arm and another, as `effects` makes
    them of nats per token; beside them the means of nats, removed and regrown. The verdict is
    costs, helps or inconclusive.
    """

    def __str__(self) -> str:
        return "\n".join(self.sentences)

    def _repr_html_(self) -> str:
        paragraphs = "".join(f"<p>{escape(sentence)}</p>" for sentence in self.sentences)
        return paragraphs + self.table.to_html(index=False)


@dataclass(frozen=True, repr=False)
class Comparison:
    """Losses of texts under several arms, by position; returned by ``lm.compare``."""

    rows: pd.DataFrame
    baselines: dict[str, str]
    """Arm -> the arm without edits of the same model."""

    def __repr__(self) -> str:
        arms = ", ".join(self.rows["arm"].unique())
        return f"Comparison ({arms}; {self.rows['text'].nunique()} texts)"

    def _repr_html_(self) -> str:
        return self.summary()._repr_html_()

    def to_pandas(self) -> pd.DataFrame:
        """A row per arm, text and position: nats, the loss of the token there; and of the arm on
        the whole text, removed, the share of attention (0 to 1) that its edits took away, and
        regrown, the share of heads (0 to 1) in which another key became a sink: the strongest key
        under the edits holds more than 30 % of the attention, and held less without them; NaN for
        edits of hidden states, which take no key away.
        """
        return self.rows.copy()

    def summary(self) -> Summary:
        """Cost of each arm, and whether the first costs more than the others (`effects`).

        The sample is the text: with fewer than 8 texts a cost has no interval and no verdict.
        """
        first, base = next(iter(self.baselines.items()))
        pairs = [*self.baselines.items()]
        pairs += [(first, arm) for arm, other in pairs[1:] if other == base]
        doses = ("nats", *DOSES)
        how: dict[str, Any] = {"unit": "text", "pairs": pairs, "words": ("costs", "helps")}
        table = effects(self.rows, "nats", doses=doses, **how)
        is_pair = table["less"] != table["arm"].map(self.baselines)
        lines = zip(table.to_dict("records"), is_pair, strict=True)
        return Summary(tuple(_sentence(line, is_pair=pair) for line, pair in lines), table)

    def plot(self, axes: Any = None) -> Any:
        """Draw the cost of each arm over positions, means over texts with 95 % intervals; returns
        the axes.
        """
        from sinklab.lab.reports.drawing import draw_lines, finish, own_axes
        from sinklab.lab.reports.style import themed

        parts = []
        nats = self.rows.set_index(["arm", "text", "position"])["nats"]
        for arm in self.baselines:
            costs = (nats[arm] - nats[self.baselines[arm]]).unstack("text").dropna(how="all")
            estimates = [mean_over(costs_T) for costs_T in costs.to_numpy()]
            low, high = np.transpose([one.interval for one in estimates])
            means = [one.value for one in estimates]
            about = {"run": "", "line": arm, "position": costs.index, "value": means}
            parts.append(pd.DataFrame(about | {"low": low, "high": high}))
        with themed():
            drawn = axes or own_axes(4.8, 3.2)
            draw_lines(drawn, pd.concat(parts))
            drawn.set(xlabel="position", ylabel="cost, nats per token")
            finish(drawn, grow=axes is None)
        return drawn


def _sentence(line: dict[str, Any], *, is_pair: bool) -> str:
    parts = [counted(line["n"], "text")]
    is_interval = not math.isnan(line["low"])
    if is_interval:
        parts.append(f"95 % {line['low']:+.3f} … {line['high']:+.3f}")
    else:
        parts.append(f"{FEWEST} needed for a verdict")
    if line["caution"]:
        parts.append(line["caution"])
    number = f"{line['mean']:+.3f} nats per token ({', '.join(parts)})".replace("-", "−")
    words = {"costs": "costs more than", "helps": "costs less than"}
    if is_pair:
        said = words.get(line["verdict"], "is not distinguishable from")
        if not is_interval:
            said = "against"
        return f"{line['arm']} {said} {line['less']}: {number}."
    if is_interval:
        number += f", {line['verdict']}"
    if math.isnan(line["removed"]):
        return f"{line['arm']}: {number}."
    return (
        f"{line['arm']}: {number}; {100 * line['removed']:.1f} % of the attention removed, "
        f"a new sink in {100 * line['regrown']:.1f} % of heads."
    )


def compare(
    lm: Loaded,
    arms: Mapping[str, Edits],
    texts: Sequence[str | Sequence[int]] | None,
    *,
    read: str | Sequence[int] = "all",
    samples: int = 32,
    seed: int = 0,
    controls: bool = False,
    progress: Callable[[str], object] | None = None,
) -> Comparison:
    """The comparison that `LM.compare` describes."""
    if (
        not isinstance(arms, Mapping)
        or not arms
        or NONE in arms
        or not all(isinstance(name, str) for name in arms)
    ):
        raise ValueError(
            f"a comparison needs arms {{name: edits}}, and {NONE!r} is always one; got "
            f"{', '.join(map(repr, arms)) or 'no arm'}"
        )
    if texts is None:
        rows = heldout_rows(lm, heldout_text(None), rows=TEXTS, length=LENGTH)
        texts = rows.ids_RS.tolist()
    if isinstance(texts, str) or not len(texts):
        raise ValueError("texts must be several, and each of them a text or a list of ids")
    models = {"": lm}
    if controls:
        models |= {f" ({CONTROLS[kind]})": make(lm, seed) for kind, make in UNTRAINED.items()}
    # the sample is the text: one that is given twice counts once
    every = [_ids_of(lm, text, number) for number, text in enumerate(texts)]
    encoded = [*map(list, dict.fromkeys(map(tuple, every)))]
    _check_read(read, max(map(len, encoded)))
    frames, baselines = [], {}
    for suffix, model in models.items():
        is_diffusion = model.family == "diffusion"
        edits: dict[str, tuple[Intervention, ...]] = {NONE + suffix: ()}
        for name, given in arms.items():
            if name + suffix in baselines:
                raise ValueError(
                    f"{name + suffix!r} is the name of an arm and of a control; rename the arm"
                )
            several = [given] if isinstance(given, str) or hasattr(given, "handler") else given
            edits[name + suffix] = scoring_edits(several, is_diffusion=is_diffusion)
            baselines[name + suffix] = NONE + suffix
            check_positions(edits[name + suffix], [len(ids) for ids in encoded])
        _check_both_arms(edits)
        for one in arm_losses(model, edits, encoded, read=read, samples=samples, seed=seed):
            if progress is not None and one.arm == NONE + suffix:
                progress(f"text {one.text + 1} of {len(encoded)}{suffix}")
            columns = {"arm": one.arm, "text": one.text, "position": one.position_P}
            columns |= {"nats": one.nats_P}
            frames.append(pd.DataFrame(columns | {dose: one.about[dose] for dose in DOSES}))
    return Comparison(pd.concat(frames, ignore_index=True), baselines)


def _check_both_arms(edits: Mapping[str, Sequence[Intervention]]) -> None:
    """Raise ValueError for one arm of a comparison at equal mass without the other: each is over
    the heads alone that have a control, so that nothing else is comparable with it.
    """
    every = [edit for some in edits.values() for edit in some]
    for name, some in edits.items():
        for edit in some:
            keys = None
            if isinstance(edit, BlockKeys):
                keys = other_arm(edit.keys)
            if keys is None:
                continue
            other = replace(cast("BlockKeys", edit), keys=keys)
            if other not in every:
                missing = interventions.as_text(other)
                raise ValueError(
                    f"the arm {name!r} is over the heads alone that have a control of equal mass, "
                    f"and the other arm over the same heads is not there: give {missing!r} too"
                )


def _ids_of(lm: Loaded, text: str | Sequence[int], number: int) -> list[int]:
    ids = ids_to_score(lm, text)
    limit = limit_of(lm)
    if not 2 <= len(ids) <= limit:
        raise ValueError(
            f"a text to compare has 2 to {limit} tokens with {lm.name}, but one has {len(ids)}; "
            "cut it"
        )
    check_ids(lm, f"text {number}", (), without_closing(lm.model, ids))
    return ids


def _check_read(read: str | Sequence[int], length: int) -> None:
    """Raise ValueError for positions that no text has."""
    for one in () if isinstance(read, str) else read:
        if isinstance(one, bool) or one not in range(length):
            raise ValueError(
                f"read names positions of the texts, 0 to {length - 1} here, but {one!r} is none"
            )
