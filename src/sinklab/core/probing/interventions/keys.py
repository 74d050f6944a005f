"""Interventions that remove keys: a subclass chooses them, in `select`; time, method and effect are
here.
"""

# B batch, H query heads (those edited in scores and choices, all in `gone`), S keys, M keys taken
# away
from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sinklab.core.attention.context import decoding_run
from sinklab.core.attention.scores import of_heads
from sinklab.core.errors import limited
from sinklab.core.probing.call import AttentionCall
from sinklab.core.probing.intervention import InterventionLog
from sinklab.core.probing.interventions.base import (
    CallSite,
    Effect,
    InterventionHandler,
    LayerIntervention,
)
from sinklab.core.probing.interventions.queries import (
    check_queries,
    chosen_queries,
    own_keys,
    query_positions,
)
from sinklab.core.probing.interventions.removal import (
    REMOVALS,
    Doubt,
    as_columns,
    as_flags,
    at_once,
    extended,
    keys_seen,
    lost_share,
    real_queries_B1,
    reference_values,
    replaced_values,
    restricted,
)
from sinklab.core.probing.listener import Listener
from sinklab.core.probing.scope import as_int
from sinklab.core.sinks.rules import DEFAULT, Rule, find_sinks

SOURCES = ("now", "closed_loop", "clean_pass", "carried")
SELECTORS = ("received", "last_row")
Draw = Callable[[Sequence[int]], Tensor]


@dataclass(frozen=True)
class KeyScores:
    """The scores of one call's keys in the heads that are edited: all that a selection of keys
    needs.
    """

    received_BHS: Tensor
    """Attention received, from all queries or from the last one."""
    queries_B1: Tensor | int
    """Number of queries it was received from."""
    visible_BHS: Tensor
    """Number of queries that may see the key; its head axis may be 1."""
    site: CallSite
    gone_BHS: Tensor | None = None
    """Keys that are removed already; None for none."""
    call: AttentionCall | None = None
    """The call itself; None if the choice has to wait for the next forward (evicted keys in a
    closed loop).
    """
    draw: Draw = torch.rand
    """Random numbers of a shape (B, H, S), uniform in [0, 1), which follow from the seed."""
    doubt: Doubt = at_once
    """Handler of doubts about a choice, which need not ask the device at once."""

    @classmethod
    def of(
        cls,
        call: AttentionCall,
        selector: str,
        site: CallSite,
        draw: Draw = torch.rand,
        doubt: Doubt = at_once,
    ) -> KeyScores:
        """`selector`: "received" or "last_row". The call's own tensors are not kept."""
        with torch.no_grad():
            is_last = selector == "last_row"
            received_BHS = call.last_row_BHS if is_last else call.received_BHS
            visible_BHS = call.visibility.visible_BHS.to(received_BHS.device)
            if len(site.heads) < received_BHS.shape[1]:
                received_BHS = of_heads(received_BHS, site.heads)
                visible_BHS = (
                    of_heads(visible_BHS, site.heads) if visible_BHS.shape[1] > 1 else visible_BHS
                )
            visible_BHS = (visible_BHS > 0).long() if is_last else visible_BHS
        queries_B1 = 1 if is_last else real_queries_B1(call)
        return cls(received_BHS, queries_B1, visible_BHS, site, draw=draw, doubt=doubt)

    @property
    def prefix(self) -> int:
        """Sink columns in front of the keys."""
        return self.site.prefix

    def sinks(self, rule: Rule, received_BHS: Tensor | None = None) -> Tensor:
        """Sinks by a rule, bool (B, H, S), as if all queries had run.

        `received_BHS`: in place of the attention received in each head, such as its mean (B, 1, S).
        """
        score_BHS = self.received_BHS if received_BHS is None else received_BHS
        visible_BHS = self.visible_BHS.to(score_BHS.dtype)
        visible_BHS = visible_BHS.amax(1, keepdim=True) if score_BHS.shape[1] == 1 else visible_BHS
        positions_B1 = (visible_BHS[..., self.prefix :].amax(1) > 0).sum(-1, keepdim=True)
        return find_sinks(score_BHS, rule, visible_BHS, positions_B1)


@dataclass(frozen=True, kw_only=True)
class KeyIntervention(LayerIntervention):
    """Base of interventions that remove the same keys for all queries of a head: a subclass chooses
    them, in `select`.

    Raises ValueError for values outside those listed, and for a limit if keys do not stay removed.
    """

    removal: str = limited("mask", one_of=REMOVALS)
    """"mask": before the softmax, the mass goes to other keys. "zero_value": the mass stays, the
    value adds nothing. "evict": keys and values leave the memory. In one forward that is a mask;
    under a cache the keys stay removed, those of recomputed columns too, until everything is
    computed anew (under an autoregressive cache: to the end). "mean_value": the mass stays, the
    value becomes the mean of that head's sinks in reference texts (`values`). "pool_value": it
    becomes the mean of the other keys that are seen. A query that would lose every key it may see
    (the first rows of a causal map) keeps its own.
    """
    source: str | None = limited("now", one_of=SOURCES)
    """"now": chosen in the forward that loses them, from the call as it is given. "closed_loop":
    forward t loses the keys chosen at forward t-1 of the same edited run, the first is unedited.
    "clean_pass": chosen in forwards run unedited under `log.probing()`. "carried": as closed_loop,
    and a key once removed stays removed; every forward adds its own until `limit` keys are removed.
    None: "clean_pass" if a whole text is scored, else "closed_loop".
    """
    selector: str = limited("received", one_of=SELECTORS)
    """"received": column sums over all queries. "last_row": the last query's row (the
    autoregressive reading).
    """
    queries: str | None = None
    """Queries for which keys are blocked: "all", "from32" (canvas positions from 32 on), "masked",
    "committed" or "prompt"; a query then never loses its own key. None: for all, their own key
    included (arXiv 2510.15731).
    """
    values: str | None = None
    """With removal="mean_value": a file of `save_reference_values`."""
    limit: int | None = None
    """The most keys a head may have lost at a time; needed by "carried", whose sets grow, and open
    to "evict".
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        check_queries(self.queries, self.removal)
        check_values(self.values, self.removal)
        object.__setattr__(self, "limit", checked_count("limit", self.limit))
        grows = self.source == "carried" or self.removal == "evict"
        if (self.source == "carried" and self.limit is None) or (
            self.limit is not None and not grows
        ):
            raise ValueError(
                "limit says how many keys may be gone at a time where gone keys stay gone: "
                'source="carried" needs it, '
                f'removal="evict" takes it, the others do not; got source={self.source!r}, '
                f"removal={self.removal!r}, limit={self.limit}"
            )

    def select(self, keys: KeyScores) -> Tensor:
        """Return the keys to remove: flags, bool (B, H, S), or columns, int64 (B, H, M), with -1
        for none.

        An axis H of 1 means the same keys in every head.
        """
        raise NotImplementedError

    def chosen(self, keys: KeyScores) -> tuple[Tensor, Tensor | None]:
        """Columns (B, H, M), -1 for none, and flags (B, H) of heads with a matched control; None if
        none is sought.
        """
        found = self.select(keys)
        return (as_columns(found) if found.dtype == torch.bool else found), None

    def counts(self, keys: KeyScores) -> Tensor:
        """Keys counted as sinks in the log, bool (B, H, S): by its rule, or `DEFAULT` if it has
        none.
        """
        return keys.sinks(
            getattr(self, "rule", None) or getattr(self, "counted_by", None) or DEFAULT
        )

    def handler(self, log: InterventionLog, forwards_per_step: int) -> Listener:
        return SelectionHandler(
            self if self.source else replace(self, source="closed_loop"), log, forwards_per_step
        )


def check_values(values: str | None, removal: str) -> None:
    """Raises ValueError unless a file of reference values is named exactly if it is needed."""
    if (removal == "mean_value") != (values is not None):
        raise ValueError(
            "values names a file of save_reference_values for removal='mean_value', which needs "
            f"it, got removal={removal!r} and values={values!r}"
        )


def checked_count(name: str, given: Any) -> int | None:
    """A number of keys to remove, or None. Raises ValueError for anything but a number of at least
    1.
    """
    number = as_int(given)
    if given is not None and (number is None or number < 1):
        raise ValueError(
            f"{name} counts the keys to remove, at least 1, got {given!r}: for none, leave out "
            "the edit"
        )
    return number


@dataclass(frozen=True)
class Choice:
    """Keys that an intervention chose in one call, over the heads that are edited."""

    columns_BHM: Tensor
    """Columns by falling score, -1 if a head loses fewer than M."""
    mass_BH: Tensor
    """The share of attention that they hold in this call; NaN if keys are removed already and none
    was added.
    """
    chosen_BH: Tensor
    """Number of these keys; NaN as for the mass."""
    sinks_BH: Tensor
    """Number of them that the rule calls sinks; NaN as for the mass."""
    matched_BH: Tensor
    """1 for heads with a control of equal mass, 0 for those without; NaN if none is sought."""

    @classmethod
    def unasked(cls, columns_BHM: Tensor) -> Choice:
        """Keys that attention did not choose."""
        unknown_BH = torch.full(columns_BHM.shape[:2], math.nan, device=columns_BHM.device)
        return cls(columns_BHM, unknown_BH, unknown_BH, unknown_BH, unknown_BH)


def choose(options: KeyIntervention, keys: KeyScores) -> Choice:
    """The keys that an intervention selects."""
    with torch.no_grad():
        every_BHS = keys.received_BHS
        columns_BHM, matched_BH = options.chosen(keys)
        columns_BHM = columns_BHM.expand(*every_BHS.shape[:2], -1)
        none_BHM, place_BHM = columns_BHM < 0, columns_BHM.clamp(min=0)
        mass_BH = (
            every_BHS.gather(2, place_BHM).masked_fill(none_BHM, 0.0).sum(-1) / keys.queries_B1
        )
        sinks_BHM = options.counts(keys).gather(2, place_BHM) & ~none_BHM
        unknown_BH = torch.full_like(mass_BH, math.nan)
        chosen_BH = (~none_BHM).sum(-1)
        full_BH = torch.zeros_like(mass_BH, dtype=torch.bool)
        if keys.gone_BHS is not None:
            gone_BH = keys.gone_BHS.sum(-1)
            # for keys that stay removed, the first choice gives the attention they held
            full_BH = (gone_BH > 0) & (chosen_BH == 0)
            full_BH = full_BH if options.limit is None else full_BH | (gone_BH >= options.limit)
        numbers = (mass_BH, chosen_BH.to(mass_BH), sinks_BHM.sum(-1).to(mass_BH))
        mass_BH, chosen_BH, sinks_BH = (
            number_BH.masked_fill(full_BH, math.nan) for number_BH in numbers
        )
        matched_BH = unknown_BH if matched_BH is None else matched_BH.expand_as(mass_BH).to(mass_BH)
        return Choice(columns_BHM, mass_BH, chosen_BH, sinks_BH, matched_BH)


def seeded_draw(seed: int) -> Draw:
    """Random numbers that follow from the seed, one tensor after another."""
    generator = torch.Generator().manual_seed(seed)
    # Drawn on the CPU, so that a seed means the same columns on every device.
    return lambda shape: torch.rand(tuple(shape), generator=generator)


@dataclass(frozen=True)
class Selection:
    """Keys to remove in one layer: flags for all heads, and the choice for the heads that are
    edited.
    """

    gone_BHS: Tensor
    choice: Choice


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


class KeyHandler(InterventionHandler):
    """Takes keys from the queries of a head. A subclass says which, in `selection`."""

    def selection(self, call: AttentionCall, site: CallSite) -> Selection | None:
        """Return the keys to remove in this layer and forward; None for nothing."""
        raise NotImplementedError

    def apply(self, call: AttentionCall, site: CallSite) -> tuple[AttentionCall, Effect | None]:
        removal, taken = self.options.removal, self.forward.taken
        if self.is_open:
            selected = self.selection(call, site)
            taken[call.layer] = (
                self._with_evicted(selected, call, site) if removal == "evict" else selected
            )
        selected = taken.get(call.layer)
        if selected is None:
            return call, None
        edited, every_BHS = call, selected.gone_BHS
        keeps_values = removal in ("mask", "evict")
        spared_BH = torch.zeros(call.query_BHQD.shape[:2], device=call.query_BHQD.device)
        if selected.choice.columns_BHM.shape[-1] > 0:
            if keeps_values:
                edited, spared_BH = self._blocked(call, every_BHS, site.prefix)
            else:
                means_HD = (
                    reference_values(self.options.values)[call.layer]
                    if self.options.values
                    else None
                )
                edited = replaced_values(call, every_BHS, removal, means_HD)
        if not self.is_open:
            return edited, None
        heads, choice, gone_BHS = site.heads, selected.choice, of_heads(every_BHS, site.heads)
        realised_BH = left_BH = torch.full_like(choice.mass_BH, math.nan)
        if self.log.measure:
            with torch.no_grad():
                if self.options.queries is not None:
                    share_BH = lost_share(call, edited)
                else:
                    # A spared query saw nothing but these keys: it gives them a mass of 1.
                    held_BH = call.received_BHS.masked_fill(~every_BHS, 0.0).sum(-1) - spared_BH
                    share_BH = held_BH / real_queries_B1(call)
                realised_BH = of_heads(share_BH, heads)
                left_BH = of_heads(
                    keys_seen(edited) if keeps_values else keys_seen(call, every_BHS), heads
                )
        numbers = {
            "mass": choice.mass_BH,
            "realised": realised_BH,
            "left": left_BH,
            "removed": gone_BHS.sum(-1),
        }
        numbers |= {"alone": of_heads(spared_BH, heads)}
        numbers |= {
            "chosen": choice.chosen_BH,
            "sinks": choice.sinks_BH,
            "matched": choice.matched_BH,
        }
        return edited, Effect(heads, choice.columns_BHM, gone_BHS, numbers)

    def _blocked(
        self, call: AttentionCall, gone_BHS: Tensor, prefix: int
    ) -> tuple[AttentionCall, Tensor]:
        """The call with these keys blocked for the queries that are meant, and how many were left
        alone (B, H).
        """
        # Flags expanded over heads stay one row of them: so does the mask.
        gone_BHS = gone_BHS[:, :1] if gone_BHS.stride(1) == 0 else gone_BHS
        gone_BH1S, queries = gone_BHS.unsqueeze(2), self.options.queries
        if queries is None:
            return restricted(call, ~gone_BH1S, self.doubt)
        positions_Q = query_positions(call, prefix)
        meant_BQ = chosen_queries(queries, call, positions_Q, self.log.tap)
        own_QS = own_keys(positions_Q, prefix, call.key_BKSD.shape[2])
        keep_BHQS = ~(gone_BH1S & meant_BQ[:, None, :, None])
        return restricted(call, keep_BHQS, self.doubt, own_QS=own_QS)

    def gone_before(self, call: AttentionCall) -> Tensor | None:
        """Evicted keys of this layer that are still removed, bool (B, H, S) for all heads; None for
        none.
        """
        before = self.previous.get(self.forward.slot)
        known = None if before is None else before.taken.get(call.layer)
        running, columns = call.visibility.running, call.key_BKSD.shape[2]
        # keys and values of the whole canvas are computed anew in this forward
        own = columns - self.log.prefix_of(call)
        is_full = call.query_BHQD.shape[2] == own if running is None else running.columns is None
        is_full = is_full if call.origin.is_own else call.origin.cache is None
        return None if known is None or is_full else extended(known.gone_BHS, columns)

    def _with_evicted(
        self, selected: Selection | None, call: AttentionCall, site: CallSite
    ) -> Selection | None:
        known_BHS, limit = self.gone_before(call), getattr(self.options, "limit", None)
        if known_BHS is None:
            return selected
        if selected is None:
            return Selection(
                known_BHS, Choice.unasked(as_columns(of_heads(known_BHS, site.heads), limit))
            )
        older_BHS = of_heads(known_BHS & ~selected.gone_BHS, site.heads)
        columns_BHM = torch.cat([selected.choice.columns_BHM, as_columns(older_BHS, limit)], -1)
        return Selection(
            known_BHS | selected.gone_BHS, replace(selected.choice, columns_BHM=columns_BHM)
        )


class SelectionHandler(KeyHandler):
    """Asks `KeyIntervention.select` at the time that its `source` names."""

    options: KeyIntervention

    def __init__(
        self, options: KeyIntervention, log: InterventionLog, forwards_per_step: int
    ) -> None:
        self.draw = seeded_draw(getattr(options, "seed", 0))
        # Whether a key may be chosen again after it was evicted is known in the next forward: the
        # choice waits for it.
        self.waits = options.removal == "evict" and options.source == "closed_loop"
        self.warned = False
        super().__init__(options, log, forwards_per_step)

    def reset(self, *, run_begins: bool = False) -> None:
        # A clean pass may have been run ahead of the run that begins.
        if not (run_begins and self.options.source == "clean_pass"):
            self.slots: dict[int, dict[str, Selection | KeyScores]] = {}
            """Selection for the next forward, or the scores for its choice, by slot and layer."""
            self.texts: dict[int, Tensor | None] = {}
            """Ids (B, S) of the forward in which that was chosen, by slot; None if they are not
            known.
            """
        super().reset()

    def begin(self) -> None:
        super().begin()
        if self.options.source == "clean_pass":
            self.forward.slot = 0

    def selection(self, call: AttentionCall, site: CallSite) -> Selection | None:
        if self.options.source == "now":
            keys = KeyScores.of(call, self.options.selector, site, self.draw, self.doubt)
            return self._choice(call, keys, self.gone_before(call))
        found = self.slots.get(self.forward.slot, {}).get(call.layer)
        if found is None and self.options.source == "clean_pass":
            raise ValueError(
                'source="clean_pass" chooses in an unedited forward, but none was run: '
                "with log.probing(): model(…) before the edited forward"
            )
        if found is None:
            return None
        now = (*call.query_BHQD.shape[:2], call.key_BKSD.shape[2])
        # The scores that a choice waits with are those of the edited heads alone.
        made = found.gone_BHS.shape if isinstance(found, Selection) else found.received_BHS.shape
        heads = made[1] if isinstance(found, Selection) else now[1]
        if (made[0], heads) != now[:2] or now[2] < made[2]:
            raise ValueError(
                f"the selection was made for {made[0]} rows, {heads} heads and {made[2]} keys, but "
                f"this forward has {now[0]}, {now[1]} and {now[2]}: call log.reset() where a new "
                "sequence or batch begins"
            )
        self._check_text(call)
        if isinstance(found, KeyScores):
            held_BHS = self.gone_before(call)
            known = found.received_BHS.shape[-1]
            found = self._choice(call, found, None if held_BHS is None else held_BHS[..., :known])
        return replace(found, gone_BHS=extended(found.gone_BHS, call.key_BKSD.shape[2]))

    def observe(self, call: AttentionCall, out: Tensor) -> None:
        super().observe(call, out)
        source = self.options.source
        chooses = source != "now" and self.log.is_probing == (source == "clean_pass")
        if not chooses or (site := self.site_of(call)) is None:
            return
        keys = KeyScores.of(call, self.options.selector, site, self.draw, self.doubt)
        now = self.forward.taken.get(call.layer) if source == "carried" else None
        held_BHS = None if now is None else now.gone_BHS
        self.forward.chosen[call.layer] = keys if self.waits else self._choice(call, keys, held_BHS)

    def finish(self) -> None:
        super().finish()
        if self.forward.chosen:
            self.slots[self.forward.slot] = self.forward.chosen
            ids_BS = self.log.tap.ids_BS
            # a loop may write into its own
            self.texts[self.forward.slot] = None if ids_BS is None else ids_BS.clone()

    def _check_text(self, call: AttentionCall) -> None:
        """Warn, once, if keys chosen in one text are removed in another: without a run, nothing
        says that one begins.
        """
        before_BS, now_BS = self.texts.get(self.forward.slot), self.log.tap.ids_BS
        if before_BS is None or now_BS is None or decoding_run() is not None:
            return
        # once a forward, in the first layer that loses keys
        if self.warned or self.forward.taken:
            return
        length = call.key_BKSD.shape[2] - self.log.prefix_of(call)
        if (
            len(before_BS) != len(now_BS)
            or now_BS.shape[1] != length
            or before_BS.shape[1] > length
        ):
            return
        mask_id = getattr(getattr(self.log.tap.model, "config", None), "mask_token_id", None)
        self.doubt(is_other_text(before_BS, now_BS[:, : before_BS.shape[1]], mask_id), self._warn)

    def _warn(self) -> None:
        self.warned = True
        warnings.warn(
            f"{self.label}: this forward has another text than the one in which its keys were "
            "chosen, and loses them "
            "all the same: call log.reset() where a new sequence or batch begins",
            stacklevel=2,
        )

    def why_idle(self) -> tuple[str, str]:
        if self.options.source in ("now", "clean_pass"):
            return super().why_idle()
        source = f"source={self.options.source!r}" + (
            f", forwards_per_step={self.period}" if self.period > 1 else ""
        )
        return (
            f"{source} removes what the step before chose, and no sequence had a second step",
            'run more than one denoising step, or choose within the step with source="clean_pass"',
        )

    def _choice(self, call: AttentionCall, keys: KeyScores, held_BHS: Tensor | None) -> Selection:
        """`held_BHS`: keys that are removed already, of all heads."""
        heads, every = keys.site.heads, call.query_BHQD.shape[1]
        held_BHS = None if held_BHS is None else of_heads(held_BHS, heads)
        keys = replace(keys, gone_BHS=held_BHS, call=None if self.waits else call)
        choice = choose(self.options, keys)
        if held_BHS is not None and self.options.source == "carried":
            choice = replace(
                choice,
                columns_BHM=torch.cat(
                    [choice.columns_BHM, as_columns(held_BHS, self.options.limit)], -1
                ),
            )
        gone_BHS = as_flags(choice.columns_BHM, keys.received_BHS.shape[-1])
        if len(heads) < every:
            some_BHS, gone_BHS = (
                gone_BHS,
                gone_BHS.new_zeros(len(gone_BHS), every, gone_BHS.shape[-1]),
            )
            gone_BHS[:, heads] = some_BHS
        return Selection(gone_BHS, choice)
