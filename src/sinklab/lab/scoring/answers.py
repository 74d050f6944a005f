"""Answers to several prompts at once, each up to its end, and facts about sinks while they were
written.
"""

# B batch rows, L layers, H heads, K keys (sink columns first), S positions, N numbers of `MEASURED`
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from sinklab.core.instrument import BlockKeys, InterventionLog, Recording, trace
from sinklab.core.instrument.edits.dose import MEASURED, by_row
from sinklab.core.sinks import DEFAULT, STATES, Gu, find_sinks
from sinklab.core.subject import DecodingSettings
from sinklab.lab.checkpoints import Loaded
from sinklab.lab.scoring.writing import Writer, Writing, WritingRequest, ended, is_random, seeded

PLACES = (*STATES, "sink")
"""Places of a main sink: a position in one of the states, or a column that was added to the
model.
"""


Totals = Mapping[str, tuple[float, float]]
"""Totals of a `Dose`, as JSON keeps them."""


def taken(log: InterventionLog, active_B: Tensor | None = None) -> Tensor | int:
    """Removals of each row by edits that choose keys: sums and numbers of entries (B, N, 2); 0 if
    nothing is logged.

    Args:
        log: of one step or forward.
        active_B: rows that it was for, bool; None for all.
    """
    sums: Any = 0
    for removal in log.removals:
        # a window and named positions are no choice: they have no dose
        if isinstance(removal.edit, BlockKeys) and removal.edit.keys.by_attention:
            both_BN2 = torch.stack([torch.stack(pair, -1) for pair in by_row(removal).values()], 1)
            if active_B is not None:
                both_BN2 = both_BN2 * active_B.cpu()[:, None, None]
            sums = sums + both_BN2
    return sums


def totals(taken_N2: Tensor | int) -> dict[str, tuple[float, float]]:
    """The `Dose.totals` of sums that `taken` gives, of one row or several rows together; empty for
    nothing.
    """
    if isinstance(taken_N2, int):
        return {}
    return {
        name: (both[0], both[1]) for name, both in zip(MEASURED, taken_N2.tolist(), strict=True)
    }


class SinkFacts:
    """Collects recorded steps of one batch; `row` gives the means of each row.

    Only steps in which a row was still being written count for it, not those of others of the
    batch.
    """

    def __init__(self, pad_B: Tensor, prefix: int) -> None:
        """`pad_B`: padding columns to the left of each row. `prefix`: sink columns that the model
        has in front.
        """
        # a trace of a later step alone takes remembered keys for sink columns: so the number is
        # given, not inferred
        self._pad_B = pad_B.cpu()
        self._prefix = prefix
        self._steps: list[list[dict[str, Tensor]]] = [[] for _ in pad_B]
        """by row, the facts of its steps: (L,) means over heads, (L, H) main sinks"""

    def add(
        self,
        recording: Recording,
        statistic: str,
        state_BS: Tensor,
        active_B: Tensor,
        log: InterventionLog,
    ) -> None:
        """One step.

        Args:
            recording: of this step alone, its first forward.
            statistic: "received" or "last_row".
            state_BS: state of each canvas position, number in `STATES`; padding is never read.
            active_B: rows that this step was for.
            log: of the interventions in force; its entries are read and dropped.
        """
        received_BLHK = recording.values(statistic)[0]
        self.count(received_BLHK, recording.visible[0], state_BS, active_B)
        removed_BL = torch.full(received_BLHK.shape[:2], torch.nan)
        # guidance runs two forwards a step, and each is logged
        forwards = Counter(removal.label for removal in log.removals)
        for removal in log.removals:
            share_BL = removal["removed"].nanmean(-1) / forwards[removal.label]
            before_BL = removed_BL[:, removal.layer_numbers]
            both_BL = before_BL.nan_to_num() + share_BL
            removed_BL[:, removal.layer_numbers] = torch.where(share_BL.isnan(), before_BL, both_BL)
        log.removals.clear()
        for row in active_B.nonzero()[:, 0].tolist():
            self._steps[row][-1]["removed"] = removed_BL[row]

    def count(
        self, received_BLHK: Tensor, visible_BK: Tensor, state_BS: Tensor, active_B: Tensor
    ) -> None:
        """One step, from the received attention and the number of queries that see each key."""
        positions_B = (visible_BK[:, self._prefix :] > 0).sum(-1).float()
        rows, layers, _, keys = received_BLHK.shape
        share_BLHK = received_BLHK / received_BLHK.sum(-1, keepdim=True).clamp(min=1e-12)
        best_BLH, main_BLH = share_BLHK.max(-1)
        # shares as sums over as many queries as there are positions, each of which sees the keys
        # that any query sees
        queries_BK = positions_B[:, None] * (visible_BK > 0)
        mass_BLHK = share_BLHK * positions_B[:, None, None, None]
        sinks_BLH = find_sinks(mass_BLHK, DEFAULT, queries_BK[:, None, None]).sum(-1)
        prefix_BK = torch.full((rows, self._prefix), PLACES.index("sink"), dtype=torch.int64)
        state_BK = torch.cat([prefix_BK, state_BS.cpu().long()], 1)
        state_BLH = state_BK[:, None, :].expand(rows, layers, keys).gather(2, main_BLH)
        facts = {
            "share": best_BLH.mean(-1),
            "sinks": sinks_BLH.float().mean(-1),
            "with_sink": (sinks_BLH > 0).float().mean(-1),
            # of few keys one may hold that much and be no sink
            "gu_rate": ((best_BLH > Gu().weight) & (sinks_BLH > 0)).float().mean(-1),
            "main": main_BLH,
            "state": state_BLH.clamp(min=0),
        }
        for row in active_B.nonzero()[:, 0].tolist():
            self._steps[row].append({name: value[row] for name, value in facts.items()})

    def row(self, row: int) -> list[dict[str, Any]]:
        """The facts of one row, one entry a layer; empty if no step was recorded.

        steps: how many; share: share of the attention that the main sink (the key that receives
        most) of a head receives, mean over steps and heads; sinks: number of keys that the rule
        calls sinks, per head and step; with_sink: share of heads and steps that have one; gu_rate:
        share of those in which a sink by the rule holds more than 30 % of the attention, the
        threshold of Gu et al. (2410.10781), at whatever position; main_position: most frequent
        position of the main sink, counted from the row's first token, -1 for an added sink column;
        main_constancy: the share of heads and steps in which it stood there; positions: how many
        different places it had; in_masked, in_committed, in_prompt, in_sink: share of heads and
        steps in which its position had this state, or was an added sink column;
        removed: share of attention that the interventions removed, None if nothing was, or if
        likelihoods were scored, which does not measure it.
        """
        steps = self._steps[row]
        if not steps:
            return []
        facts = []
        # T steps
        of_steps = {name: torch.stack([step[name] for step in steps], 1) for name in steps[0]}
        for layer, (main_TH, state_TH) in enumerate(
            zip(of_steps["main"], of_steps["state"], strict=True)
        ):
            columns, counts = main_TH.unique(return_counts=True)
            column = int(columns[counts.argmax()])
            means = ("share", "sinks", "with_sink", "gu_rate")
            position = -1
            if column >= self._prefix:
                position = column - self._prefix - int(self._pad_B[row])
            removed = None
            if "removed" in of_steps and not bool(of_steps["removed"][layer].isnan().all()):
                removed = float(of_steps["removed"][layer].nanmean())
            fact = {
                "layer": layer,
                "steps": len(steps),
                **{name: float(of_steps[name][layer].mean()) for name in means},
                "main_position": position,
                "main_constancy": int(counts.max()) / main_TH.numel(),
                "positions": len(columns),
            }
            places = {
                f"in_{name}": int((state_TH == number).sum()) / state_TH.numel()
                for number, name in enumerate(PLACES)
            }
            facts.append(fact | places | {"removed": removed})
        return facts


def needs_own_batch(settings: DecodingSettings, edits: Sequence[Any]) -> bool:
    """Whether an answer would depend on the other rows of its batch, so that it is written alone.

    True if random numbers are drawn (for the tokens, the positions or a random control), and if
    rows wait for one another under something that counts forwards.
    """
    chosen = settings.values()
    rule = chosen["rule"]
    schedule = chosen["schedule"]
    draws = settings.temperature > 0 or rule.draws or schedule.pooled or is_random(edits)
    return draws or (not schedule.fixed and (bool(edits) or chosen["cache"] is not None))


@dataclass(frozen=True)
class Answer:
    """An answer, up to its end."""

    text: str
    ids: tuple[int, ...]
    """Tokens up to the end of text; those after an `until` text included."""
    steps: int
    """Model evaluations that the row took part in; if it is 1, a closed loop removed nothing."""
    sinks: tuple[dict[str, Any], ...] = ()
    """Facts of `SinkFacts.row`; empty if the run was not watched."""
    dose: Totals = field(default_factory=dict)
    """Dose of the edits: the totals of a `Dose`, with the share really removed if the run was
    watched.
    """


def followed(
    writer: Writer, *, watch: bool, progress: Callable[[], object] = lambda: None
) -> tuple[Tensor, SinkFacts | None, list[Totals]]:
    """Write everything: evaluations of each row, (B,), facts about sinks if they are watched, and
    each row's dose.
    """
    model: Any = writer.loaded.model
    counts_B = torch.zeros(len(writer.over_B), dtype=torch.int64)
    facts = None
    watching = None
    if watch:
        facts = SinkFacts(writer.pad_B, writer.loaded.added_sinks)

        def watching(index: int) -> Any:
            return trace(model, (writer.statistic,), steps=(0,))

    taken_BN2: Any = 0
    for step in writer.steps(watching):
        counts_B += step.active_B
        taken_BN2 = taken_BN2 + taken(writer.log, step.active_B)
        if facts is not None:
            facts.add(step.seen, writer.statistic, step.state_BS, step.active_B, writer.log)
        # unread entries would fill the memory of a long run
        writer.log.removals.clear()
        progress()
    if not isinstance(taken_BN2, Tensor):
        taken_BN2 = [0] * len(counts_B)
    return counts_B, facts, [totals(row) for row in taken_BN2]


def write_batch(
    loaded: Loaded,
    requests: Sequence[WritingRequest],
    settings: DecodingSettings,
    new_tokens: int,
    edits: Sequence[Any] = (),
    *,
    watch: bool = False,
    progress: Callable[[], object] = lambda: None,
) -> list[Answer]:
    """Write the answers to several prompts of any lengths.

    A row is what it would be alone, up to rounding; see `needs_own_batch` for answers that must be
    written alone (the seed of the first request is used). Writing ends when every row has met its
    end.

    Args:
        watch: trace every step, and give facts about sinks (`Answer.sinks`).
        progress: called after every step.

    Raises:
        ValueError: for settings that the decoder, the model or the interventions refuse, and NaN
            logits.
    """
    seed = requests[0].seed
    texts = Writing(loaded, requests, replace(settings, seed=seed), new_tokens, seeded(edits, seed))
    with texts.begin(measure=watch) as writer:
        counts_B, facts, doses = followed(writer, watch=watch, progress=progress)
    answers = []
    for row, request in enumerate(requests):
        ids, text = ended(loaded, writer.row(row), request.until, request.ids[-1:])
        sinks: tuple[Any, ...] = ()
        if facts is not None:
            sinks = tuple(facts.row(row))
        answers.append(Answer(text, tuple(ids), int(counts_B[row]), sinks, doses[row]))
    return answers
