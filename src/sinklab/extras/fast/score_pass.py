"""The statistics of a call by fused kernels on a GPU: no score is written to memory. One pass is
over rows of attention, for their sums, and one over columns.
"""

# B batch, H query heads (those chosen), K key heads, Q queries, S keys, D head dim, G query groups
import importlib.util
from collections.abc import Collection
from functools import cache
from typing import Any

import torch
from torch import Tensor

from sinklab.core.attention.context import on_device
from sinklab.core.attention.received import LOG2E, Pass, Scores
from sinklab.core.registry import fast_passes

# A program sums for so many groups of queries at once.
_GROUPS = 4
Tiles = tuple[int, int, int, int]
"""Queries and keys of a tile, warps, stages: found on an H100 with heads of 128."""
_EXACT = (32, 32, 4, 2)
"""float32: its product needs no tensor cores, and many registers."""
_ROWS = (128, 64, 8, 3)
_COLUMNS = (64, 128, 4, 3)
_COLUMNS_PLAIN = {False: (64, 256, 8, 3), True: (128, 128, 4, 2)}
"""Tiles by whether there are groups, if no mask is read tile by tile and a row of keys is short."""
_SMALL = (32, 32, 4, 1)
_WIDEST_HEAD = 256


@fast_passes.register("triton")
class Fused:
    """Triton's kernels, on a GPU that has them."""

    @staticmethod
    def serving(scores: Scores, names: Collection[str]) -> Pass | None:
        """`fused_pass`, unless the factors are on another device, float64, of wide heads, or
        without a query or key.
        """
        is_served = (
            scores.q_BHQD.device.type == "cuda"
            and scores.dtype == torch.float32
            and scores.q_BHQD.shape[-1] <= _WIDEST_HEAD
            and 0 not in (*scores.shape, scores.k_BKSD.shape[2], scores.q_BHQD.shape[-1])
        )
        return fused_pass if is_served and _has_triton() else None


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec(
        "triton"
    ) is not None and torch.cuda.get_device_capability() >= (8, 0)


def fused_pass(
    scores: Scores,
    names: Collection[str],
    groups_BGQ: Tensor | None,
    norms_BKS: Tensor | None,
    *,
    cast: bool = False,
) -> dict[str, Tensor]:
    """Statistics that `sinklab.core.attention.attention_statistics` measures chunk by chunk:
    "received" as (B, H, G, S).

    Products of half-precision factors are exact and summed in float32; float32 factors are never
    rounded to TF32.

    Args:
        scores: the call, on a GPU (on a CPU under TRITON_INTERPRET=1).
        names: of the statistics.
        groups_BGQ: weights of queries, float32.
        norms_BKS: norms of values by key head, float32, for "noop_bound".
        cast: multiply in float32 whatever the factors are: the interpreter's product of bfloat16
            overflows.
    """
    call, wanted = _Launch(scores, cast), {*names} - {"received"}
    # Triton launches on the current device, which need not be that of the call
    with torch.cuda.device_of(scores.q_BHQD):
        shift, inverse, results = call.rows(wanted, norms_BKS)
        if "received" in names:
            results["received"] = call.columns(shift, inverse, groups_BGQ)
    return {name: results[name] for name in names}


def _numbers(scores: Scores) -> Tensor | None:
    """Numbers of the chosen heads on the device; None for all in their order."""
    is_all = scores.chosen == tuple(range(scores.q_BHQD.shape[1]))
    return None if is_all else on_device(scores.chosen, scores.q_BHQD.device)


class _Launch:
    """The arguments that both kernels share."""

    def __init__(self, scores: Scores, cast: bool) -> None:
        self.shape, self.keys = scores.shape, scores.k_BKSD.shape[2]
        self.q, self.k = (
            x if x.stride(-1) == 1 else x.contiguous() for x in (scores.q_BHQD, scores.k_BKSD)
        )
        dim, mask = self.q.shape[-1], scores.mask
        self.heads, self.device = _numbers(scores), self.q.device
        # the tensor cores multiply these exactly
        self.is_half = self.q.dtype in (torch.bfloat16, torch.float16)
        self.mask: Tensor = self.q
        self.mask_strides: tuple[int, ...] = (0, 0, 0, 0)
        kind, by_row = "none", False
        if mask is not None:
            kind, by_row = "bool" if mask.dtype == torch.bool else "bias", mask.shape[2] > 1
            self.mask = mask.view(torch.uint8) if mask.dtype == torch.bool else mask
            sizes = zip(mask.shape, mask.stride(), strict=True)
            self.mask_strides = tuple(0 if size == 1 else stride for size, stride in sizes)
        self.numbers = (self.shape[2], self.keys, scores.scale * LOG2E)
        self.shared = scores.groups
        self.constants: dict[str, Any] = {
            "D": dim,
            "BD": max(16, 1 << (dim - 1).bit_length()),
            "CAST": cast,
        }
        self.constants |= {
            "MASK": kind,
            "BY_ROW": by_row,
            "CAUSAL": scores.is_causal,
            "SOME": self.heads is not None,
        }

    def _factors(self) -> tuple[int, ...]:
        return (*self.q.stride()[:3], *self.k.stride()[:3], *self.mask_strides)

    def _run(self, kernel: Any, half: Tiles, axis: int, arguments: tuple, **own: Any) -> None:
        """Launch a kernel, each program on a tile of queries (axis 0) or keys (1); a smaller one if
        it is too large for the memory of a multiprocessor, which differs from GPU to GPU.
        """
        from triton.runtime.errors import OutOfResources

        batch, heads, queries = self.shape
        candidates = (half, _SMALL) if self.is_half else (_EXACT,)
        for tiles in candidates:
            programs = -(-(queries, self.keys)[axis] // tiles[axis])
            names = dict(zip(("BQ", "BS", "num_warps", "num_stages"), tiles, strict=True))
            try:
                kernel[(programs, heads, batch)](*arguments, **own, **self.constants, **names)
            except OutOfResources:
                if tiles is candidates[-1]:
                    raise
            else:
                return

    def columns(self, shift: Tensor, inverse: Tensor, groups: Tensor | None) -> Tensor:
        """Column sums, (B, H, G, S); G is 1 without groups."""
        from sinklab.extras.fast.triton_kernels import columns

        batch, heads, _ = self.shape
        if groups is not None and groups.shape[1] > _GROUPS:
            return torch.cat(
                [self.columns(shift, inverse, part) for part in groups.split(_GROUPS, 1)], 2
            )
        count = 0 if groups is None else groups.shape[1]
        out = torch.empty(batch, heads, max(1, count), self.keys, device=self.device)
        weights = shift if groups is None else groups.contiguous()
        is_plain = not self.constants["BY_ROW"] and self.constants["BD"] <= 128
        arguments = (
            self.q,
            self.k,
            self.mask,
            shift,
            inverse,
            weights,
            self.q if self.heads is None else self.heads,
            out,
            *self._factors(),
            *shift.stride()[:2],
            *weights.stride()[:2],
            *self.numbers,
            self.shared,
        )
        tiles = _COLUMNS_PLAIN[count > 0] if is_plain else _COLUMNS
        self._run(columns, tiles, 1, arguments, G=count)
        return out

    def rows(
        self, names: Collection[str], norms: Tensor | None
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Shift and 1 / sum of every row, and its other wanted statistics, (B, H, Q)."""
        from sinklab.extras.fast.triton_kernels import rows

        shift, inverse, lse, entropy, bound = torch.empty(5, *self.shape, device=self.device)
        weights = shift if norms is None else norms.contiguous()
        arguments = (
            self.q,
            self.k,
            self.mask,
            weights,
            self.q if self.heads is None else self.heads,
            shift,
            inverse,
            lse,
            entropy,
            bound,
            *self._factors(),
            *weights.stride()[:2],
            *shift.stride()[:2],
            *self.numbers,
            self.shared,
        )
        own = {"ENTROPY": "row_entropy" in names, "BOUND": "noop_bound" in names}
        self._run(rows, _ROWS, 0, arguments, **own)
        return shift, inverse, {"row_logsumexp": lse, "row_entropy": entropy, "noop_bound": bound}
