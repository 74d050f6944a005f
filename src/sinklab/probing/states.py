"""In which state a position stands at a step, and the query that predicts it: masked, committed or prompt."""

# B batch, S canvas positions, Q queries, G = 3 states
from __future__ import annotations

import difflib
from typing import Any

import torch
from torch import Tensor, nn

STATES = ("masked", "committed", "prompt")
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
