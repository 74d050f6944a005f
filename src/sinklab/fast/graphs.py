"""CUDA graphs of the steps of a block: some 900 kernels of a partial evaluation are launched as one.

A partial evaluation of a block has the same shapes at every step, and keys and values stay in the same buffers. The
first one of a shape runs as it is, the second is recorded, the others replay the record. What cannot be recorded runs
as it is. The slow twin is the same function, called.
"""

# B batch, W columns that run, Q columns wanted, E hidden size
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sinklab.models.denoising import KeyValueStore

Compute = Callable[[Tensor, Tensor, Tensor, KeyValueStore], Tensor]
"""(x_BWE, columns_W, output_index_Q, memory) -> states (B, Q, E)."""

is_on = True
"""False runs every evaluation as it is."""


@dataclass(frozen=True, eq=False)
class Recorded:
    """A graph with the tensors that it reads, and the one that it writes."""

    graph: torch.cuda.CUDAGraph
    given: tuple[Tensor, Tensor, Tensor]
    states_BQE: Tensor

    @classmethod
    def of(cls, compute: Compute, memory: KeyValueStore, given: tuple[Tensor, Tensor, Tensor]) -> Recorded:
        """Record one evaluation; nothing is computed. Raises RuntimeError for what no graph can hold."""
        held = tuple(tensor.clone() for tensor in given)
        x_BWE, columns_W, output_index_Q = held
        before, graph = memory.columns, torch.cuda.CUDAGraph()
        # from here on the memory is written where the record's own columns say
        memory.columns = columns_W
        try:
            with torch.cuda.device(x_BWE.device), torch.cuda.graph(graph, capture_error_mode="thread_local"):
                states_BQE = compute(x_BWE, columns_W, output_index_Q, memory)
        finally:
            memory.columns = before
        return cls(graph, (x_BWE, columns_W, output_index_Q), states_BQE)

    def __call__(self, given: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        """The states, valid until the next call."""
        for held, new in zip(self.given, given, strict=True):
            held.copy_(new)
        self.graph.replay()
        return self.states_BQE


def can_replay(x_BWE: Tensor, columns: Tensor, memory: Any) -> bool:
    """Whether this evaluation may become a graph: on CUDA, of some columns, into buffers that stay."""
    return (
        is_on
        and x_BWE.is_cuda
        and type(memory) is KeyValueStore
        and memory.columns is columns
        and columns.ndim == 1
        and torch.is_inference_mode_enabled()
        and not torch.is_autocast_enabled("cuda")
        and not torch.cuda.is_current_stream_capturing()
    )


def replayed(
    compute: Compute, memory: KeyValueStore, x_BWE: Tensor, columns_W: Tensor, output_index_Q: Tensor
) -> Tensor:
    """What ``compute`` gives, by a graph from the third evaluation of a shape on; the memory keeps its graphs."""
    given, shape = (x_BWE, columns_W, output_index_Q), (*x_BWE.shape, len(output_index_Q))
    if (known := memory.graphs.get(shape)) is None:
        memory.graphs[shape] = "seen"
        return compute(*given, memory)
    if known == "seen":
        try:
            known = Recorded.of(compute, memory, given)
        except RuntimeError as error:
            known = f"not recorded: {error}"
        memory.graphs[shape] = known
    return known(given) if isinstance(known, Recorded) else compute(*given, memory)
