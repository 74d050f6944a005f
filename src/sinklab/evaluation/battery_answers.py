"""Answers to a batch of battery problems under one condition and one intervention, and what that took away."""

# B batch rows, L layers, H heads
from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from sinklab.data.battery import Problem, is_right
from sinklab.evaluation.battery_settings import Condition, hidden_edit
from sinklab.evaluation.prompts import encode
from sinklab.evaluation.row_writers import Asked, ContinuingRows, DenoisingRows
from sinklab.evaluation.text_ends import ended, stop_ids
from sinklab.models import Loaded
from sinklab.probing import InterventionLog, MaskSinks, intervene, parse_edit


@dataclass(frozen=True)
class Cell:
    """One part of a run: a skill and level under a condition, with k columns hidden."""

    condition: Condition
    control: str
    k: int
    skill: str
    level: int

    @property
    def facts(self) -> dict[str, Any]:
        """What every row of its tables begins with."""
        names = {"condition": self.condition.name, "control": self.control, "k": self.k}
        return names | {"skill": self.skill, "level": self.level}

    def edits(self, loaded: Loaded, seed: int) -> tuple[Any, ...]:
        """Its interventions, those of the condition first; draws follow from the seed."""
        specs = (*self.condition.edits, *hidden_edit(self.control, self.k, by_last_row=loaded.family != "diffusion"))
        edits = map(parse_edit, specs)
        return tuple(replace(edit, seed=seed) if isinstance(edit, MaskSinks) else edit for edit in edits)

    def misfit(self, keys: int) -> str | None:
        """Why so many columns cannot be hidden from texts with so many keys at the first choice; None where they can.

        Args:
            keys: of the shortest text.
        """
        drawn = "random" in self.control
        # a control takes as many columns again beside the sinks it stands for
        if not self.k or (self.k < keys and (not drawn or 2 * self.k <= keys)):
            return None
        return f"{self.k} {'random columns beside as many sinks' if drawn else 'columns'} of {keys}"


@dataclass
class Removed:
    """Adds up, layer by layer, what hiding columns took away; only steps and rows that were still being written count.

    Sums over layers are (L,) float64.
    """

    sums: dict[str, Tensor] = field(default_factory=dict)
    counts: dict[str, Tensor] = field(default_factory=dict)

    def add(self, log: InterventionLog, active_B: Tensor) -> None:
        """One step; what the log holds is read and dropped."""
        for removal in log.removals:
            if not isinstance(removal.edit, MaskSinks):
                continue
            keys_BLH = removal.removed_BLH + removal.left_BLH
            facts = {
                "share": removal.realised_BLH,
                "mass": removal.mass_BLH,
                "overlap": removal.overlap_BLH,
                "keys": removal.removed_BLH,
                "of_keys": removal.removed_BLH / keys_BLH,
            }
            for name, value_BLH in facts.items():
                known_BLH = ~value_BLH.isnan() & active_B[:, None, None]
                self._add(name, value_BLH.double().masked_fill(~known_BLH, 0).sum((0, 2)), known_BLH.sum((0, 2)))
        log.removals.clear()

    def _add(self, name: str, sum_L: Tensor, count_L: Tensor) -> None:
        self.sums[name] = self.sums.get(name, 0) + sum_L
        self.counts[name] = self.counts.get(name, 0) + count_L

    def rows(self) -> list[dict[str, Any]]:
        """Means by layer, none where nothing was taken away; a mean over nothing is None."""
        layers = len(next(iter(self.sums.values()), ()))
        return [
            {"layer": layer}
            | {
                name: float(sum_L[layer] / count) if (count := int(self.counts[name][layer])) else None
                for name, sum_L in self.sums.items()
            }
            for layer in range(layers)
        ]


def asked_of(loaded: Loaded, problems: Sequence[Problem], seed: int) -> list[Asked]:
    """The questions as the model reads them."""
    return [Asked(encode(loaded, problem.question).ids, (), seed) for problem in problems]


def keys_at_first(loaded: Loaded, asked: Sequence[Asked], new_tokens: int) -> int:
    """Keys of the shortest text where columns are first chosen: of a canvas, or of a prompt that is read."""
    shortest = min(len(request.ids) for request in asked)
    config: Any = loaded.model.config
    return shortest + (new_tokens + config.sink_count if loaded.family == "diffusion" else 0)


def answer(
    loaded: Loaded, cell: Cell, problems: Sequence[Problem], new_tokens: int, seed: int, removed: Removed
) -> list[dict[str, Any]]:
    """Write the answers to some problems in one batch, of unequal lengths if need be.

    A row is what it would be alone, but for a random control or order, whose draws depend on the batch.

    Args:
        removed: what was taken away is added to it.

    Returns:
        per problem: question, answer, written (up to the end of text), right, ended (whether there was an end of text)
        and steps (model evaluations while it was being written).

    Raises:
        ValueError: for what the decoder, the model or the interventions refuse.
    """
    asked, edits = asked_of(loaded, problems, seed), cell.edits(loaded, seed)
    kind: Any = DenoisingRows if loaded.family == "diffusion" else ContinuingRows
    steps_B = torch.zeros(len(asked), dtype=torch.int64)
    # every answer may end with its first step: "steps" of the rows tells
    with intervene(loaded.model, *edits, allow_idle=True) if edits else nullcontext() as log:
        asking = log if any(getattr(edit, "source", None) == "clean_pass" for edit in edits) else None
        writing = kind(loaded, asked, cell.condition.decoding(seed), new_tokens, asking)
        for active_B, _ in writing.steps():
            steps_B += active_B
            if log is not None:
                removed.add(log, active_B)
    stops = stop_ids(loaded)
    rows = []
    for row, problem in enumerate(problems):
        ids = writing.row(row)
        _, text = ended(loaded, ids, ())
        # vocabularies of whole words begin them with a space
        written = text.strip()
        rows.append(
            {
                "question": problem.question,
                "answer": problem.answer,
                "written": written,
                "right": is_right(problem, written),
                "ended": bool(stops & set(ids)),
                "steps": int(steps_B[row]),
            }
        )
    return rows
