"""Selectors that wrap another one: the keys that it leaves, and its controls, which choose as many
keys or as much attention.
"""

# B batch, H query heads that are edited (1: alike in all), S keys
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from sinklab.core.errors import limited
from sinklab.core.instrument.call import Call
from sinklab.core.instrument.edits.selectors import Selector
from sinklab.core.registry import registered, rules, selectors
from sinklab.core.sinks import DEFAULT, Rule


@dataclass(frozen=True)
class Wrapper(Selector):
    """Base of selectors that wrap another one."""

    like: Selector = registered(selectors)

    @property
    def max_count(self) -> int | None:
        return self.like.max_count

    @property
    def draws(self) -> bool:
        return self.like.draws

    @property
    def sink_rule(self) -> Rule | None:
        return self.like.sink_rule

    @property
    def last_position(self) -> int:
        return self.like.last_position


@selectors.register("others")
@dataclass(frozen=True)
class Others(Wrapper):
    """All keys but those that another selector chooses: with a window
    (``BlockKeys(Others(SinkKeys()), beyond=8)``) a query reads its neighbours and the sinks alone.
    """

    @property
    def max_count(self) -> int | None:
        return None

    @property
    def last_position(self) -> int:
        return -1

    def select(self, call: Call) -> Tensor:
        return call.eligible_BHS & ~self.like.select(call)


@selectors.register("random")
@dataclass(frozen=True)
class Random(Wrapper):
    """The control of equal number: as many keys as another selector chooses, but not those, nor
    others that are sinks by its rule; drawn by the seed of the edit.
    """

    fewer: bool = field(default=False, kw_only=True)
    """Whether a short row, which has fewer others, loses all of them (the dose tells how many);
    otherwise it is refused."""

    @property
    def draws(self) -> bool:
        return True

    def select(self, call: Call) -> Tensor:
        chosen_BHS = self.like.select(call)
        others_BHS = call.eligible_BHS & ~chosen_BHS
        if self.sink_rule is not None:
            others_BHS = others_BHS & ~call.sinks(self.sink_rule)
        count_BH1 = chosen_BHS.sum(-1, keepdim=True)
        if self.fewer:
            count_BH1 = torch.minimum(count_BH1, others_BHS.sum(-1, keepdim=True))
        return call.top(call.random(), count_BH1, others_BHS, self.max_count)


@selectors.register("equal_mass")
@dataclass(frozen=True)
class EqualMass(Wrapper):
    """A comparison at equal mass, whose two arms are over the same heads: those in which keys that
    are no sinks together receive as much as the keys of another selector, within 10 %.
    """

    rule: Rule | None = registered(rules, None)
    """Rule that says which keys are no sinks; None: that of `like`, or `DEFAULT`."""
    arm: str = limited("control", one_of=("control", "keys"))
    """"control": the keys of equal mass, the greatest first. "keys": those of the other selector.
    Neither takes a key in a head that has no control.
    """

    @property
    def max_count(self) -> int | None:
        if self.arm == "keys":
            return self.like.max_count
        return None

    @property
    def sink_rule(self) -> Rule | None:
        return self.rule or self.like.sink_rule

    def select(self, call: Call) -> Tensor:
        chosen_BHS = self.like.select(call)
        others_BHS = call.eligible_BHS & ~chosen_BHS & ~call.sinks(self.sink_rule or DEFAULT)
        wanted_BH = call.scores_BHS.masked_fill(~chosen_BHS, 0.0).sum(-1)
        control_BHS, found_BH = equal_mass(call.scores_BHS, wanted_BH, others_BHS)
        matched_BH = found_BH.to(wanted_BH).masked_fill(~chosen_BHS.any(-1), torch.nan)
        call.choice.notes["matched"] = matched_BH
        if self.arm == "control":
            return control_BHS
        return chosen_BHS & found_BH.unsqueeze(-1)


def other_arm(keys: Selector) -> Selector | None:
    """Its partner in a comparison at equal mass; None for a selector that is no such arm."""
    if not isinstance(keys, EqualMass):
        return None
    return replace(keys, arm="keys" if keys.arm == "control" else "control")


TOLERANCE = 0.1
"""Greatest distance of a control's mass from the mass it stands for, as a share of the latter."""
CHECK_EVERY = 16
"""Keys that are tried between two checks whether all heads have their control."""


def equal_mass(score_BHS: Tensor, wanted_BH: Tensor, free_BHS: Tensor) -> tuple[Tensor, Tensor]:
    """Free keys (B, H, S) that receive as much together as is wanted, within `TOLERANCE`, and the
    heads that have them.

    Greedy: from the greatest on, each key that does not take the sum above the tolerance, until it
    is within. A head that does not come so far has none, nor has one for which nothing is wanted.
    """
    order_BHS = score_BHS.masked_fill(~free_BHS, -torch.inf)
    order_BHS = order_BHS.argsort(dim=-1, descending=True, stable=True)
    least_BH = (1 - TOLERANCE) * wanted_BH
    most_BH = (1 + TOLERANCE) * wanted_BH
    sum_BH = torch.zeros_like(wanted_BH)
    flags_BHS = torch.zeros_like(free_BHS)
    for number, place_BH in enumerate(order_BHS.unbind(-1)):
        # now and then, as a check waits for the device: a few keys are enough of thousands
        if number % CHECK_EVERY == 0 and not bool((sum_BH < least_BH).any()):
            break
        place_BH1 = place_BH.unsqueeze(-1)
        more_BH = sum_BH + score_BHS.gather(-1, place_BH1)[..., 0]
        is_free_BH = free_BHS.gather(-1, place_BH1)[..., 0]
        takes_BH = (sum_BH < least_BH) & (more_BH <= most_BH) & is_free_BH
        sum_BH = torch.where(takes_BH, more_BH, sum_BH)
        flags_BHS = flags_BHS.scatter(-1, place_BH1, takes_BH.unsqueeze(-1))
    found_BH = (wanted_BH > 0) & (sum_BH >= least_BH)
    return flags_BHS & found_BH.unsqueeze(-1), found_BH
