"""The statistics a trace can record, and how they are read off one attention call."""

# B batch, L layers, H query heads (those asked for), Q queries, S keys, G groups of queries (real ones, then by state)
from __future__ import annotations

import difflib
from collections.abc import Sequence

import torch
from torch import Tensor

from sinklab.attention import attention_statistics, key_norms, value_norms
from sinklab.probing.call import AttentionCall
from sinklab.probing.states import groups_of

_KEYS = ("batch", "layer", "head", "key")
_ROWS = ("batch", "layer", "head", "position")

STATISTICS: dict[str, tuple[str, ...]] = {
    "received": _KEYS,
    "received_by_state": ("batch", "state", "layer", "head", "key"),
    "last_row": _KEYS,
    "value_norm": ("batch", "layer", "key"),
    "key_norm": ("batch", "layer", "key"),
    "row_entropy": _ROWS,
    "row_logsumexp": _ROWS,
    "output_norm": _ROWS,
    "noop_bound": _ROWS,
}
"""Every statistic with the axes of one step of it."""


def checked_statistics(names: Sequence[str]) -> tuple[str, ...]:
    """The names as a tuple. Raises ValueError for none, for a bare string, and for one that is not known."""
    if isinstance(names, str) or not names:
        raise ValueError(f"statistics is a tuple of names in {tuple(STATISTICS)}, got {names!r}: write (name,)")
    return tuple(dict.fromkeys(checked_statistic(name) for name in names))


def checked_statistic(name: str) -> str:
    """The name of a statistic. Raises ValueError for one that is not known, with the near one."""
    if name not in STATISTICS:
        near = difflib.get_close_matches(str(name), STATISTICS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else "choose among them"
        raise ValueError(f"statistics are {tuple(STATISTICS)}, got {name!r}: {hint}")
    return name


def measured(
    call: AttentionCall, names: Sequence[str], heads: Sequence[int] | None, state_BQ: Tensor | None
) -> dict[str, Tensor]:
    """These statistics of a call, layer axis left out; "output_norm" is not among them (see `output_norm`).

    Everything that needs the scores comes from one pass over them.
    """
    found: dict[str, Tensor] = {}
    by_state = "received_by_state" in names
    known = heads is None and "received_BHS" in call.__dict__
    wanted = [name for name in ("row_entropy", "row_logsumexp", "noop_bound") if name in names]
    if by_state or ("received" in names and not known):
        wanted.append("received")
    if wanted:
        real_BQ, groups_BGQ = call.sight.real_BQ, None
        if by_state:
            assert state_BQ is not None
            everyone_BQ = torch.ones_like(state_BQ, dtype=torch.bool) if real_BQ is None else real_BQ
            groups_BGQ = torch.cat([everyone_BQ.unsqueeze(1), groups_of(state_BQ)], 1)
        elif real_BQ is not None and "received" in wanted:
            groups_BGQ = real_BQ.unsqueeze(1)
        found = attention_statistics(call.scores(heads), wanted, v_BKSD=call.value_BKSD, groups_BGQ=groups_BGQ)
        if groups_BGQ is not None and "received" in found:
            if by_state:
                found["received_by_state"] = found["received"][:, 1:]
            found["received"] = found["received"][:, 0]
        if heads is None and "received" in found:
            # What another listener asks the call for later need not be computed again.
            call.__dict__.setdefault("received_BHS", found["received"])
    if "received" in names and "received" not in found:
        found["received"] = call.received_BHS
    if "last_row" in names:
        found["last_row"] = call.last_row_BHS if heads is None else call.last_row_BHS[:, list(heads)]
    if "value_norm" in names:
        found["value_norm"] = value_norms(call.value_BKSD)
    if "key_norm" in names:
        found["key_norm"] = key_norms(call.key_BKSD)
    return {name: found[name] for name in names if name != "output_norm"}


def output_norm(call: AttentionCall, out: Tensor, heads: Sequence[int] | None) -> Tensor:
    """L2 norm of what every head gives every query, (B, H, Q); `out` is the output in the layout of the call."""
    out_BHQD = call.unrolled(out).detach()
    if heads is not None:
        out_BHQD = out_BHQD[:, list(heads)]
    return torch.linalg.vector_norm(out_BHQD, dim=-1, dtype=torch.promote_types(out_BHQD.dtype, torch.float32))
