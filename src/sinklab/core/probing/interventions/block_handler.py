"""`BlockHandler`, which carries `BlockKeys` out, call by call; and its memory of what one forward
chose and took, for those behind it.
"""

# B batch, H query heads (those edited; all in `blocked`), Q queries, S keys, M keys taken away
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from sinklab.core.attention.context import decoding_run
from sinklab.core.compat import config_value, generation_modes
from sinklab.core.errors import check_tensor
from sinklab.core.probing.call import Call, Choice, real_queries_B1
from sinklab.core.probing.intervention import InterventionLog
from sinklab.core.probing.interventions.base import Effect, InterventionHandler
from sinklab.core.probing.interventions.removals import (
    chosen_queries,
    keys_seen,
    lost_share,
    near_keys,
    query_positions,
    restricted,
)
from sinklab.core.probing.keys import as_columns, extended
from sinklab.core.registry import selectors
from sinklab.core.sinks import DEFAULT

IN_ORDER = ("greedy_search", "sample", "dola_generation")
"""Ways of transformers to generate in which a row keeps its text, a token longer in each step."""


@dataclass(frozen=True)
class Selection:
    """Keys to take away in one layer, and the numbers for the log."""

    blocked_BHS: Tensor
    """Flags for all heads."""
    columns_BHM: Tensor
    """The same keys in the heads that are edited, −1 where a head has fewer than M: the newly
    chosen ones by falling score, then the others.
    """
    numbers: dict[str, Tensor] = field(default_factory=dict)
    """Numbers (B, H) for the log: "held", "chosen", "sinks", "matched"."""
    random_BHS: Tensor | None = None
    """Numbers for a removal that draws."""

    @property
    def shape(self) -> torch.Size:
        """(B, H, S): rows, heads and keys that it was made for."""
        return self.blocked_BHS.shape


class Memory:
    """Keys that an edit chose and took, by slot and layer. A slot is the place of a forward within
    its step: guidance runs two, each with its own past.

    A forward is opened, fills `chosen` and `taken`, and is closed. Its choice then waits for the
    next forward of the slot (`waiting`).
    """

    def __init__(self) -> None:
        self.waiting: dict[int, dict[str, Selection]] = {}
        """Selection for the next forward of a slot."""
        self.texts: dict[int, Tensor | None] = {}
        """Ids (B, S) of the forward that chose it; None if they are not known."""
        self.before: dict[int, dict[str, Selection | None]] = {}
        """Keys that the last forward of a slot took."""
        self.open(0)

    def open(self, slot: int) -> None:
        """A forward begins."""
        self.slot = slot
        self.chosen: dict[str, Selection] = {}
        """Keys that it chooses for the next forward."""
        self.taken: dict[str, Selection | None] = {}
        """Keys that it loses; None for a layer that loses none."""

    def close(self, ids_BS: Tensor | None, *, is_edited: bool) -> None:
        """The forward came to its end.

        Args:
            ids_BS: its token ids, if they are known.
            is_edited: whether the edit took part, and not only looked on.
        """
        if self.chosen:
            self.waiting[self.slot] = self.chosen
            if ids_BS is not None:
                # a copy, as a decoding loop may change its ids in place
                ids_BS = ids_BS.clone()
            self.texts[self.slot] = ids_BS
        if is_edited:
            self.before[self.slot] = self.taken

    def waiting_for(self, layer: str) -> Selection | None:
        """Choice that waits for this forward in this layer; None for none."""
        return self.waiting.get(self.slot, {}).get(layer)

    def taken_before(self, layer: str) -> Selection | None:
        """Keys that the last forward of the slot took in this layer; None for none."""
        return self.before.get(self.slot, {}).get(layer)


class BlockHandler(InterventionHandler):
    """Carries `BlockKeys` out: takes keys in each call, chosen in it or kept in its `Memory`.

    - "now": `selection` chooses before the call that loses the keys.
    - "previous": `observe` chooses after a call, for the next step.
    - "kept": likewise, and each step adds to the keys of the one before.
    - "clean": `observe` chooses in a forward of `probing()`, for the step behind it.
    """

    options: Any
    """The `BlockKeys`."""
    memory: Memory

    def __init__(self, options: Any, log: InterventionLog, forwards_per_step: int) -> None:
        self.first = options.extent[0]
        self.longest = 0
        """Most canvas positions of a call so far."""
        self.warned = False
        super().__init__(options, log, forwards_per_step)
        self.generator = torch.Generator().manual_seed(options.seed)
        """Drawn from on the CPU, so that a seed means the same keys on every device."""

    def reset(self, *, run_begins: bool = False) -> None:
        memory = Memory()
        if run_begins and self.options.when == "clean":
            # the clean pass may have been run ahead of the run that begins
            memory.waiting, memory.texts = self.memory.waiting, self.memory.texts
        self.memory = memory
        super().reset()

    def discard(self) -> None:
        super().discard()
        self.memory.open(0)

    def begin(self) -> None:
        super().begin()
        self._check_order()
        if self.options.when == "clean":
            self.slot = 0
        self.memory.open(self.slot)

    def apply(self, call: Call) -> tuple[Call, Effect | None]:
        how = self.options.how
        taken = self.memory.taken
        if self.is_open:
            taken[call.layer] = self.selection(call)
        selected = taken.get(call.layer)
        if selected is None:
            return call, None
        blocked_BHS = selected.blocked_BHS
        edited = call
        spared_BH = torch.zeros(call.q_BHQD.shape[:2], device=call.q_BHQD.device)
        if selected.columns_BHM.shape[-1] > 0:
            if how.blocks:
                edited, spared_BH = self._blocked(call, blocked_BHS)
            else:
                edited = self.checked(how.apply(call, blocked_BHS, selected.random_BHS), call)
        if not self.is_open:
            return edited, None
        numbers = selected.numbers | {"alone": call.of_heads(spared_BH)}
        if self.log.measure:
            with torch.no_grad():
                if self.options.by_query:
                    share_BH = lost_share(call, edited)
                else:
                    # A spared query saw nothing but these keys: it gives them a mass of 1.
                    received_BHS = call.within(heads=None).received_BHS
                    held_BH = received_BHS.masked_fill(~blocked_BHS, 0.0).sum(-1) - spared_BH
                    share_BH = held_BH / real_queries_B1(call)
                if how.blocks:
                    left_BH = keys_seen(edited)
                else:
                    left_BH = keys_seen(call, blocked_BHS)
            numbers |= {"removed": call.of_heads(share_BH), "left": call.of_heads(left_BH)}
        blocked_BHS = call.of_heads(blocked_BHS)
        numbers["keys"] = blocked_BHS.sum(-1)
        before = self.memory.taken_before(call.layer)
        if before is not None:
            numbers["overlap"] = jaccard(blocked_BHS, call.of_heads(before.blocked_BHS))
        return edited, Effect(call.heads or [], selected.columns_BHM, numbers)

    def _blocked(self, call: Call, blocked_BHS: Tensor) -> tuple[Call, Tensor]:
        """The call with these keys blocked for the queries that are meant, and how many were left
        alone (B, H).
        """
        # Flags expanded over heads stay one row of them: so does the mask.
        if blocked_BHS.stride(1) == 0:
            blocked_BHS = blocked_BHS[:, :1]
        blocked_BH1S = blocked_BHS.unsqueeze(2)
        options = self.options
        if not options.by_query:
            return restricted(call, ~blocked_BH1S, self.doubt)
        positions_Q = query_positions(call)
        meant_BQ = chosen_queries(options.queries or "all", call, positions_Q)
        near_QS = near_keys(call, positions_Q, options.beyond or 0)
        keep_BHQS = ~(blocked_BH1S & meant_BQ[:, None, :, None])
        return restricted(call, keep_BHQS, self.doubt, kept_QS=near_QS)

    def selection(self, call: Call) -> Selection | None:
        """Keys to take away in this layer and forward; None for nothing to do."""
        _, stop = self.options.steps or (0, None)
        if call.step < self.first or (stop is not None and call.step >= stop):
            return None
        self.longest = max(self.longest, call.k_BKSD.shape[2] - call.prefix)
        if call.visibility.running is not None:
            self._check_positions()
        when = self.options.when
        if when == "now":
            return self.choose(call, None)
        found = self.memory.waiting_for(call.layer)
        if found is None and when == "clean":
            raise ValueError(
                "when='clean' chooses in an unedited forward, but none was run: with "
                "log.probing(): model(…) before the edited forward"
            )
        if found is None:
            return None
        rows, _, keys = found.shape
        now = call.k_BKSD.shape
        if rows != now[0] or now[2] < keys:
            raise ValueError(
                f"the selection was made for {rows} rows and {keys} keys, but this forward has "
                f"{now[0]} and {now[2]}: call log.reset() where a new sequence or batch begins"
            )
        self._check_text(call)
        return replace(found, blocked_BHS=extended(found.blocked_BHS, now[2]))

    def observe(self, call: Call, out: Tensor) -> None:
        super().observe(call, out)
        when = self.options.when
        if when == "now" or self.log.is_probing != (when == "clean"):
            return
        here = self.here(call)
        if here is None:
            return
        taken = self.memory.taken.get(call.layer)
        before_BHS = None
        if taken is not None and when == "kept":
            before_BHS = taken.blocked_BHS
        self.memory.chosen[call.layer] = self.choose(here, before_BHS)

    def draw(self, shape: Sequence[int]) -> Tensor:
        """Numbers of a shape, uniform in [0, 1), on the CPU."""
        return torch.rand(tuple(shape), generator=self.generator)

    def choose(self, call: Call, before_BHS: Tensor | None) -> Selection:
        """Keys that the selector chooses.

        Args:
            call: the attention call, of the heads that are edited.
            before_BHS: keys that are blocked already, of all heads; None for none.

        Raises:
            ValueError: if a head would keep no key.
        """
        edit = self.options
        selector = edit.keys
        heads = call.heads or []
        if before_BHS is not None:
            before_BHS = call.of_heads(before_BHS)
        scores = edit.scores or "received"
        call = call.within(choice=Choice(scores, before_BHS, edit.limit, (), self.draw, self.doubt))
        with torch.no_grad():
            flags_BHS = _selected(selector, call)
            if edit.limit is not None and selector.by_attention:
                # for selectors that do not heed it
                count_BH1 = flags_BHS.sum(-1, keepdim=True)
                flags_BHS = call.top(call.scores_BHS, count_BH1, flags_BHS, selector.most)
            flags_BHS = flags_BHS.expand(-1, len(heads), -1)
            if selector.by_attention:
                self._check_enough(call, flags_BHS)
                columns_BHM = as_columns(flags_BHS, selector.most, call.scores_BHS)
                numbers = self._numbers(call, flags_BHS)
            else:
                columns_BHM = as_columns(flags_BHS)
                numbers = {}
            if before_BHS is not None:
                before_BHM = as_columns(before_BHS, edit.limit)
                columns_BHM = torch.cat([columns_BHM, before_BHM], -1)
                flags_BHS = flags_BHS | before_BHS
            blocked_BHS = flags_BHS
            every = call.q_BHQD.shape[1]
            if len(heads) < every:
                blocked_BHS = flags_BHS.new_zeros(len(flags_BHS), every, flags_BHS.shape[-1])
                blocked_BHS[:, heads] = flags_BHS
            random_BHS = blocked_BHS.new_empty(0)
            if edit.how.draws:
                random_BHS = self.draw(blocked_BHS.shape).to(blocked_BHS.device, non_blocking=True)
        return Selection(blocked_BHS, columns_BHM, numbers, random_BHS)

    def _numbers(self, call: Call, flags_BHS: Tensor) -> dict[str, Tensor]:
        """Attention that the chosen keys hold, their number, and how many of them are sinks; NaN
        where keys are blocked already and none could be added.
        """
        edit = self.options
        rule = edit.counted_by or edit.keys.sink_rule or DEFAULT
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
            if edit.limit is not None:
                full_BH = full_BH | (blocked_BH >= edit.limit)
            numbers = {
                name: number_BH.masked_fill(full_BH, math.nan)
                for name, number_BH in numbers.items()
            }
        return numbers | {name: note.expand_as(held_BH) for name, note in call.choice.notes.items()}

    def _check_enough(self, call: Call, flags_BHS: Tensor) -> None:
        """Every head keeps a key; each for itself, as rows of unequal length lose unequal numbers
        of keys.
        """
        count_BH = flags_BHS.sum(-1)
        left_BH = call.seen_B1S.sum(-1).expand_as(count_BH)
        if call.choice.blocked_BHS is not None:
            # a key behind a window since its removal is no key that a query loses
            left_BH = left_BH - (call.choice.blocked_BHS & call.seen_B1S).sum(-1)
        # with `beyond` every query keeps its neighbours, and all other keys may go
        wrong_BH = (count_BH > 0) & (count_BH >= left_BH) & (self.options.beyond is None)

        def refuse() -> None:
            row, head = wrong_BH.nonzero()[0].tolist()
            raise ValueError(
                f"{self.label} with keys={selectors.as_text(self.options.keys)} needs more than "
                f"{int(count_BH[row, head])} keys that are not padding, but row {row} of this "
                f"batch has {int(left_BH[row, head])}: lower k, choose a stricter rule, or set a "
                "limit"
            )

        self.doubt(wrong_BH.any(), refuse)

    def finish(self) -> None:
        super().finish()
        self.memory.close(self.log.tap.ids_BS, is_edited=not self.log.is_probing)

    def end(self) -> None:
        self._check_positions()
        super().end()

    def why_idle(self) -> tuple[str, str]:
        if self.first:
            return (
                f"it begins at step {self.first} (the first is 0), and no sequence came so far",
                "begin earlier",
            )
        if self.options.when in ("now", "clean"):
            return super().why_idle()
        return (
            f"when={self.options.when!r}, forwards_per_step={self.period} removes what the step "
            "before chose, and no sequence had a second step",
            "run more than one denoising step, or choose within the step: when='now' from the call "
            "that loses them, when='clean' from an unedited one",
        )

    def _check_positions(self) -> None:
        last = self.options.keys.last_position
        if 0 < self.longest <= last:
            raise ValueError(
                f"{self.label}: there is no position {last}, the canvas had {self.longest} (sink "
                f"columns not counted): name positions from 0 to {self.longest - 1}"
            )

    def _check_order(self) -> None:
        """Raises ValueError if attention chose in a step before, and `generate` of transformers may
        have put another text into that row since.
        """
        edit = self.options
        if not edit.keys.by_attention or edit.when not in ("previous", "kept"):
            return
        for mode in generation_modes():
            if mode not in IN_ORDER:
                raise ValueError(
                    f"{self.label} blocks what each row chose in the step before, and generate "
                    f"runs as {mode}, which moves rows or drops tokens between steps: choose with "
                    "when='now', or generate by greedy search or sampling"
                )

    def _check_text(self, call: Call) -> None:
        """Warn, once, if keys chosen in one text are removed in another: without a run, nothing
        says that one begins.
        """
        before_BS = self.memory.texts.get(self.slot)
        now_BS = self.log.tap.ids_BS
        if before_BS is None or now_BS is None or decoding_run() is not None:
            return
        # once a forward, in the first layer that loses keys
        if self.warned or self.memory.taken:
            return
        length = call.k_BKSD.shape[2] - (self.log.prefix or 0)
        is_canvas = now_BS.shape[1] == length >= before_BS.shape[1]
        if is_canvas and len(before_BS) == len(now_BS):
            mask_id = config_value(self.log.tap.model, "mask_token_id")
            self.doubt(
                is_other_text(before_BS, now_BS[:, : before_BS.shape[1]], mask_id), self._warn
            )

    def _warn(self) -> None:
        self.warned = True
        warnings.warn(
            f"{self.label}: this forward has another text than the one in which its keys were "
            "chosen, and loses them "
            "all the same: call log.reset() where a new sequence or batch begins",
            stacklevel=2,
        )


def _selected(selector: Any, call: Call) -> Tensor:
    """Keys that a selector chooses, bool (B, H or 1, S). Raises ValueError for anything else."""
    flags_BHS = selector.select(call)
    rows, keys = len(call.q_BHQD), call.k_BKSD.shape[2]
    what = f"what {selectors.as_text(selector)} selects"
    remedy = "flags of rows, heads or 1, and keys: see Call.top and Call.eligible_BHS"
    check_tensor(what, flags_BHS, (rows, None, keys), "bool", remedy)
    if flags_BHS.shape[1] > 1:
        check_tensor(what, flags_BHS, (rows, len(call.heads or []), keys), "bool", remedy)
    return flags_BHS


def jaccard(a_BHS: Tensor, b_BHS: Tensor) -> Tensor:
    """Share of the keys of both among the keys of either, (B, H); NaN if there are none."""
    b_BHS = extended(b_BHS, a_BHS.shape[-1])
    a_BHS = extended(a_BHS, b_BHS.shape[-1])
    return (a_BHS & b_BHS).sum(-1) / (a_BHS | b_BHS).sum(-1)


def is_other_text(before_BS: Tensor, now_BS: Tensor, mask_id: int | None) -> Tensor:
    """Whether ids are another text's and not those of the same one, a step later: a flag on their
    device.

    A step writes masked positions, or masks written ones: with a known mask token, each place that
    changed has it before or after. Without one, all of them had one id before, or have one after.
    """
    changed_BS = before_BS != now_BS
    if mask_id is not None:
        return (changed_BS & (before_BS != mask_id) & (now_BS != mask_id)).any()
    limits = torch.iinfo(now_BS.dtype)
    differ = [
        ids_BS.masked_fill(~changed_BS, limits.max).amin()
        != ids_BS.masked_fill(~changed_BS, limits.min).amax()
        for ids_BS in (before_BS, now_BS)
    ]
    return changed_BS.any() & differ[0] & differ[1]
