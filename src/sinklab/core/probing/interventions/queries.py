"""The queries that lose a key, in words: all, by position, or by the state of what they predict."""

# B batch, Q queries; an axis may be 1
import re

import torch
from torch import Tensor

from sinklab.core.errors import unknown
from sinklab.core.probing.call import Call
from sinklab.core.probing.states import position_states_of
from sinklab.core.sinks import STATES

WORDS = ("all", "from32", *STATES)
"""Ways to say which; ``from32`` stands for any position."""


def From(position: int) -> str:
    """Queries at canvas positions from this one on, as `BlockKeys` takes them: ``"from32"``."""
    return f"from{position}"


def first_query(queries: str | None) -> int:
    """The position that words such as "from32" name; −1 for other words."""
    number = str(queries).removeprefix("from")
    return int(number) if number.isdecimal() else -1


def check_queries(queries: str | None) -> None:
    """Raises ValueError for words that name no queries."""
    if queries is not None and queries not in WORDS and not re.fullmatch(r"from\d+", queries):
        raise unknown("choice of queries", queries, WORDS)


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
