"""Edits by position: `WindowAttention` and `LoneRows`, which say what queries see."""

# B batch, H query heads, Q queries, S keys; a position is a canvas column, sink columns not counted
from dataclasses import MISSING, dataclass

import torch
from torch import Tensor

from sinklab.core.errors import limited, whole_numbers
from sinklab.core.instrument.call import Call
from sinklab.core.instrument.edits.edit import Edit
from sinklab.core.registry import interventions


def _only_heads(keep_QS: Tensor, call: Call) -> Tensor:
    """What queries may see, (1, 1 or H, Q, S), with the heads that are not edited left free."""
    every = call.q_BHQD.shape[1]
    if call.heads is None or len(call.heads) == every:
        return keep_QS[None, None]
    free_H = torch.ones(every, dtype=torch.bool, device=keep_QS.device)
    free_H[call.heads] = False
    return keep_QS | free_H[None, :, None, None]


@interventions.register("window_attention")
@dataclass(frozen=True)
class WindowAttention(Edit):
    """Query i sees key j only if |i - j| <= radius, counted in canvas positions.

    Under a cache the denoiser announces the positions of the queries; a model that announces
    nothing (transformers' own `generate`) runs the last of the positions that are seen. The mask it
    makes is (Q, S), one for all heads and layers.

    Raises ValueError for a negative radius or position, and in a forward whose queries do not fit
    the canvas.
    """

    radius: int = limited(MISSING, at_least=0)
    """Positions seen on either side; 0 leaves a query its own key."""
    keep: tuple[int, ...] = limited((), read=whole_numbers)
    """Canvas positions every query may see all the same, such as the first four (StreamingLLM,
    2309.17453).
    """
    keep_prefix: bool = True
    """Whether the model's own sink columns in front stay visible."""

    def before(self, call: Call) -> Call:
        """The call with its mask narrowed to the window."""
        device = call.q_BHQD.device
        near_QS = call.near_QS(self.radius)
        keep = torch.tensor(self.keep, dtype=torch.long, device=device)
        near_QS |= torch.isin(call.positions_S, keep)
        near_QS[:, : call.prefix] = self.keep_prefix
        return call.block(~_only_heads(near_QS, call))


@interventions.register("lone_rows")
@dataclass(frozen=True, kw_only=True)
class LoneRows(Edit):
    """Let these queries see their own key alone, as the first does under a causal mask.

    All others see the same keys as before.

    The constraint of the sink token (2601.19657, Eq. 6) on a token of the text. The mask it makes
    is (Q, S), one for all heads and layers.

    Raises ValueError for no row, a negative one, and in the run for one that the canvas never has.
    """

    rows: tuple[int, ...] = (0,)
    """Canvas positions of the queries, which still see the model's own sink columns in front."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", tuple(sorted(set(whole_numbers("rows", self.rows)))))
        if not self.rows:
            raise ValueError(
                "rows name the queries that are to see themselves alone, got none: leave out the "
                "edit"
            )
        super().__post_init__()

    def before(self, call: Call) -> Call:
        """The call with these rows of its mask left to their own key; the same one if none of them
        runs.
        """
        positions_Q = call.positions_Q
        canvas = call.k_BKSD.shape[2] - call.prefix
        if call.visibility.running is not None and self.rows[-1] >= canvas:
            raise ValueError(
                f"rows are canvas positions 0 to {canvas - 1}, got {self.rows[-1]}: name one of "
                "those"
            )
        lone_Q = torch.isin(positions_Q, torch.tensor(self.rows, device=positions_Q.device))
        if not bool(lone_Q.any()):
            return call
        own_QS = call.near_QS()
        keep_QS = ~lone_Q[:, None] | own_QS
        keep_QS[:, : call.prefix] = True
        return call.block(~_only_heads(keep_QS, call), kept_QS=own_QS)
