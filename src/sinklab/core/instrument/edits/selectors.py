"""Selectors, which choose the keys of each head that `BlockKeys` takes away, and the words for the
queries that lose them. Selectors that wrap another one are in `sinklab.lab.measures`.
"""

# B batch, H query heads that are edited (1: alike in all), S keys, M keys chosen, D head dim
from __future__ import annotations

import re
from dataclasses import MISSING, dataclass

import torch
from torch import Tensor

from sinklab.core.errors import Checked, limited, one_of, whole_numbers
from sinklab.core.instrument.call import Call
from sinklab.core.instrument.states import position_states_of
from sinklab.core.registry import registered, rules, selectors
from sinklab.core.sinks import DEFAULT, STATES, Rule

SCORES = ("received", "last_row")


@dataclass(frozen=True)
class Selector(Checked):
    """Choice of keys, head by head. A function of the call is registered under a name, or a
    subclass with `select`::

        @selectors.register("weak_values")
        def weak_values(call, k=1):
            return call.top(-call.values_BHSD.norm(dim=-1), k)
    """

    by_attention = True
    """Whether attention chooses; if not, the log has no share that the keys held."""

    @property
    def max_count(self) -> int | None:
        """The most keys of a head that it chooses; None if that is not known beforehand."""
        return None

    @property
    def draws(self) -> bool:
        """Whether keys are drawn, so that equal rows may lose different ones."""
        return False

    @property
    def sink_rule(self) -> Rule | None:
        """Rule by which it knows sinks; None if it has none."""
        return None

    @property
    def last_position(self) -> int:
        """The last canvas position that it names; −1 if it names none."""
        return -1

    def select(self, call: Call) -> Tensor:
        """Keys to take away, bool (B, H, S); H may be 1 for the same keys in all heads."""
        raise NotImplementedError(f"{self} has no method select of its own; write it")


@selectors.register("top")
@dataclass(frozen=True)
class TopKeys(Selector):
    """The k keys that receive most, sinks or not (arXiv 2510.15731, section 4.3)."""

    k: int = limited(MISSING, at_least=1)

    @property
    def max_count(self) -> int | None:
        return self.k

    def select(self, call: Call) -> Tensor:
        return call.top(call.scores_BHS, self.k)


@selectors.register("sinks")
@dataclass(frozen=True)
class SinkKeys(Selector):
    """All keys that a rule calls sinks, or the k of them that receive most.

    If a cache lets only some queries run, scores are scaled by positions / queries that ran, so
    that an even share is 1 in every forward.
    """

    rule: Rule = registered(rules, DEFAULT)
    k: int | None = limited(None, at_least=1)

    @property
    def max_count(self) -> int | None:
        return self.k

    @property
    def sink_rule(self) -> Rule | None:
        return self.rule

    def select(self, call: Call) -> Tensor:
        sinks_BHS = call.sinks(self.rule) & call.eligible_BHS
        count_BH1 = sinks_BHS.sum(-1, keepdim=True)
        if self.k is not None:
            count_BH1 = count_BH1.clamp(max=self.k)
        return call.top(call.scores_BHS, count_BH1, sinks_BHS, self.k)


@selectors.register("positions")
@dataclass(frozen=True)
class Positions(Selector):
    """Canvas positions, the same in every head, whatever they receive.

    Positions count the columns of the canvas (left padding included) without the added sinks in
    front. One that is not there yet (an autoregressive model) is taken when it comes; padding is
    never attended, and counts as nothing taken.

    Raises ValueError for no position, and in the run for an added sink the model does not have.
    """

    positions: tuple[int, ...] = ()
    added: tuple[int, ...] = ()
    """Added sinks, from 0."""

    by_attention = False

    def __post_init__(self) -> None:
        for name, given in (("positions", self.positions), ("added", self.added)):
            numbers = whole_numbers(name, given)
            object.__setattr__(self, name, tuple(sorted(set(numbers))))
        if not (self.positions or self.added):
            raise ValueError("positions name the keys to take away, got none: leave out the edit")

    @property
    def last_position(self) -> int:
        return max(self.positions, default=-1)

    def select(self, call: Call) -> Tensor:
        if max(self.added, default=-1) >= call.prefix:
            raise ValueError(
                f"there is no added sink {self.added[-1]}, the model has {call.prefix}: leave out "
                "added"
            )
        columns = [*self.added, *(call.prefix + position for position in self.positions)]
        keys = call.k_BKSD.shape[2]
        named_S = torch.zeros(keys, dtype=torch.bool)
        named_S[[column for column in columns if column < keys]] = True
        return call.seen_B1S & named_S.to(call.seen_B1S.device)


WORDS = ("all", "from32", *STATES)
"""Ways to say which; ``from32`` stands for any position."""


def first_query(queries: str | None) -> int:
    """The position that words such as "from32" name; −1 for other words."""
    number = str(queries).removeprefix("from")
    return int(number) if number.isdecimal() else -1


def check_queries(queries: str | None) -> None:
    """Raises ValueError for words that name no queries."""
    if queries is not None and not re.fullmatch(r"from\d+", queries):
        one_of("queries", queries, WORDS)


def chosen_queries(queries: str, call: Call) -> Tensor:
    """Flags of the chosen queries, bool (B or 1, Q).

    Args:
        queries: one of `WORDS`.
        call: the attention call.

    Raises:
        ValueError: if states are asked for and nothing tells them.
    """
    positions_Q = call.positions_Q
    if queries == "all":
        return torch.ones_like(positions_Q, dtype=torch.bool)[None]
    if queries.startswith("from"):
        return (positions_Q >= first_query(queries))[None]
    state_BS = position_states_of(call, f"queries={queries!r}", needs_canvas=queries == "prompt")
    state_BS = state_BS.to(positions_Q.device)
    return state_BS.index_select(1, positions_Q) == STATES.index(queries)
