"""Queries that an edit of keys is for: all, those from a position on or in one state; and each
query's own key.
"""

# B batch, Q queries, S keys or canvas positions
import re
from typing import Any

import torch
from torch import Tensor

from sinklab.core.attention.context import running_canvas
from sinklab.core.errors import unknown
from sinklab.core.probing.call import AttentionCall
from sinklab.core.probing.statistics import position_states_of
from sinklab.core.sinks.states import STATES

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


def chosen_queries(queries: str, call: AttentionCall, positions_Q: Tensor, tap: Any) -> Tensor:
    """Flags of the chosen queries, bool (B or 1, Q).

    Args:
        queries: one of `WORDS`.
        call: the attention call.
        positions_Q: canvas position of each query.
        tap: of the model, which knows the ids of its last call.

    Raises:
        ValueError: if states are asked for and nothing tells them.
    """
    if queries == "all":
        return torch.ones_like(positions_Q, dtype=torch.bool)[None]
    if queries.startswith("from"):
        return (positions_Q >= first_query(queries))[None]
    state_BS = position_states_of(
        call, tap, f"queries={queries!r}", needs_canvas=queries == "prompt"
    )
    state_BS = state_BS.to(positions_Q.device)
    return state_BS.index_select(1, positions_Q) == STATES.index(queries)


def near_keys(positions_Q: Tensor, prefix: int, keys: int, radius: int = 0) -> Tensor:
    """Keys at most so many positions from each query, bool (Q, S), behind the model's own sink
    columns: with radius 0 its own.
    """
    place_S = torch.arange(keys, device=positions_Q.device)
    distance_QS = ((positions_Q + prefix)[:, None] - place_S).abs()
    return (distance_QS <= radius) & (place_S >= prefix)


def query_positions(call: AttentionCall, prefix: int) -> Tensor:
    """The canvas position of every query of the call, int64 (Q,). Raises ValueError if they are
    unknown.
    """
    queries = call.query_BHQD.shape[2]
    keys = call.key_BKSD.shape[2] - prefix
    device = call.query_BHQD.device
    if call.visibility.running is not None:
        return call.visibility.running.columns_Q.to(device)
    if not call.origin.is_own:
        raise ValueError(
            f"{call.layer} attends to another sequence, at whose positions its queries do not "
            "stand: name layers that "
            "attend to their own, or leave out what is told by the position of queries"
        )
    if queries == keys:
        return torch.arange(keys, device=device)
    if running_canvas() is not None:
        raise ValueError(
            f"{call.layer} got {queries} queries and {keys} keys, which are not the columns of the "
            "canvas that the denoiser announces: announce those that become queries with "
            "sinklab.core.attention.running(ids, columns)"
        )
    # A model with room at the end of its memory writes where its mask ends.
    seen = int((call.visibility.visible_BHS > 0).any(1).any(0).nonzero().max()) + 1 - prefix
    return torch.arange(seen - queries, seen, device=device)
