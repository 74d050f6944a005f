"""The reasoning battery: problems of every skill and level, answered with and without keys
blocked.
"""

# B batch rows, L layers, H heads
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from sinklab.core.probing import BlockKeys, InterventionLog
from sinklab.lab.analysis.intervals import mcnemar, paired_share_interval, wilson
from sinklab.lab.checkpoints import Loaded
from sinklab.lab.data import Problem, is_right, problems
from sinklab.lab.measures import by_protocol
from sinklab.lab.scoring import (
    Writing,
    WritingRequest,
    by_last_query,
    encode,
    ended,
    stop_ids,
    write_batch,
)
from sinklab.lab.studies import (
    Arm,
    Block,
    Progress,
    Row,
    Rows,
    Tick,
    Trial,
    check_fits,
    less_other,
    nothing,
    request_number,
)
from sinklab.lab.studies.battery.study import ALL, BESIDE, CONTROLS, BatterySettings, Condition

ARM = ["condition", "control", "k"]
"""Columns that name the way in which problems were answered."""
Problems = dict[tuple[str, int], tuple[Problem, ...]]
"""Problems by skill and level."""

WATCHED = 4
"""Problems of each skill and level that are answered once more, with nothing blocked, to see
whether there are sinks.
"""


@dataclass(frozen=True)
class Cell:
    """One arm and its problems: a skill and level under a condition, with k keys blocked."""

    condition: Condition
    control: str
    k: int
    skill: str
    level: int
    problems: tuple[Problem, ...] = ()
    rule: Any = None
    """Rule for sinks."""

    @property
    def facts(self) -> Row:
        """First columns of every row of its tables."""
        names = {"condition": self.condition.name, "control": self.control, "k": self.k}
        return names | {"skill": self.skill, "level": self.level}

    def edits(self, loaded: Loaded, seed: int) -> tuple[Any, ...]:
        """Interventions of the cell, those of the condition first; draws follow from the seed."""
        if not self.k:
            return self.condition.edits
        control, protocol = CONTROLS[self.control]
        edit = by_protocol(protocol, self.k, self.rule, control=control, seed=seed)
        edits = (*self.condition.edits, edit)
        if not loaded.is_diffusion:
            edits = by_last_query(edits)
        return edits

    def misfit(self, loaded: Loaded, new_tokens: int) -> str | None:
        """Reason why so many keys cannot be blocked in the first step that chooses keys; None if
        they can.
        """
        if not self.k:
            return None
        config = loaded.config
        # keys of a canvas, or of a prompt that is read
        keys = min(len(request.ids) for request in asked_of(loaded, self.problems, 0))
        if loaded.is_diffusion:
            keys += new_tokens + config.sink_count
        # a control takes as many keys again beside the sinks it stands for
        if "random" in self.control and 2 * self.k > keys:
            return f"{self.k} random keys beside as many others of {keys}"
        if self.k >= keys:
            return f"{self.k} keys of {keys}"
        return None


@dataclass
class Removed:
    """Adds up, by layer, the dose of blocked keys; only steps and rows that were still being
    written count.
    """

    sums: dict[str, Tensor] = field(default_factory=dict)
    """Name -> sums and counts, (2, L) float64."""

    def add(self, log: InterventionLog, active_B: Tensor) -> None:
        """Add one step; the removals in the log are read and dropped."""
        for removal in log.removals:
            if not isinstance(removal.edit, BlockKeys):
                continue
            before_BLH = removal.keys_BLH + removal.left_BLH
            facts = {
                "share": removal.removed_BLH,
                "mass": removal.held_BLH,
                "overlap": removal.overlap_BLH,
                "keys": removal.keys_BLH,
                "of_keys": removal.keys_BLH / before_BLH,
                "chosen": removal.chosen_BLH,
                "sinks": removal.sinks_BLH,
                "matched": removal.matched_BLH,
            }
            for name, value_BLH in facts.items():
                known_BLH = ~value_BLH.isnan() & active_B[:, None, None]
                both = torch.stack(
                    [value_BLH.double().masked_fill(~known_BLH, 0), known_BLH.double()]
                )
                self.sums[name] = self.sums.get(name, 0) + both.sum((1, 3))
        log.removals.clear()

    def rows(self) -> list[Row]:
        """Means by layer, none if nothing was removed; a mean over nothing is None."""
        sums = self.sums.items()
        means = pd.DataFrame({name: (total / count).numpy() for name, (total, count) in sums})
        rows = means.astype(object).where(means.notna(), None)
        return rows.rename_axis("layer").reset_index().to_dict("records")


def asked_of(loaded: Loaded, problems: Sequence[Problem], seed: int) -> list[WritingRequest]:
    """The questions as the model reads them."""
    return [WritingRequest(encode(loaded, problem.question).ids, (), seed) for problem in problems]


def answer(
    loaded: Loaded,
    cell: Cell,
    problems: Sequence[Problem],
    new_tokens: int,
    seed: int,
    removed: Removed,
    progress: Tick = nothing,
) -> list[Row]:
    """Write the answers to some problems in one batch, of unequal lengths if need be.

    A row is the same as alone, but for a random control or order: its draws depend on the batch.

    Args:
        removed: the dose is added to it.
        progress: called after every step.

    Returns:
        per problem: question, answer, written (up to the end of text), right, ended (whether there
        was an end of text) and steps (model evaluations while it was being written).

    Raises:
        ValueError: for anything that the decoder, the model or the interventions refuse.
    """
    asked = asked_of(loaded, problems, seed)
    edits = cell.edits(loaded, seed)
    steps_B = torch.zeros(len(asked), dtype=torch.int64)
    with Writing(loaded, asked, cell.condition.decoding(seed), new_tokens, edits).begin() as writer:
        for step in writer.steps():
            steps_B += step.active_B
            removed.add(writer.log, step.active_B)
            progress()
    stops = stop_ids(loaded)
    rows = []
    for row, problem in enumerate(problems):
        ids = writer.row(row)
        # vocabularies of whole words begin them with a space
        text = ended(loaded, ids, ())[1].strip()
        answered = {
            "question": problem.question,
            "answer": problem.answer,
            "written": text,
            "right": is_right(problem, text),
            "ended": not stops.isdisjoint(ids),
            "steps": int(steps_B[row]),
        }
        rows.append(answered)
    return rows


def read_samples(loaded: Loaded, settings: BatterySettings, progress: Progress) -> Problems:
    """The problems by skill and level.

    Raises:
        ValueError: for a model without tokenizer or mask token, a condition of the other kind of
            model, and questions that do not fit.
    """
    for name in settings.conditions:
        condition = Condition.named(name)
        if (condition.order is not None) != loaded.is_diffusion:
            raise ValueError(
                "greedy is the condition of an autoregressive model, the others are for those that "
                f"denoise, but {loaded.name} is {loaded.family}, got {name!r}; give another"
            )
        if condition.block_length is not None and settings.new_tokens % condition.block_length:
            raise ValueError(
                f"blocks must divide the {settings.new_tokens} new tokens evenly, got {name!r}; "
                "choose another length, e.g. blocks-6"
            )
    loaded.needed_tokenizer()
    how = {"seed": settings.seed}
    found = {}
    for skill, level in itertools.product(settings.skills, settings.levels):
        some = problems("test", settings.problems, skills=(skill,), levels=(level,), **how)
        found[skill, level] = tuple(some)
    requests = asked_of(loaded, [problem for some in found.values() for problem in some], 0)
    longest = max(len(request.ids) for request in requests) + settings.new_tokens
    check_fits(loaded, "battery", longest, "ask for lower levels or fewer new tokens")
    return found


def arms(loaded: Loaded, settings: BatterySettings, samples: Problems) -> dict[Arm, Cell]:
    """Cells by condition, control, k, skill and level."""
    found = {}
    for name in settings.conditions:
        for (control, k), (kind, some) in itertools.product(settings.hidings(), samples.items()):
            cell = Cell(Condition.named(name), control, k, *kind, some, settings.sink_rule)
            found[name, control, k, *kind] = cell
    return found


def blocks(settings: BatterySettings, samples: Problems, arms: Sequence[Arm]) -> list[Block]:
    """A block for each cell."""
    found = []
    for name in arms:
        condition, control, k, *kind = name
        blocked = "nothing blocked"
        if k:
            blocked = f"{k} blocked, {control}"
        found.append(Block((name,), range(len(samples[*kind])), f"{condition}, {blocked}"))
    return found


def measure(trial: Trial) -> Rows:
    """Rows of the tables ``removed`` and ``answers`` of a cell; of a cell too short for k keys, of
    ``skipped``.
    """
    (cell,) = trial.arms.values()
    settings = trial.settings
    removed = Removed()
    why = cell.misfit(trial.loaded, settings.new_tokens)
    if why is not None:
        return {"skipped": pd.DataFrame([cell.facts | {"why": why}])}
    rows = []
    for start in range(trial.rows.start, trial.rows.stop, settings.batch):
        # the same draws whatever the condition and however many keys, so that these alone differ
        seed = request_number(settings.seed, f"{cell.skill} {cell.level} {start}")
        some = cell.problems[start : min(start + settings.batch, trial.rows.stop)]
        rows += answer(trial.loaded, cell, some, settings.new_tokens, seed, removed, trial.step)
    found = {}
    taken = removed.rows()
    if taken:
        found["removed"] = pd.DataFrame([cell.facts | row for row in taken])
    answers = [cell.facts | {"problem": place} | row for place, row in enumerate(rows)]
    return found | {"answers": pd.DataFrame(answers)}


def contrasts(trial: Trial, rows: Rows) -> Rows:
    """The table ``accuracy`` of all answers, and ``phenomenon``: sink strength with nothing
    blocked.
    """
    settings = trial.settings
    watched = []
    for cell in trial.arms.values():
        if cell.k:
            continue
        # share and gu_rate as in `SinkFacts.row`, means over layers, of the first problems
        seed = request_number(settings.seed, f"{cell.skill} {cell.level} 0")
        asked = asked_of(trial.loaded, cell.problems[:WATCHED], seed)
        how = cell.condition.decoding(seed), settings.new_tokens, cell.condition.edits
        for problem, one in enumerate(write_batch(trial.loaded, asked, *how, watch=True)):
            mean = pd.DataFrame(one.sinks)[["share", "gu_rate"]].mean()
            watched.append(cell.facts | {"problem": problem, **mean})
    return {
        "accuracy": accuracy(rows["answers"]),
        "phenomenon": watched,
    }


def accuracy(answers: Any) -> list[Row]:
    """Shares of right answers and paired differences; rows over all levels have level 0, over all
    skills "all".

    A difference compares only problems that were answered on both sides: questions too short for k
    keys are left out of both. `clean` is the share of the same problems with nothing blocked, and
    `delta` the difference to it; `beyond` is the difference to as many random keys, or others of
    equal mass, over `beyond_n` problems, if such a control was run.

    Args:
        answers: the table ``answers``, or its rows.
    """
    table = pd.DataFrame(answers)
    table = table.assign(
        row=table.groupby(["skill", "level", "problem"]).ngroup(),
        right=table["right"].astype(float),
        empty=table["written"] == "",
        endless=~table["ended"],
    )
    arms = table.groupby(ARM, sort=False).groups
    plain: dict[Arm, Arm] = {}
    drawn: dict[Arm, Any] = {}
    for condition, control, k in arms:
        plain[condition, control, k] = (condition, "none", 0)
        beside = [(condition, name, k) for name in BESIDE.get(control, ())]
        drawn[condition, control, k] = next((arm for arm in beside if arm in arms), None)
    table = table.assign(
        delta=less_other(table, ARM, "right", plain), beyond=less_other(table, ARM, "right", drawn)
    )
    # by skill and level, over all levels, all skills, and both
    wider: list[Row] = [{}, {"level": 0}, {"skill": ALL}, {"skill": ALL, "level": 0}]
    whole = pd.concat([table.assign(**each) for each in wider]).sort_index(kind="stable")
    names = [*ARM, "skill", "level"]
    found = []
    for cell, group in whole.groupby(names, sort=False):
        right = int(group["right"].sum())
        low, high = wilson(right, len(group))
        facts = {"n": len(group), "right": right, "share": right / len(group)}
        facts |= {"low": low, "high": high}
        facts |= _difference(group, "delta") | _difference(group, "beyond")
        facts |= {name: int(group[name].sum()) for name in ("empty", "endless")}
        found.append(dict(zip(names, cell, strict=True)) | facts)
    return found


def _difference(group: pd.DataFrame, name: str) -> Row:
    """The difference of shares over the problems that both have; None if there are none."""
    change = group[name].dropna()
    n = len(change)
    columns = dict.fromkeys((name, f"{name}_low", f"{name}_high", f"{name}_p"))
    gained = int((change > 0).sum())
    lost = int((change < 0).sum())
    if n:
        interval = paired_share_interval(gained, lost, n)
        numbers = ((gained - lost) / n, *interval, mcnemar(gained, lost))
        columns = dict(zip(columns, numbers, strict=True))
    columns[f"{name}_n"] = n
    if name == "delta":
        clean = float((group["right"] - change).mean())
        columns |= {"clean": clean, "gained": gained, "lost": lost}
    return columns
