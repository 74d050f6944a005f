"""`MaskSinks`: remove the keys that received most attention, one step later (arXiv 2510.15731,
section 4.3).
"""

# B batch, H query heads (1 where they share a choice), S keys, M keys chosen
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sinklab.core.attention.context import reads_wait
from sinklab.core.errors import limited, one_of
from sinklab.core.probing.interventions.keys import (
    SOURCES,
    KeyIntervention,
    KeyScores,
    checked_count,
)
from sinklab.core.probing.interventions.removal import as_columns, as_flags
from sinklab.core.probing.scope import CONTROLS, PROTOCOLS, whole_numbers
from sinklab.core.registry import interventions, of, rules
from sinklab.core.sinks.rules import DEFAULT, Excess, Rule

SHARED = ("head", "layer")


@interventions.register("mask_sinks")
@dataclass(frozen=True)
class MaskSinks(KeyIntervention):
    """Remove sinks per (batch row, layer, query head): the top k, those of a rule, or its top k.

    Raises ValueError if neither k nor a rule is given, and for values outside those listed.
    """

    k: int | None = None
    """Number of keys to remove; fewer than there are keys that are not padding. Without a rule the
    k that receive most, sinks or not; with one at most k, and None for all that the rule names."""
    epsilon: float | None = None
    """Short for rule=Excess(epsilon): every key with a_j > 1 + epsilon (S-1)/S (Eq. 3 in sums)."""
    _: KW_ONLY
    rule: Rule | None = of(rules, None)  # noqa: RUF009
    """Rule for sinks: `Excess(3.0)`, or any other registered rule. If a cache lets only some
    queries run, a_j is scaled by positions / queries that ran, so that an even share is 1 in every
    forward.
    """
    source: str | None = limited(None, one_of=SOURCES)
    """Time at which keys are chosen: "closed_loop", "clean_pass", "carried" or "now"; see
    `KeyIntervention`. None: "clean_pass" if a whole text is scored, else "closed_loop".
    """
    control: str = limited("sinks", one_of=CONTROLS)
    """Keys to remove, "sinks" or a control: "random", "recent" and "lowest" are as many keys that
    are not among the sinks (nor sinks by the rule, if one is given), drawn, the last ones, or those
    that received least (a blocked key receives nothing: in a closed loop these stay the same from
    then on). "equal_mass": keys that are no sinks and together hold as much as the chosen ones,
    within 10 %, the greatest first; a head without such keys loses nothing.
    """
    matched: bool = False
    """Leave out the heads that have no control of equal mass: the arm to compare
    control="equal_mass" with.
    """
    counted_by: Rule | None = of(rules, None)  # noqa: RUF009
    """Rule by which, if no rule is given, the log counts sinks among the removed keys and the
    control of equal mass excludes sinks; None is Excess(3.0).
    """
    seed: int = 0
    """Seed of the random control."""
    spare_prefix: bool = False
    """Never choose the model's own sink columns, which stand in front of the keys."""
    spare: tuple[int, ...] = ()
    """Canvas positions that are never chosen."""
    shared: str = limited("head", one_of=SHARED)
    """"head": every head loses its own keys. "layer": all (named) heads lose those that receive
    most on their mean.
    """

    def __post_init__(self) -> None:
        if self.rule is None and (self.k is None) == (self.epsilon is None):
            raise ValueError(
                "MaskSinks takes k, how many keys, or epsilon, how far above an even share; got "
                f"k={self.k} and "
                f"epsilon={self.epsilon}: give one of them, or a rule, with k or without"
            )
        object.__setattr__(self, "k", checked_count("k", self.k))
        if self.epsilon is not None:
            if self.rule is not None:
                raise ValueError(
                    f"epsilon={self.epsilon} is short for a rule, but {self.rule} is given: leave "
                    "out one"
                )
            object.__setattr__(self, "rule", Excess(self.epsilon))
            object.__setattr__(self, "epsilon", None)
        if self.rule is not None and self.counted_by is not None:
            raise ValueError(
                f"what rule={self.rule} chooses is counted by it: leave out "
                f"counted_by={self.counted_by}"
            )
        if self.matched and self.control not in ("sinks", "equal_mass"):
            raise ValueError(
                "matched=True leaves out heads without a control of equal mass, but "
                f"control={self.control!r} matches "
                'the number of keys: take control="sinks" or "equal_mass"'
            )
        object.__setattr__(self, "spare", whole_numbers("spare", self.spare))
        super().__post_init__()

    @classmethod
    def by_protocol(
        cls, protocol: str, k: int, rule: Rule | None = None, **fields: Any
    ) -> MaskSinks:
        """The edit of a named protocol, for at most `k` keys a head; further fields as in the
        class.

        "paper": the k keys that received most at the step before, whatever they hold (arXiv
        2510.15731, section 4.3). A blocked key receives nothing and is not chosen again, so a
        lasting sink is blocked at every other step. "held": the k keys chosen first stay blocked.
        "rule": those keys, at most k, that the rule calls sinks, and they stay blocked. "clean":
        the k keys that receive most in an unedited forward of the same step. But for "rule", the
        rule only counts. Raises ValueError for another name.
        """
        one_of("protocol", protocol, PROTOCOLS)
        if protocol == "rule":
            return cls(k=k, rule=rule or DEFAULT, source="carried", limit=k, **fields)
        when: dict[str, Any] = {"source": "clean_pass" if protocol == "clean" else "closed_loop"}
        when = {"source": "carried", "limit": k} if protocol == "held" else when
        return cls(k=k, counted_by=rule, **when, **fields)

    @property
    def draws(self) -> bool:
        """Whether columns are drawn, so that equal rows may lose different ones."""
        return self.control == "random"

    def read_once(self, *, is_causal: bool) -> MaskSinks:
        """The edit for a whole text read at once: chosen in a clean pass, if no source is named.

        `is_causal`: by the attention of all queries, as the last row of a whole text says nothing
        of those before it. Raises ValueError for a source that needs steps.
        """
        if self.source in ("closed_loop", "carried"):
            raise ValueError(
                f"a text is scored in one step, so source={self.source!r} has no step before it to "
                "choose in; leave it out, and a clean pass over the same text chooses"
            )
        selector = "received" if is_causal else self.selector
        return replace(self, source=self.source or "clean_pass", selector=selector)

    def without_steps(self) -> MaskSinks:
        """This edit with no source over steps named, for protocols without steps."""
        limit, over = (
            self.limit if self.removal == "evict" else None,
            self.source in ("closed_loop", "carried"),
        )
        return replace(self, source=None, limit=limit) if over else self

    def select(self, keys: KeyScores) -> Tensor:
        """Columns (B, H, M) by falling score. Raises ValueError if too few keys would stay."""
        return self.chosen(keys)[0]

    def chosen(self, keys: KeyScores) -> tuple[Tensor, Tensor | None]:
        """Columns as `select` gives them, and flags (B, H) of heads with a control of equal mass;
        NaN if there is nothing to match.
        """
        score_BHS = keys.received_BHS
        score_BHS = score_BHS.mean(1, keepdim=True) if self.shared == "layer" else score_BHS
        # A shared choice removes the same keys in every head.
        gone_BHS = None if keys.gone_BHS is None else keys.gone_BHS[:, : score_BHS.shape[1]]
        free_BHS = self._free(keys, score_BHS, gone_BHS)
        gone_BH1 = (
            free_BHS.new_zeros(1, 1, 1).long()
            if gone_BHS is None
            else gone_BHS.sum(-1, keepdim=True)
        )
        sinks_BHS = None if self.rule is None else keys.sinks(self.rule, score_BHS)
        wanted_BHS = free_BHS if sinks_BHS is None else free_BHS & sinks_BHS
        count: int | Tensor = self.k or 0
        if sinks_BHS is not None:
            found_BH1 = wanted_BHS.sum(-1, keepdim=True)
            count = found_BH1 if self.k is None else found_BH1.clamp(max=self.k)
        if self.limit is not None:
            count = (self.limit - gone_BH1).clamp(min=0).clamp_max(count)
        others_BHS = free_BHS if sinks_BHS is None else free_BHS & ~sinks_BHS
        # a key that a cache has dropped since its removal is no key that a query loses
        seen_B1S = (keys.visible_BHS.amax(1) > 0).unsqueeze(1)
        lost_BH1 = gone_BH1 if gone_BHS is None else (gone_BHS & seen_B1S).sum(-1, keepdim=True)
        self._check_enough(count, keys, free_BHS, others_BHS, lost_BH1)
        if isinstance(count, int):
            most = count
        else:
            # on a device that is not to be asked, as many columns as there may be; the surplus ones
            # are -1
            is_far = self.k is not None and reads_wait(count.device)
            most = min(self.k or 0, score_BHS.shape[-1]) if is_far else int(count.max())
        columns_BHM = _largest(score_BHS.masked_fill(~wanted_BHS, -torch.inf), count, most)
        taken_BHS = as_flags(columns_BHM, score_BHS.shape[-1])
        others_BHS = others_BHS & ~taken_BHS
        if self.matched or self.control == "equal_mass":
            return self._matched(keys, score_BHS, columns_BHM, taken_BHS, others_BHS)
        if self.control == "sinks":
            return columns_BHM, None
        return _largest(
            self._order(keys, score_BHS).masked_fill(~others_BHS, -torch.inf), count, most
        ), None

    def _free(self, keys: KeyScores, score_BHS: Tensor, gone_BHS: Tensor | None) -> Tensor:
        """Keys (B, H, S) that may be chosen: seen, there still, and not spared."""
        free_BHS = (keys.visible_BHS.amax(1) > 0).unsqueeze(1).repeat(1, score_BHS.shape[1], 1)
        if self.spare_prefix:
            free_BHS[..., : keys.prefix].fill_(False)
        for column in (keys.prefix + position for position in self.spare):
            free_BHS[..., column : column + 1].fill_(False)
        return free_BHS if gone_BHS is None else free_BHS & ~gone_BHS

    def _matched(
        self,
        keys: KeyScores,
        score_BHS: Tensor,
        columns_BHM: Tensor,
        taken_BHS: Tensor,
        others_BHS: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """The chosen columns or their control of equal mass, and the heads that have one."""
        if self.rule is None:
            others_BHS = others_BHS & ~keys.sinks(self.counted_by or DEFAULT, score_BHS)
        wanted_BH = score_BHS.masked_fill(~taken_BHS, 0.0).sum(-1)
        control_BHS, found_BH = equal_mass(score_BHS, wanted_BH, others_BHS)
        if self.control == "equal_mass":
            columns_BHM = as_columns(control_BHS)
        matched_BH = found_BH.to(score_BHS.dtype).masked_fill(~taken_BHS.any(-1), torch.nan)
        return columns_BHM.masked_fill(~found_BH.unsqueeze(-1), -1), matched_BH

    def _order(self, keys: KeyScores, score_BHS: Tensor) -> Tensor:
        """Scores by which a control ranks keys, highest first."""
        if self.control == "random":
            return keys.draw(score_BHS.shape).to(score_BHS.device, non_blocking=True)
        if self.control == "lowest":
            return -score_BHS
        return torch.arange(
            score_BHS.shape[-1], device=score_BHS.device, dtype=torch.float32
        ).expand(score_BHS.shape)

    def _check_enough(
        self,
        count: int | Tensor,
        keys: KeyScores,
        free_BHS: Tensor,
        others_BHS: Tensor,
        lost_BH1: Tensor,
    ) -> None:
        """Every head for itself: rows of unequal length lose unequal numbers of keys."""
        visible_BH1 = (keys.visible_BHS.amax(1) > 0).sum(-1)[:, None, None] - lost_BH1
        free_BH1 = free_BHS.sum(-1, keepdim=True)
        count_BH1 = torch.zeros_like(free_BH1) + count
        needed_BH1 = count_BH1
        if self.control not in ("sinks", "equal_mass"):
            # As many keys again, beside the sinks that they stand for.
            needed_BH1 = 2 * count_BH1
            free_BH1 = (
                free_BH1 if self.rule is None else others_BHS.sum(-1, keepdim=True) + count_BH1
            )
        wrong_BH1 = (count_BH1 > 0) & ((count_BH1 >= visible_BH1) | (needed_BH1 > free_BH1))
        numbers = (count_BH1, needed_BH1, visible_BH1, free_BH1)
        keys.doubt(
            wrong_BH1.any(), lambda: self._refuse(wrong_BH1, numbers, bool((lost_BH1 > 0).any()))
        )

    def _refuse(self, wrong_BH1: Tensor, numbers: Sequence[Tensor], is_again: bool) -> None:
        row, head = wrong_BH1[..., 0].nonzero()[0].tolist()
        count, needed, visible, free = (
            int(numbers_BH1.expand_as(wrong_BH1)[row, head, 0]) for numbers_BH1 in numbers
        )
        what = (
            f"k={self.k}" if self.rule is None else f"rule={self.rule}, {count} keys in some head"
        )
        remedy = "lower k" if self.k else "choose a stricter rule, or set k"
        again = ", or set a limit (keys that are gone stay gone)" if is_again else ""
        raise ValueError(
            f"MaskSinks({what}, control={self.control!r}) needs more than {count} keys that are "
            f"not padding, and {needed} to choose from, but row {row} of this batch has {visible} "
            f"and {free}: {remedy}{again}"
        )


TOLERANCE = 0.1
"""Greatest distance of a control's mass from the mass it stands for, as a share of the latter."""
LOOK = 16
"""Keys that are tried between two looks whether all heads have their control."""


def equal_mass(score_BHS: Tensor, wanted_BH: Tensor, free_BHS: Tensor) -> tuple[Tensor, Tensor]:
    """Free keys (B, H, S) that receive as much together as is wanted, within `TOLERANCE`, and the
    heads that have them.

    Greedy: from the greatest on, each key that does not take the sum above the tolerance, until it
    is within. A head that does not come so far has none, nor has one for which nothing is wanted.
    """
    order_BHS = score_BHS.masked_fill(~free_BHS, -torch.inf).argsort(
        dim=-1, descending=True, stable=True
    )
    least_BH, most_BH = (1 - TOLERANCE) * wanted_BH, (1 + TOLERANCE) * wanted_BH
    sum_BH, flags_BHS = torch.zeros_like(wanted_BH), torch.zeros_like(free_BHS)
    for number, place_BH in enumerate(order_BHS.unbind(-1)):
        # looked at now and then, as it waits for the device: a few keys are enough, and there may
        # be thousands
        if number % LOOK == 0 and not bool((sum_BH < least_BH).any()):
            break
        place_BH1 = place_BH.unsqueeze(-1)
        more_BH = sum_BH + score_BHS.gather(-1, place_BH1)[..., 0]
        takes_BH = (
            (sum_BH < least_BH) & (more_BH <= most_BH) & free_BHS.gather(-1, place_BH1)[..., 0]
        )
        sum_BH = torch.where(takes_BH, more_BH, sum_BH)
        flags_BHS = flags_BHS.scatter(-1, place_BH1, takes_BH.unsqueeze(-1))
    found_BH = (wanted_BH > 0) & (sum_BH >= least_BH)
    return flags_BHS & found_BH.unsqueeze(-1), found_BH


def _largest(score_BHS: Tensor, count: int | Tensor, most: int) -> Tensor:
    columns_BHM = score_BHS.topk(most, dim=-1).indices
    if isinstance(count, int):
        return columns_BHM
    return columns_BHM.masked_fill(torch.arange(most, device=columns_BHM.device) >= count, -1)
