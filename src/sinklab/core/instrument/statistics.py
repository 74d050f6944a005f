"""The statistics that a trace can record, each with its measure of an attention call."""

# B batch, H recorded query heads, Q queries, S keys, K key/value heads, D head dim or width
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from sinklab.core.attention.received import STATISTICS, value_norms
from sinklab.core.errors import one_of
from sinklab.core.instrument.call import Call
from sinklab.core.registry import statistics

KEYS = ("batch", "layer", "head", "key")
ROWS = ("batch", "layer", "head", "position")


@dataclass(eq=False)
class StatesView:
    """The hidden states that leave a decoder layer, edits included, for statistics `of_states`."""

    states_BQD: Tensor
    real_BQ: Tensor | None
    """False for padding; None: all are real."""
    columns_Q: Tensor
    """Canvas position of each query, int64."""
    memory: dict[str, Any]
    """Kept from one layer of a forward to the next."""


@dataclass(frozen=True)
class Statistic:
    """One number per key, query, head or layer of every attention call. A function of the call is
    registered under a name, or a subclass with `measure`::

        @statistics.register("largest_share", axes="head", reads=("received",))
        def largest_share(call):
            return call.received_BHS.amax(-1)

    Further arguments are its options: ``trace(model, ("name:argument=value",))``.
    """

    axes: ClassVar[tuple[str, ...]] = ()
    """Names of the axes of one step; "position" is that of queries. Text such as "head key" names
    those after "batch" and "layer".
    """
    reads: ClassVar[tuple[str, ...]] = ()
    """Results of `Call.fill` that it takes, computed in one pass for all statistics."""
    needs_canvas = False
    """Whether it reads the states of queries, which need the canvas."""
    of_states = False
    """Whether `measure` is given a `StatesView`, the hidden states after the layer."""
    columns: ClassVar[tuple[str, ...]] = ()
    """Names along its last axis, if these are numbers of different kinds."""

    def __init_subclass__(cls) -> None:
        axes: Any = cls.axes
        reads: Any = cls.reads
        if isinstance(axes, str):
            cls.axes = ("batch", "layer", *axes.split())
        if isinstance(reads, str):
            cls.reads = tuple(reads.split())

    def measure(self, call: Any) -> Tensor:
        """Measure one layer: a tensor with `axes`, the axis "layer" left out."""
        if not self.reads:
            raise NotImplementedError(f"{self} has no method measure of its own; write it")
        return call.result(self.reads[0])


@statistics.register("received")
class Received(Statistic):
    """The column sums a_j: attention every key receives from all queries that are not padding."""

    axes = KEYS
    reads = ("received",)


@statistics.register("received_by_state")
class ReceivedByState(Statistic):
    """The column sums from masked, committed and prompt queries apart."""

    axes = ("batch", "state", "layer", "head", "key")
    reads = ("received_by_state",)
    needs_canvas = True


@statistics.register("last_row")
class LastRow(Statistic):
    """The attention row of the last real query."""

    axes = KEYS

    def measure(self, call: Call) -> Tensor:
        return call.last_row_BHS


@statistics.register("value_norm")
class ValueNorm(Statistic):
    """The norm of every token's value vector, averaged over all heads."""

    axes: ClassVar[tuple[str, ...]] = ("batch", "layer", "key")

    def measure(self, call: Call) -> Tensor:
        return value_norms(self.vectors(call))

    def vectors(self, call: Call) -> Tensor:
        """The vectors (B, K, S, D) whose norm is taken."""
        return call.v_BKSD


@statistics.register("key_norm")
class KeyNorm(ValueNorm):
    """The norm of every token's key vector as it enters the scores, averaged over all heads."""

    def vectors(self, call: Call) -> Tensor:
        return call.k_BKSD


@statistics.register("row_entropy")
class RowEntropy(Statistic):
    """The entropy of every query's attention row, in nats."""

    axes = ROWS
    reads = ("row_entropy",)


@statistics.register("row_logsumexp")
class RowLogSumExp(Statistic):
    """The natural logarithm of every query's softmax denominator."""

    axes = ROWS
    reads = ("row_logsumexp",)


@statistics.register("output_norm")
class OutputNorm(Statistic):
    """The norm of every head's output for every query."""

    axes = ROWS

    def measure(self, call: Call) -> Tensor:
        out_BHQD = call.out_BHQD.detach()
        return torch.linalg.vector_norm(
            out_BHQD, dim=-1, dtype=torch.promote_types(out_BHQD.dtype, torch.float32)
        )


@statistics.register("noop_bound")
class NoopBound(Statistic):
    """Bound of the norm of a head's output, sum_j A_ij |v_j| (arXiv 2601.19657, Eq. 20-22)."""

    axes = ROWS
    reads = ("noop_bound",)


def chosen_statistics(given: Iterable[Any]) -> dict[str, Statistic]:
    """Statistics by label, from names, texts ``name:field=value`` and values.

    Raises ValueError for none, a bare string, an unknown one, and one without layers.
    """
    if isinstance(given, str) or not given:
        raise ValueError(
            f"statistics is a tuple of names in {tuple(statistics)}, got {given!r}: write (name,)"
        )
    chosen = {statistics.as_text(one): one for one in map(statistics.parse, given)}
    for label, one in chosen.items():
        if "layer" not in one.axes:
            raise ValueError(
                f'the axes of a statistic hold "layer", but those of {label} are {one.axes}: add it'
            )
        for name in one.reads:
            one_of(f"what {label} reads", name, (*STATISTICS, "received_by_state"))
    return chosen
