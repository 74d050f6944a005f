"""Keys of a call as flags and as columns, and the highest of an order among them."""

# B batch, H query heads, S keys, M keys chosen; an axis may be 1
import torch
from torch import Tensor
from torch.nn.functional import pad

from sinklab.core.attention.context import reads_wait


def as_flags(columns_BHM: Tensor, keys: int) -> Tensor:
    """Columns (-1 for none) as flags (B, H, S)."""
    flags_BHS = torch.zeros(
        *columns_BHM.shape[:2], keys + 1, dtype=torch.bool, device=columns_BHM.device
    )
    return flags_BHS.scatter_(2, columns_BHM.masked_fill(columns_BHM < 0, keys), True)[..., :keys]


def highest(
    order_BHS: Tensor, among_BHS: Tensor, count_BH1: Tensor, most: int | None = None
) -> Tensor:
    """Columns (B, H, M) of the keys that an order puts highest among some, the highest first: of
    each head as many as are counted, and -1 if that is fewer than M.

    `most`: the most there may be, for a device that is not to be asked.
    """
    if most is None or not reads_wait(count_BH1.device):
        most = int(count_BH1.max())
    width = min(most, among_BHS.shape[-1])
    columns_BHM = order_BHS.masked_fill(~among_BHS, -torch.inf).topk(width, dim=-1).indices
    number_M = torch.arange(width, device=columns_BHM.device)
    return columns_BHM.masked_fill(number_M >= count_BH1, -1)


def as_columns(
    blocked_BHS: Tensor, most: int | None = None, order_BHS: Tensor | None = None
) -> Tensor:
    """Flags as columns (B, H, M), the highest of an order first, without one in rising order;
    arguments and filling as of `highest`.
    """
    if order_BHS is None:
        place_S = torch.arange(blocked_BHS.shape[-1], device=blocked_BHS.device)
        order_BHS = -place_S.float().expand(blocked_BHS.shape)
    return highest(order_BHS, blocked_BHS, blocked_BHS.sum(-1, keepdim=True), most)


def extended(blocked_BHS: Tensor, keys: int) -> Tensor:
    """Flags for this many keys: those that came since are not removed."""
    return pad(blocked_BHS, (0, max(0, keys - blocked_BHS.shape[-1])))


def refuse_short(short_BH1: Tensor, wanted_BH1: Tensor, found_BH1: Tensor) -> None:
    """Raises ValueError for a head with too few keys to choose from."""
    row, head = short_BH1[..., 0].nonzero()[0].tolist()
    raise ValueError(
        f"{int(wanted_BH1[row, head])} keys of a head are to be chosen, but row {row} of this "
        f"batch has {int(found_BH1[row, head])} to choose from: lower k, choose a stricter rule, "
        "or set a limit"
    )
