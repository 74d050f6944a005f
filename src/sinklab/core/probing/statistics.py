"""The statistics that a trace can record, each with its measure of an attention call."""

# B batch, H query heads (those recorded), Q queries, S keys or canvas positions, D head dim (width
# of hidden states) G groups of queries: all real ones, then those in each state
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from sinklab.core.attention.context import decoding_run
from sinklab.core.attention.received import STATISTICS, value_norms
from sinklab.core.compat import config_value, stated
from sinklab.core.errors import check_tensor, one_of
from sinklab.core.probing.call import AttentionCall
from sinklab.core.registry import statistics
from sinklab.core.sinks import COMMITTED, MASKED, STATES

KEYS = ("batch", "layer", "head", "key")
ROWS = ("batch", "layer", "head", "position")


@dataclass(eq=False)
class CallView:
    """One attention call as a statistic reads it, interventions included."""

    call: AttentionCall
    heads: list[int] | None
    """Numbers of the query heads that are recorded, in their order; None for all."""
    state_BQ: Tensor | None
    """Number of each query's state in `STATES`, int8, −1 for padding; None without a canvas."""
    output_BHQD: Tensor
    """Output of every head for every query."""
    shared: dict[str, Tensor] = field(default_factory=dict)
    """Results of one pass over the scores (`Statistic.reads`), float32 or better: of the recorded
    heads alone, and without the queries that are padding.
    """
    memory: dict[str, Any] = field(default_factory=dict)
    """What a statistic that `remembers` keeps of this layer, from one recorded step to the next."""

    def of_heads(self, x_BH: Tensor) -> Tensor:
        """The recorded heads of a tensor (B, H, …) over all query heads."""
        if self.heads is None:
            return x_BH
        return x_BH[:, self.heads]


@dataclass(eq=False)
class StatesView:
    """The hidden states that leave a decoder layer as a statistic reads them (`of_states`),
    interventions included.
    """

    states_BQD: Tensor
    real_BQ: Tensor | None
    """False for padding; None: all are real."""
    columns_Q: Tensor
    """Canvas position of each query, int64."""
    memory: dict[str, Any]
    """What a statistic keeps of this forward, from one layer to the next."""


@dataclass(frozen=True)
class Statistic:
    """One number per key, query, head or layer of every attention call. A function of the call is
    registered under a name, or a subclass with `measure`::

        @statistics.register("largest_share", axes="head", reads=("received",))
        def largest_share(view):
            return view.shared["received"].amax(-1)

    Further arguments are its options: ``trace(model, ("name:argument=value",))``.
    """

    axes: ClassVar[tuple[str, ...]] = ()
    """Names of the axes of one step, "layer" among them. "position" is the axis of queries, "key"
    that of keys. Text such as "head key" stands for those after "batch" and "layer".
    """
    reads: ClassVar[tuple[str, ...]] = ()
    """Results it takes from the one pass over the scores, of "received" (B, H, S),
    "received_by_state" (B, 3, H, S), "row_entropy", "row_logsumexp" and "noop_bound" (B, H, Q): see
    `sinklab.core.attention.received`.
    """
    needs_canvas = False
    """Whether it reads the states of queries: then `trace` must be given the canvas."""
    of_states = False
    """Whether it reads the hidden states after the layer: then `measure` is given a
    `StatesView`.
    """
    remembers = False
    """Whether it compares with the step before, by what it keeps in `CallView.memory`; its first
    step may be NaN.
    """
    columns: ClassVar[tuple[str, ...]] = ()
    """Names along its last axis, if these are numbers of different kinds: a run folder has a table
    of them.
    """

    def __init_subclass__(cls) -> None:
        given: Any = cls.axes
        if isinstance(given, str):
            cls.axes = ("batch", "layer", *given.split())

    def measure(self, view: Any) -> Tensor:
        """Measure one layer: a tensor with `axes`, the axis "layer" left out."""
        return view.shared[self.reads[0]]


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
    """The attention row of the last real query.

    An autoregressive model chooses its next token from it.
    """

    axes = KEYS

    def measure(self, view: CallView) -> Tensor:
        return view.of_heads(view.call.last_row_BHS)


@statistics.register("value_norm")
class ValueNorm(Statistic):
    """The norm of every token's value vector, averaged over all heads."""

    axes: ClassVar[tuple[str, ...]] = ("batch", "layer", "key")

    def measure(self, view: CallView) -> Tensor:
        return value_norms(self.vectors(view.call))

    def vectors(self, call: AttentionCall) -> Tensor:
        """The vectors (B, K, S, D) whose norm is taken."""
        return call.value_BKSD


@statistics.register("key_norm")
class KeyNorm(ValueNorm):
    """The norm of every token's key vector as it enters the scores, averaged over all heads."""

    def vectors(self, call: AttentionCall) -> Tensor:
        return call.key_BKSD


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

    def measure(self, view: CallView) -> Tensor:
        out_BHQD = view.of_heads(view.output_BHQD.detach())
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

    Raises ValueError for none, for a bare string, for an unknown one (naming the near ones) and for
    one without layers.
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


class Shared(dict[str, Tensor]):
    """Results of the one pass, by name."""

    def __missing__(self, name: str) -> Tensor:
        raise ValueError(
            f"{name!r} is read, but no statistic that is recorded names it: add it to `reads`"
        )


def read_in_one_pass(view: CallView, reads: set[str]) -> dict[str, Tensor]:
    """Compute the results that the statistics of a call read (`Statistic.reads`), in one pass over
    its scores.
    """
    call = view.call
    wanted = reads - {"received", "received_by_state"}
    groups_BGQ = call.visibility.groups_BGQ
    if "received_by_state" in reads:
        wanted.add("received")
        state_BQ: Any = view.state_BQ
        states = [state_BQ == state for state in range(len(STATES))]
        groups_BGQ = torch.stack([call.visibility.counted_BQ.to(states[0].device), *states], 1)
    elif "received" in reads and (view.heads is not None or "received_BHS" not in call.known):
        wanted.add("received")
    found: dict[str, Tensor] = {}
    if wanted:
        found = call.measured(wanted, view.heads, v_BKSD=call.value_BKSD, groups_BGQ=groups_BGQ)
    if "received" in found:
        if groups_BGQ is not None:
            found["received_by_state"] = found["received"][:, 1:]
            found["received"] = found["received"][:, 0]
        if view.heads is None:
            # Another listener that asks the call for it later need not compute it again.
            call.known.setdefault("received_BHS", found["received"])
    elif "received" in reads:
        found["received"] = call.received_BHS
    return Shared(found)


STATE_OF = ("predicted", "own")
"""Position that gives a query its state: the position it predicts, or its own."""


def position_states(canvas: Any, ids_BS: Tensor) -> Tensor:
    """State of every position of the canvas, int8 (B, S): its number in `STATES`, −1 for padding.

    `canvas` has `open_BS`, `mask_id` and `attention_BS` (`sinklab.core.sampling.Canvas`). Masked:
    open and holding the mask. Committed: open and written. Prompt: given. Raises ValueError for ids
    of another shape than the canvas.
    """
    remedy = "give trace the canvas that is decoded, and decode with model.denoiser()"
    check_tensor("the ids that tell states", ids_BS, canvas.open_BS.shape, remedy=remedy)
    # from the host such a copy may go its way: it is staged before the call returns
    open_BS, real_BS = (
        x.to(ids_BS.device, non_blocking=True) for x in (canvas.open_BS, canvas.attention_BS)
    )
    state_BS = torch.where(open_BS, (ids_BS != canvas.mask_id).to(torch.int8), 2)
    return torch.where(real_BS, state_BS, -1).to(torch.int8)


def position_states_of(
    call: AttentionCall, tap: Any, asked_by: str, canvas: Any = None, *, needs_canvas: bool = False
) -> Tensor:
    """State of every canvas position in the forward that runs, int8 (B, S); the canvas is that of
    the denoising run, if none is given.

    Without one every position that is not masked is committed, unless that is not enough
    (`needs_canvas`). Raises ValueError if nothing tells the states.
    """
    running = call.visibility.running
    if running is not None and running.state_BS is not None:
        return running.state_BS
    ids_BS = tap.ids_of(running)
    if canvas is None:
        canvas = stated(decoding_run(), "canvas")
    if ids_BS is not None and canvas is not None:
        return position_states(canvas, ids_BS)
    mask_id = config_value(tap.model, "mask_token_id")
    if ids_BS is None or mask_id is None or needs_canvas:
        raise ValueError(
            f"{asked_by} needs the state of positions, which a canvas and token ids tell, but "
            f"{call.layer} runs without; decode with model.denoiser(), pass input_ids, or name "
            "positions such as queries='from32'"
        )
    return torch.where(ids_BS == mask_id, MASKED, COMMITTED)


@runtime_checkable
class DecodedCanvas(Protocol):
    """A canvas that tells the states of its positions, such as `sinklab.core.sampling.Canvas`."""

    open_BS: Tensor
    mask_id: int
    attention_BS: Tensor


def query_states(state_BS: Tensor, columns_Q: Tensor, is_shifted: bool) -> Tensor:
    """State of the position that each query predicts, int8 (B, Q); −1 for a padding query.

    `state_BS` are the states of all positions. A query predicts its own position, or if logits are
    shifted the next one; the last one of the text counts as its own.
    """
    columns_Q = columns_Q.to(state_BS.device)
    own_BQ = state_BS.index_select(1, columns_Q)
    if not is_shifted:
        return own_BQ
    next_BQ = state_BS.index_select(1, (columns_Q + 1).clamp(max=state_BS.shape[1] - 1))
    return torch.where((own_BQ < 0) | (next_BQ < 0), own_BQ, next_BQ)
