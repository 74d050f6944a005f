"""The statistics a trace can record, and how they are read off one attention call."""

# B batch, S canvas positions, Q queries, G = 3 states
# B batch, L layers, H query heads (those asked for), Q queries, S keys, G groups of queries (real ones, then by state)
from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sinklab.attention.received import attention_statistics, key_norms, value_norms
from sinklab.probing.call import AttentionCall
from sinklab.sinks.states import STATES

STATE_OF = ("predicted", "own")


def position_states(canvas: Any, ids_BS: Tensor) -> Tensor:
    """State of every position of the canvas, int8 (B, S): its number in `STATES`, −1 for padding.

    `canvas` has `open_BS`, `mask_id` and `attention_BS` (`sinklab.sampling.Canvas`). Masked: open and holding the mask.
    Committed: open and written. Prompt: given. Raises ValueError for ids of another shape than the canvas.
    """
    if ids_BS.shape != canvas.open_BS.shape:
        raise ValueError(
            f"states are told by the ids of the whole canvas, {tuple(canvas.open_BS.shape)}, but the model read ids of "
            f"shape {tuple(ids_BS.shape)}: give trace the canvas that is decoded, and decode with model.denoiser()"
        )
    open_BS, real_BS = canvas.open_BS.to(ids_BS.device), canvas.attention_BS.to(ids_BS.device)
    state_BS = torch.where(open_BS, (ids_BS != canvas.mask_id).to(torch.int8), 2)
    return torch.where(real_BS, state_BS, -1).to(torch.int8)


def checked_state_of(state_of: str) -> str:
    """Whose state a query has: of the position it predicts, or stands at. Raises ValueError for neither."""
    if state_of not in STATE_OF:
        near = difflib.get_close_matches(str(state_of), STATE_OF, n=1)
        hint = f"did you mean {near[0]!r}?" if near else '"predicted" is the default'
        raise ValueError(f"state_of is one of {STATE_OF}, got {state_of!r}: {hint}")
    return state_of


class QueryStates:
    """The states of the queries of a forward, for one canvas."""

    def __init__(self, model: nn.Module, canvas: Any, state_of: str) -> None:
        missing = [name for name in ("open_BS", "mask_id", "attention_BS") if not hasattr(canvas, name)]
        if missing:
            raise ValueError(
                f"canvas must have open_BS, mask_id and attention_BS, but {type(canvas).__name__} lacks "
                f"{', '.join(missing)}: pass the sampling.Canvas that is decoded"
            )
        self.canvas = canvas
        is_shifted = bool(getattr(getattr(model, "config", None), "logit_shift", False))
        self.shift = int(is_shifted and state_of == "predicted")

    def of(self, ids_BS: Tensor, columns_Q: Tensor) -> Tensor:
        """int8 (B, Q): the state of what each query predicts (or of its own position), −1 for a padding query.

        Where logits are shifted, the query at i predicts position i + 1; the last one of the text counts as its own.
        """
        state_BS = position_states(self.canvas, ids_BS)
        columns_Q = columns_Q.to(ids_BS.device)
        own_BQ = state_BS.index_select(1, columns_Q)
        if not self.shift:
            return own_BQ
        next_BQ = state_BS.index_select(1, (columns_Q + 1).clamp(max=ids_BS.shape[1] - 1))
        return torch.where((own_BQ < 0) | (next_BQ < 0), own_BQ, next_BQ)


def groups_of(state_BQ: Tensor) -> Tensor:
    """Which query is in which state, bool (B, 3, Q)."""
    return torch.stack([state_BQ == state for state in range(len(STATES))], 1)


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
