"""States of positions: masked, committed or given, by the running ids and their canvas."""

# B batch, Q queries, S canvas positions
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from sinklab.core.attention.context import decoding_run
from sinklab.core.compat import config_value, stated
from sinklab.core.errors import check_tensor
from sinklab.core.sinks import COMMITTED, MASKED


def position_states(canvas: Any, ids_BS: Tensor) -> Tensor:
    """State of every position of the canvas, int8 (B, S): its number in `STATES`, −1 for padding.
    Raises ValueError for ids of another shape than the canvas.
    """
    remedy = "give trace the canvas that is decoded, and decode with model.denoiser()"
    check_tensor("the ids that tell states", ids_BS, canvas.open_BS.shape, remedy=remedy)
    # from the host such a copy is staged before the call returns
    open_BS, real_BS = (
        x.to(ids_BS.device, non_blocking=True) for x in (canvas.open_BS, canvas.attention_BS)
    )
    state_BS = torch.where(open_BS, (ids_BS != canvas.mask_id).to(torch.int8), 2)
    return torch.where(real_BS, state_BS, -1).to(torch.int8)


def position_states_of(
    call: Any, asked_by: str, canvas: Any = None, *, needs_canvas: bool = False
) -> Tensor:
    """`position_states` in the running forward, by this canvas or that of the denoising run.
    Without one, what is not masked is committed. Raises ValueError if nothing tells the states.
    """
    running = call.visibility.running
    if running is not None and running.state_BS is not None:
        return running.state_BS
    ids_BS = call.ids_BS
    if canvas is None:
        canvas = stated(decoding_run(), "canvas")
    if ids_BS is not None and canvas is not None:
        return position_states(canvas, ids_BS)
    mask_id = config_value(call.tap.model, "mask_token_id")
    if ids_BS is None or mask_id is None or needs_canvas:
        raise ValueError(
            f"{asked_by} needs the state of positions, which a canvas and token ids tell, but "
            f"{call.layer} runs without; decode with model.denoiser(), pass input_ids to a model "
            "whose config has a mask_token_id, or name positions such as queries='from32'"
        )
    return torch.where(ids_BS == mask_id, MASKED, COMMITTED)


@runtime_checkable
class DecodedCanvas(Protocol):
    """A canvas that tells the states of its positions, such as `sinklab.core.subject.Canvas`."""

    open_BS: Tensor
    mask_id: int
    attention_BS: Tensor


def query_states(state_BS: Tensor, columns_Q: Tensor, is_shifted: bool) -> Tensor:
    """State of the position that each query predicts, int8 (B, Q), −1 for padding: its own or, if
    logits are shifted, the next one, but for the last of the text.
    """
    columns_Q = columns_Q.to(state_BS.device)
    own_BQ = state_BS.index_select(1, columns_Q)
    if not is_shifted:
        return own_BQ
    next_BQ = state_BS.index_select(1, (columns_Q + 1).clamp(max=state_BS.shape[1] - 1))
    return torch.where((own_BQ < 0) | (next_BQ < 0), own_BQ, next_BQ)
