"""Heads under tensor parallelism: each process holds an equal share of them, by its rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed

from sinklab.core.attention.context import HeadShare
from sinklab.core.registry import head_shares

PROJECTIONS = ("q_proj", "k_proj", "v_proj")


@head_shares.register("tensor_parallel")
@dataclass(frozen=True)
class TensorParallelShare(HeadShare):
    """The share of a process by its rank in the group."""

    group: Any
    """Process group that holds one model together."""

    @property
    def count(self) -> int:  # type: ignore[override]
        """Number of processes that hold one model together."""
        return distributed.get_world_size(self.group)

    @property
    def rank(self) -> int:  # type: ignore[override]
        """Rank of this process in the group."""
        return distributed.get_rank(self.group)

    def own(self, whole: Tensor, axis: int = 1) -> Tensor:
        """This process's part of an axis of all heads."""
        return whole.chunk(self.count, axis)[self.rank]

    def whole(self, own: Tensor, axis: int = 1) -> Tensor:
        """An axis of all heads, of which every process holds its part; gradients flow through the
        part of this one.
        """
        # no backend gathers booleans
        sent = own.detach().contiguous()
        sent = sent.view(torch.uint8) if own.dtype == torch.bool else sent
        parts = [torch.empty_like(sent) for _ in range(self.count)]
        distributed.all_gather(parts, sent, group=self.group)
        parts = [part.view(own.dtype) for part in parts]
        parts[self.rank] = own
        return torch.cat(parts, axis)

    @classmethod
    def serving(cls, attention: Any, width: int | None = None) -> TensorParallelShare | None:
        """Share of the heads of an attention module; None if its projections are whole. Arguments
        and errors are those of `share_of`.
        """
        from torch.distributed.tensor import DTensor, Shard

        divided = {
            name: one for name, one in attention.named_parameters() if isinstance(one, DTensor)
        }
        queries = divided.get("q_proj.weight")
        if not divided or (queries is not None and len(queries) == width):
            return None
        weights = [divided.get(f"{name}.weight") for name in PROJECTIONS]
        by_rows = all(one is not None and tuple(one.placements) == (Shard(0),) for one in weights)
        if (
            queries is None
            or not by_rows
            or width not in (None, len(queries) // queries.device_mesh.size())
        ):
            raise ValueError(
                f"the weights of a {type(attention).__name__} are divided over processes, and "
                f"where its heads are is known for {', '.join(PROJECTIONS)} divided by rows "
                "(colwise) alone; load it with sinklab.load(…, tensor_parallel=n), or undivided"
            )
        return cls(queries.device_mesh.get_group())
