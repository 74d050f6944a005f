"""`BlockKeys`, the edit of keys: which keys, for which queries, chosen when, taken away how."""

# B batch, H query heads (those edited in choices, all in `gone`), Q queries, S keys, M keys taken
# away
from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace

import torch
from torch import Tensor

from sinklab.core.attention.context import decoding_run, reads_wait
from sinklab.core.attention.scores import of_heads
from sinklab.core.errors import limited
from sinklab.core.probing.call import AttentionCall
from sinklab.core.probing.intervention import InterventionLog
from sinklab.core.probing.interventions.base import (
    CallSite,
    Effect,
    Forward,
    InterventionHandler,
    LayerIntervention,
)
from sinklab.core.probing.interventions.queries import (
    check_queries,
    chosen_queries,
    mask_id_of,
    near_keys,
    query_positions,
)
from sinklab.core.probing.interventions.removals import (
    Mask,
    Removal,
    as_columns,
    extended,
    keys_seen,
    lost_share,
    real_queries_B1,
    restricted,
)
from sinklab.core.probing.interventions.selectors import (
    SCORES,
    KeyView,
    Selector,
)
from sinklab.core.probing.listener import Listener
from sinklab.core.probing.scope import checked_count, whole_numbers
from sinklab.core.registry import interventions, of, removals, rules, selectors
from sinklab.core.sinks.rules import DEFAULT, Rule

WHEN = ("now", "previous", "clean", "kept")


@interventions.register("block_keys")
@dataclass(frozen=True)
class BlockKeys(LayerIntervention):
    """Take keys away, head by head: which keys, for which queries, chosen when, taken away how.

    By default the keys chosen in one step are removed in the next, so a single forward needs
    ``when="now"``::

        BlockKeys(TopKeys(5))                   # = MaskSinks(k=5), the paper's
        BlockKeys(SinkKeys("gu"), queries="from32", when="clean")
        BlockKeys(EqualMass(TopKeys(5)))        # a control wraps the selector it stands for

    Raises ValueError for values outside those listed, and for ones that do not go together.
    """

    keys: Selector = of(selectors)  # noqa: RUF009
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
    given. "previous": the one before, of the same edited run; the first is unedited. "clean": one
    that is run unedited under `log.probing()`. "kept": as "previous", and a key once taken stays
    taken. None is "previous"; scores of whole texts (`sinklab.lab.scoring`), which have no step
    before, replace it by "clean".
    """
    how: Removal = of(removals, Mask())  # noqa: RUF009
    """Removal, or its text: "mask", "zero_value", "mean_value:file=…", "pool_value",
    "shuffle_value" or "evict".
    """
    scores: str | None = limited(None, one_of=SCORES)
    """Attention to choose by: column sums over all queries ("received"), or the last query's row
    ("last_row", the autoregressive reading). None is "received"; studies in which an
    autoregressive model writes replace it by "last_row".
    """
    limit: int | None = None
    """With "kept" and "evict", whose sets grow: the most keys a head may have lost at a time."""
    steps: tuple[int | None, ...] | None = None
    """(start, stop): only in steps start, …, stop - 1 of the sequence; stop None means to the
    end.
    """
    counted_by: Rule | None = of(rules, None)  # noqa: RUF009
    """Rule by which the log counts sinks among the chosen keys; None: that of the selector, or
    `DEFAULT`.
    """
    seed: int = 0
    """Seed of whatever is drawn."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_queries(self.queries)
        if self.by_query and (self.how.stays or not self.how.blocks):
            raise ValueError(
                "queries and beyond say for whom a key is blocked, and a value or a memory is the "
                f"same for all, got queries={self.queries!r} and beyond={self.beyond} with "
                f"how={removals.as_text(self.how)!r}; take how='mask', or leave them out"
            )
        object.__setattr__(self, "limit", checked_count("limit", self.limit))
        if self.limit is not None and not (self.when == "kept" or self.how.stays):
            raise ValueError(
                "limit says how many keys are blocked at a time where keys stay blocked, with "
                f"when='kept' or how='evict'; got limit={self.limit} with when={self.when!r}: "
                "leave it out"
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
        """The first step in which it acts, and the last position that it names (−1 for none)."""
        return (self.steps or (0,))[0] or 0, self.keys.last_position

    def handler(self, log: InterventionLog, forwards_per_step: int) -> Listener:
        edit = self
        if self.when is None:
            edit = replace(self, when="previous")
        return BlockHandler(edit, log, forwards_per_step)


def _span(steps: tuple[int | None, ...]) -> tuple[int | None, ...]:
    steps = tuple(steps) if isinstance(steps, Iterable) else (steps,)
    if len(steps) == 2 and steps[0] is not None:
        whole_numbers("steps", [number for number in steps if number is not None])
        if steps[1] is None or steps[1] > steps[0]:
            return steps
    raise ValueError(
        f"steps is (first, the one after the last), None for to the end; got {steps}: write (4, 8)"
    )


@dataclass(frozen=True)
class Selection:
    """Keys to take away in one layer, and the numbers for the log."""

    gone_BHS: Tensor
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
        return self.gone_BHS.shape


class BlockHandler(InterventionHandler):
    """Carries `BlockKeys` out: remembers what was chosen for the forward that loses it.

    - "now": `selection` chooses them before the call that loses them.
    - "previous": `observe` chooses them after a call; they are removed in the next step.
    - "kept": likewise, and they stay removed; each step adds to them.
    - "clean": `observe` chooses them in a forward of `probing()`, for the step behind it.

    `slots` holds what a finished forward chose, `forward.taken` what the running one removed;
    `previous` tells which evicted keys are blocked still. Those of "previous" are chosen in
    `selection`, from the view that `observe` kept.
    """

    options: BlockKeys

    def __init__(self, options: BlockKeys, log: InterventionLog, forwards_per_step: int) -> None:
        # Drawn on the CPU, so that a seed means the same keys on every device.
        self.generator = torch.Generator().manual_seed(options.seed)
        self.first = options.extent[0]
        self.longest = 0
        """Most canvas positions of a call so far."""
        self.warned = False
        super().__init__(options, log, forwards_per_step)

    def reset(self, *, run_begins: bool = False) -> None:
        # A clean pass may have been run ahead of the run that begins.
        if not (run_begins and self.options.when == "clean"):
            self.slots: dict[int, dict[str, Selection | KeyView]] = {}
            """Selection for the next forward, or the view it waits to be made from, by slot and
            layer."""
            self.texts: dict[int, Tensor | None] = {}
            """Ids (B, S) of the forward in which that was chosen, by slot; None if they are not
            known.
            """
        super().reset()

    def draw(self, shape: Sequence[int]) -> Tensor:
        """Numbers of a shape, uniform in [0, 1), on the CPU."""
        return torch.rand(tuple(shape), generator=self.generator)

    def begin(self) -> None:
        super().begin()
        if self.options.when == "clean":
            self.forward.slot = 0

    def apply(self, call: AttentionCall, site: CallSite) -> tuple[AttentionCall, Effect | None]:
        how = self.options.how
        taken = self.forward.taken
        if self.is_open:
            taken[call.layer] = self._with_evicted(self.selection(call, site), call, site)
        selected = taken.get(call.layer)
        if selected is None:
            return call, None
        gone_BHS = selected.gone_BHS
        edited = call
        spared_BH = torch.zeros(call.query_BHQD.shape[:2], device=call.query_BHQD.device)
        if selected.columns_BHM.shape[-1] > 0:
            if how.blocks:
                edited, spared_BH = self._blocked(call, gone_BHS, site.prefix)
            else:
                edited = how.apply(call, gone_BHS, selected.random_BHS)
        if not self.is_open:
            return edited, None
        heads = site.heads
        numbers = selected.numbers | {"alone": of_heads(spared_BH, heads)}
        if self.log.measure:
            with torch.no_grad():
                if self.options.by_query:
                    share_BH = lost_share(call, edited)
                else:
                    # A spared query saw nothing but these keys: it gives them a mass of 1.
                    held_BH = call.received_BHS.masked_fill(~gone_BHS, 0.0).sum(-1) - spared_BH
                    share_BH = held_BH / real_queries_B1(call)
                if how.blocks:
                    left_BH = keys_seen(edited)
                else:
                    left_BH = keys_seen(call, gone_BHS)
            numbers |= {"removed": of_heads(share_BH, heads), "left": of_heads(left_BH, heads)}
        gone_BHS = of_heads(gone_BHS, heads)
        numbers["keys"] = gone_BHS.sum(-1)
        return edited, Effect(heads, selected.columns_BHM, gone_BHS, numbers)

    def _blocked(
        self, call: AttentionCall, gone_BHS: Tensor, prefix: int
    ) -> tuple[AttentionCall, Tensor]:
        """The call with these keys blocked for the queries that are meant, and how many were left
        alone (B, H).
        """
        # Flags expanded over heads stay one row of them: so does the mask.
        if gone_BHS.stride(1) == 0:
            gone_BHS = gone_BHS[:, :1]
        gone_BH1S = gone_BHS.unsqueeze(2)
        options = self.options
        if not options.by_query:
            return restricted(call, ~gone_BH1S, self.doubt)
        positions_Q = query_positions(call, prefix)
        meant_BQ = chosen_queries(options.queries or "all", call, positions_Q, self.log.tap)
        near_QS = near_keys(positions_Q, prefix, call.key_BKSD.shape[2], options.beyond or 0)
        keep_BHQS = ~(gone_BH1S & meant_BQ[:, None, :, None])
        return restricted(call, keep_BHQS, self.doubt, kept_QS=near_QS)

    def selection(self, call: AttentionCall, site: CallSite) -> Selection | None:
        """Keys to take away in this layer and forward, evicted ones not counted; None for nothing
        to do.
        """
        _, stop = self.options.steps or (0, None)
        if site.step < self.first or (stop is not None and site.step >= stop):
            return None
        self.longest = max(self.longest, call.key_BKSD.shape[2] - site.prefix)
        if call.visibility.running is not None:
            self._check_positions()
        when = self.options.when
        if when == "now":
            return self._chosen(call, self._view(call, site), self.gone_before(call))
        found = self.slots.get(self.forward.slot, {}).get(call.layer)
        if found is None and when == "clean":
            raise ValueError(
                "when='clean' chooses in an unedited forward, but none was run: with "
                "log.probing(): model(…) before the edited forward"
            )
        if found is None:
            return None
        rows, _, keys = found.shape
        now = call.key_BKSD.shape
        if rows != now[0] or now[2] < keys:
            raise ValueError(
                f"the selection was made for {rows} rows and {keys} keys, but this forward has "
                f"{now[0]} and {now[2]}: call log.reset() where a new sequence or batch begins"
            )
        self._check_text(call)
        if isinstance(found, KeyView):
            before_BHS = self.gone_before(call)
            if before_BHS is not None:
                before_BHS = before_BHS[..., :keys]
            found = self._chosen(call, found, before_BHS)
        return replace(found, gone_BHS=extended(found.gone_BHS, now[2]))

    def observe(self, call: AttentionCall, out: Tensor) -> None:
        super().observe(call, out)
        when = self.options.when
        if when == "now" or self.log.is_probing != (when == "clean"):
            return
        site = self.site_of(call)
        if site is None:
            return
        view = self._view(call, site)
        if self.options.how.stays and when == "previous":
            # Whether a key may be chosen again after it was evicted is known in the next forward.
            self.forward.chosen[call.layer] = replace(view, call=None)
            return
        taken = self.forward.taken.get(call.layer)
        before_BHS = None
        if taken is not None and when == "kept":
            before_BHS = taken.gone_BHS
        self.forward.chosen[call.layer] = self._chosen(call, view, before_BHS)

    def _view(self, call: AttentionCall, site: CallSite) -> KeyView:
        options = self.options
        return KeyView.of(
            call,
            site,
            options.scores or "received",
            by_attention=options.keys.by_attention,
            tap=self.log.tap,
            limit=options.limit,
            draw=self.draw,
            doubt=self.doubt,
        )

    def _chosen(self, call: AttentionCall, view: KeyView, before_BHS: Tensor | None) -> Selection:
        """Keys that the selector chooses in this view.

        `before_BHS`: keys that are gone already, of all heads; None for none.
        """
        options = self.options
        selector = options.keys
        site = view.site
        every = call.query_BHQD.shape[1]
        if before_BHS is not None:
            before_BHS = of_heads(before_BHS, site.heads)
            view = replace(view, gone_BHS=before_BHS)
        with torch.no_grad():
            flags_BHS = selector.select(view)
            if options.limit is not None and selector.by_attention:
                # for selectors that do not heed it
                count_BH1 = flags_BHS.sum(-1, keepdim=True)
                flags_BHS = view.top(view.scores_BHS, count_BH1, flags_BHS, selector.most)
            flags_BHS = flags_BHS.expand(-1, len(site.heads), -1)
            if selector.by_attention:
                self._check_enough(view, flags_BHS)
                columns_BHM = by_falling_score(flags_BHS, view.scores_BHS, selector.most)
                numbers = self._numbers(view, flags_BHS)
            else:
                columns_BHM = as_columns(flags_BHS)
                numbers = {}
            if before_BHS is not None and options.when == "kept":
                before_BHM = as_columns(before_BHS, options.limit)
                columns_BHM = torch.cat([columns_BHM, before_BHM], -1)
                flags_BHS = flags_BHS | before_BHS
            gone_BHS = flags_BHS
            if len(site.heads) < every:
                gone_BHS = flags_BHS.new_zeros(len(flags_BHS), every, flags_BHS.shape[-1])
                gone_BHS[:, site.heads] = flags_BHS
            random_BHS = gone_BHS.new_empty(0)
            if options.how.draws:
                random_BHS = self.draw(gone_BHS.shape).to(gone_BHS.device, non_blocking=True)
        return Selection(gone_BHS, columns_BHM, numbers, random_BHS)

    def _numbers(self, view: KeyView, flags_BHS: Tensor) -> dict[str, Tensor]:
        """Attention that the chosen keys hold, their number, and how many of them are sinks; NaN
        where keys are blocked already and none could be added.
        """
        options = self.options
        rule = options.counted_by or options.keys.sink_rule or DEFAULT
        held_BH = view.scores_BHS.masked_fill(~flags_BHS, 0.0).sum(-1)
        count_BH = flags_BHS.sum(-1)
        numbers = {
            "held": held_BH / view.queries_B1,
            "chosen": count_BH.to(held_BH),
            "sinks": (flags_BHS & view.sinks(rule)).sum(-1).to(held_BH),
        }
        if view.gone_BHS is not None:
            gone_BH = view.gone_BHS.sum(-1)
            full_BH = (gone_BH > 0) & (count_BH == 0)
            if options.limit is not None:
                full_BH = full_BH | (gone_BH >= options.limit)
            numbers = {
                name: number_BH.masked_fill(full_BH, math.nan)
                for name, number_BH in numbers.items()
            }
        return numbers | {name: note.expand_as(held_BH) for name, note in view.notes.items()}

    def _check_enough(self, view: KeyView, flags_BHS: Tensor) -> None:
        """Every head keeps a key; each for itself, as rows of unequal length lose unequal numbers
        of keys.
        """
        count_BH = flags_BHS.sum(-1)
        left_BH = view.seen_B1S.sum(-1).expand_as(count_BH)
        if view.gone_BHS is not None:
            # a key that a cache has dropped since its removal is no key that a query loses
            left_BH = left_BH - (view.gone_BHS & view.seen_B1S).sum(-1)
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

    def gone_before(self, call: AttentionCall) -> Tensor | None:
        """Evicted keys of this layer that are still removed, bool (B, H, S) for all heads; None for
        none.
        """
        before = self.previous.get(self.forward.slot, Forward())
        known = before.taken.get(call.layer)
        if known is None or not self.options.how.stays:
            return None
        running = call.visibility.running
        columns = call.key_BKSD.shape[2]
        # keys and values of the whole canvas are computed anew in this forward
        if not call.origin.is_own:
            is_full = call.origin.cache is None
        elif running is not None:
            is_full = running.columns is None
        else:
            is_full = call.query_BHQD.shape[2] == columns - self.log.prefix_of(call)
        if is_full:
            return None
        return extended(known.gone_BHS, columns)

    def _with_evicted(
        self, selected: Selection | None, call: AttentionCall, site: CallSite
    ) -> Selection | None:
        known_BHS = self.gone_before(call)
        if known_BHS is None:
            return selected
        limit = self.options.limit
        if selected is None:
            return Selection(known_BHS, as_columns(of_heads(known_BHS, site.heads), limit))
        older_BHS = of_heads(known_BHS & ~selected.gone_BHS, site.heads)
        columns_BHM = torch.cat([selected.columns_BHM, as_columns(older_BHS, limit)], -1)
        return replace(selected, gone_BHS=known_BHS | selected.gone_BHS, columns_BHM=columns_BHM)

    def finish(self) -> None:
        super().finish()
        if self.forward.chosen:
            self.slots[self.forward.slot] = self.forward.chosen
            ids_BS = self.log.tap.ids_BS
            if ids_BS is not None:
                # a copy, as a decoding loop may change its ids in place
                ids_BS = ids_BS.clone()
            self.texts[self.forward.slot] = ids_BS

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

    def _check_text(self, call: AttentionCall) -> None:
        """Warn, once, if keys chosen in one text are removed in another: without a run, nothing
        says that one begins.
        """
        before_BS = self.texts.get(self.forward.slot)
        now_BS = self.log.tap.ids_BS
        if before_BS is None or now_BS is None or decoding_run() is not None:
            return
        # once a forward, in the first layer that loses keys
        if self.warned or self.forward.taken:
            return
        length = call.key_BKSD.shape[2] - self.log.prefix_of(call)
        is_canvas = now_BS.shape[1] == length >= before_BS.shape[1]
        if is_canvas and len(before_BS) == len(now_BS):
            mask_id = mask_id_of(self.log.tap.model)
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


def by_falling_score(flags_BHS: Tensor, score_BHS: Tensor, most: int | None) -> Tensor:
    """Flags as columns (B, H, M), the highest score first, −1 where a head has fewer than M.

    `most`: the most there may be, for a device that is not to be asked.
    """
    count_BH1 = flags_BHS.sum(-1, keepdim=True)
    keys = flags_BHS.shape[-1]
    if most is not None and reads_wait(flags_BHS.device):
        width = min(most, keys)
    else:
        width = int(count_BH1.max())
    columns_BHM = score_BHS.masked_fill(~flags_BHS, -torch.inf).topk(width, dim=-1).indices
    return columns_BHM.masked_fill(torch.arange(width, device=count_BH1.device) >= count_BH1, -1)


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
