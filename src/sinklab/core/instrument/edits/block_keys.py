"""`BlockKeys`, the edit of keys: which keys, for which queries, chosen when, taken away how.

Keys are chosen in one call, and taken away in that call or a later one. `after` looks at a call as
it was made and keeps the choice in the memory of the layer; `before` takes it from there and makes
the call without these keys. The `Editor` (edit.py) calls both, with the heads, the step (forwards
of the run so far, by `forwards_per_step`) and the memory of this edit and layer; it compares the
call before and after, and logs the dose: "removed" is what these keys held in the call that loses
them, "held" what they held in the call that chose them.
"""

# B batch, H query heads (those edited; all in `ChosenKeys.blocked_BHS`), Q queries, S keys, M keys
# taken away
import math
from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass, replace

import torch
from torch import Tensor

from sinklab.core.compat import generation_modes
from sinklab.core.errors import check_tensor, limited, whole_numbers
from sinklab.core.instrument.call import Call
from sinklab.core.instrument.edits.edit import Edit, Editor
from sinklab.core.instrument.edits.effect import ChosenKeys
from sinklab.core.instrument.edits.intervention import InterventionLog
from sinklab.core.instrument.edits.removals import Mask, Removal
from sinklab.core.instrument.edits.selectors import (
    SCORES,
    Selector,
    check_queries,
    chosen_queries,
    first_query,
)
from sinklab.core.instrument.keys import as_columns, pad_flags
from sinklab.core.registry import interventions, registered, removals, rules, selectors
from sinklab.core.sinks import DEFAULT, Rule

WHEN = ("now", "previous", "clean", "kept")
IN_ORDER = ("greedy_search", "sample", "dola_generation")
"""Ways of transformers to generate in which a row keeps its text, a token longer in each step."""


@interventions.register("block_keys")
@dataclass(frozen=True)
class BlockKeys(Edit):
    """Take keys away, head by head: which keys, for which queries, chosen when, taken away how.

    By default the keys chosen in one step are removed in the next, so a single forward needs
    ``when="now"``::

        BlockKeys(TopKeys(5))                   # the paper's, MaskSinks(k=5)
        BlockKeys(SinkKeys("gu"), queries="from32", when="clean")
        BlockKeys(EqualMass(TopKeys(5)))        # a control of sinklab.lab.measures

    A run of `denoise` begins afresh. In a loop of your own, `InterventionLog.reset` says that
    another text begins: else it loses what was chosen in the one before.

    Raises ValueError for values outside those listed, and for ones that do not go together.
    """

    keys: Selector = registered(selectors)
    """Selector of the keys, or its text such as ``"top:k=5"``."""
    _: KW_ONLY
    queries: str | None = None
    """Queries for which keys are blocked: "all", "from32" (canvas positions from 32 on), "masked",
    "committed" or "prompt"; a query then never loses its own key. None: for all, their own key
    included (arXiv 2510.15731); one that would lose every key it may see keeps them.
    """
    beyond: int | None = limited(None, at_least=0)
    """Only for queries farther than so many positions from the key: nearer ones keep it, so that
    with ``keys="others:like=sinks"`` a query reads its neighbours and the sinks alone.
    """
    when: str | None = limited(None, one_of=WHEN)
    """Forward in which keys are chosen. "now": the one that loses them, from the call as it is
    given. "previous": the one before, of the same edited run (the first is unedited), in which a
    blocked key receives nothing: a lasting sink is blocked in every other step. "clean": one that
    is run unedited under `log.probing()`. "kept": as "previous", and blocked keys stay blocked.
    None is "previous"; scores of whole texts (`sinklab.lab.scoring`), which have no step before,
    replace it by "clean".
    """
    how: Removal = registered(removals, Mask())
    """Removal, or its text: "mask", or one of `sinklab.lab.measures.values`: "zero_value",
    "shuffle_value", "mean_value:file=…".
    """
    scores: str | None = limited(None, one_of=SCORES)
    """Attention to choose by: column sums over all queries ("received"), or the last query's row
    ("last_row", the autoregressive reading). None is "received"; studies in which an
    autoregressive model writes replace it by "last_row".
    """
    limit: int | None = limited(None, at_least=1)
    """With "kept", whose sets grow: the most keys a head may have lost at a time."""
    steps: tuple[int | None, ...] | None = None
    """(start, stop): only in steps start, …, stop - 1 of the sequence; stop None means to the
    end.
    """
    counted_by: Rule | None = registered(rules, None)
    """Rule by which the log counts sinks among the chosen keys; None: that of the selector, or
    `DEFAULT`.
    """
    seed: int = 0
    """Seed of whatever is drawn."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_queries(self.queries)
        if self.by_query and not self.how.blocks:
            raise ValueError(
                "queries and beyond say for whom a key is blocked, and a value is the same for "
                f"all, got queries={self.queries!r} and beyond={self.beyond} with "
                f"how={removals.as_text(self.how)!r}; take how='mask', or leave them out"
            )
        if self.limit is not None and self.when != "kept":
            raise ValueError(
                "limit says how many keys are blocked at a time where keys stay blocked, with "
                f"when='kept'; got limit={self.limit} with when={self.when!r}: leave it out"
            )
        if self.steps is not None:
            object.__setattr__(self, "steps", _span(self.steps))

    @property
    def by_query(self) -> bool:
        """Whether queries lose different keys of a head."""
        return self.queries is not None or self.beyond is not None

    @property
    def draws(self) -> bool:
        """Whether anything is drawn, so that equal rows may be edited differently."""
        return self.keys.draws or self.how.draws

    @property
    def extent(self) -> tuple[int, int]:
        """The first step in which it acts, and the last position that it names, of keys or of the
        first query (−1 for none).
        """
        last = max(self.keys.last_position, first_query(self.queries))
        return (self.steps or (0,))[0] or 0, last

    def handler(self, log: InterventionLog, forwards_per_step: int) -> Editor:
        # the log says what was used
        edit = replace(self, when=self.when or "previous")
        return Editor(edit, log, forwards_per_step)

    def begin(self) -> None:
        if self.when not in ("previous", "kept") or not self.keys.by_attention:
            return
        for mode in generation_modes():
            if mode not in IN_ORDER:
                raise ValueError(
                    "block_keys takes what each row chose in the step before, and generate runs as "
                    f"{mode}, which moves rows or drops tokens between steps: choose with "
                    "when='now', or generate by greedy search or sampling"
                )

    def before(self, call: Call) -> Call:
        """The call without the keys that were chosen for it."""
        if not call.is_replay:
            call.memory["removed"] = self._keys_for(call)
        found: ChosenKeys | None = call.memory.get("removed")
        if found is None:
            return call
        edited = call
        if found.columns_BHM.shape[-1] > 0:
            if self.by_query:
                queries_BQ = chosen_queries(self.queries or "all", call)
                own_QS = call.near_QS(self.beyond or 0)
                edited = call.block(found.blocked_BHS, queries_BQ, own_QS)
            elif self.how.blocks:
                edited = call.block(found.blocked_BHS)
            else:
                edited = self.how.apply(call, found.blocked_BHS, found.random_BHS)
        return edited.within(chosen=found)

    def after(self, call: Call) -> None:
        """Choose for the next step."""
        if self.when == "now" or call.is_clean != (self.when == "clean"):
            return
        found = call.memory.get("removed")
        kept_BHS = None
        if self.when == "kept" and found is not None:
            kept_BHS = call.of_heads(found.blocked_BHS)
        call.memory["chosen"] = self._choose(call, kept_BHS)

    def _keys_for(self, call: Call) -> ChosenKeys | None:
        """Keys to take away from this call; None for nothing to do."""
        first, stop = self.steps or (0, None)
        if call.step < (first or 0) or (stop is not None and call.step >= stop):
            return None
        if self.when == "now":
            return self._choose(call, None)
        found: ChosenKeys | None = call.memory.get("chosen")
        if found is None and self.when == "clean":
            raise ValueError(
                "when='clean' chooses in an unedited forward, but none was run: with "
                "log.probing(): model(…) before the edited forward"
            )
        if found is None:
            return None
        rows, _, keys = found.blocked_BHS.shape
        now = call.k_BKSD.shape
        if rows != now[0] or now[2] < keys:
            raise ValueError(
                f"the selection was made for {rows} rows and {keys} keys, but this forward has "
                f"{now[0]} and {now[2]}: call log.reset() where a new sequence or batch begins"
            )
        return replace(found, blocked_BHS=pad_flags(found.blocked_BHS, now[2]))

    def _choose(self, call: Call, kept_BHS: Tensor | None) -> ChosenKeys:
        """Keys that the selector chooses beside those that are blocked already, in the edited
        heads.
        """
        selector = self.keys
        choice = replace(
            call.choice,
            scores=self.scores or "received",
            blocked_BHS=kept_BHS,
            limit=self.limit,
        )
        call = call.within(choice=choice)
        every = call.q_BHQD.shape[1]
        with torch.no_grad():
            flags_BHS = _select(selector, call)
            if self.limit is not None and selector.by_attention:
                # for selectors that do not heed it
                count_BH1 = flags_BHS.sum(-1, keepdim=True)
                flags_BHS = call.top(call.scores_BHS, count_BH1, flags_BHS, selector.max_count)
            flags_BHS = flags_BHS.expand(-1, call.head_count, -1)
            numbers: dict[str, Tensor] = {}
            if selector.by_attention:
                columns_BHM = as_columns(flags_BHS, selector.max_count, call.scores_BHS)
                numbers = self._numbers(call, flags_BHS)
            else:
                columns_BHM = as_columns(flags_BHS)
            if kept_BHS is not None:
                kept_BHM = as_columns(kept_BHS, self.limit)
                columns_BHM = torch.cat([columns_BHM, kept_BHM], -1)
                flags_BHS = flags_BHS | kept_BHS
            all_BHS = flags_BHS
            if call.head_count < every:
                all_BHS = flags_BHS.new_zeros(len(flags_BHS), every, flags_BHS.shape[-1])
                all_BHS[:, call.heads] = flags_BHS
            random_BHS = all_BHS.new_empty(0)
            if self.how.draws:
                random_BHS = choice.draw(all_BHS.shape).to(all_BHS.device, non_blocking=True)
        return ChosenKeys(all_BHS, columns_BHM, numbers, random_BHS, self.by_query)

    def _numbers(self, call: Call, flags_BHS: Tensor) -> dict[str, Tensor]:
        """Attention that the chosen keys hold, their number, and how many of them are sinks; NaN
        where keys are blocked already and none could be added.
        """
        rule = self.counted_by or self.keys.sink_rule or DEFAULT
        held_BH = call.scores_BHS.masked_fill(~flags_BHS, 0.0).sum(-1)
        count_BH = flags_BHS.sum(-1)
        numbers = {
            "held": held_BH / call.queries_B1,
            "chosen": count_BH.to(held_BH),
            "sinks": (flags_BHS & call.sinks(rule)).sum(-1).to(held_BH),
        }
        if call.choice.blocked_BHS is not None:
            blocked_BH = call.choice.blocked_BHS.sum(-1)
            full_BH = (blocked_BH > 0) & (count_BH == 0)
            if self.limit is not None:
                full_BH = full_BH | (blocked_BH >= self.limit)
            numbers = {
                name: number_BH.masked_fill(full_BH, math.nan)
                for name, number_BH in numbers.items()
            }
        return numbers | {name: note.expand_as(held_BH) for name, note in call.choice.notes.items()}


def _select(selector: Selector, call: Call) -> Tensor:
    """Keys that a selector chooses, bool (B, H or 1, S). Raises ValueError for anything else."""
    flags_BHS = selector.select(call)
    rows, keys = len(call.q_BHQD), call.k_BKSD.shape[2]
    what = f"what {selectors.as_text(selector)} selects"
    remedy = "flags of rows, heads or 1, and keys: see Call.top and Call.eligible_BHS"
    check_tensor(what, flags_BHS, (rows, None, keys), "bool", remedy)
    if flags_BHS.shape[1] > 1:
        check_tensor(what, flags_BHS, (rows, call.head_count, keys), "bool", remedy)
    return flags_BHS


def _span(steps: tuple[int | None, ...]) -> tuple[int | None, ...]:
    steps = tuple(steps) if isinstance(steps, Iterable) else (steps,)
    if len(steps) == 2 and steps[0] is not None:
        whole_numbers("steps", [number for number in steps if number is not None])
        if steps[1] is None or steps[1] > steps[0]:
            return steps
    raise ValueError(
        f"steps is (first, the one after the last), None for to the end; got {steps}: write (4, 8)"
    )
