"""`intervene`: edits on the attention calls of a model, for the length of a block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Protocol

from torch import nn

from sinklab.attention.context import decoding_run
from sinklab.probing.call import AttentionCall
from sinklab.probing.log import InterventionLog
from sinklab.probing.tap import Listener, no_call_message, tapped


class Intervention(Protocol):
    """A frozen dataclass that says what to change in attention calls; `handler` makes the listener that does it.

    `sinklab.probing.KeyIntervention` (keys are taken away) and `LayerIntervention` (any change of a call) are bases.
    """

    def handler(self, log: InterventionLog, forwards_per_step: int) -> Listener: ...


def count_layers(model: nn.Module) -> int | None:
    """The number of layers the model's config names; None where it names none."""
    for module in model.modules():
        number = getattr(getattr(module, "config", None), "num_hidden_layers", None)
        if isinstance(number, int):
            return number
    return None


class _ForwardObserver(Listener):
    """Comes before any edit: counts forwards, sees runs begin, and takes layers and the sink prefix from the calls."""

    def __init__(self, log: InterventionLog) -> None:
        self.log = log
        self.seen = self.settled = False
        self.run: object | None = None

    def begin(self) -> None:
        run = decoding_run()
        # Forwards of no run (a loop of the caller's, or a measurement between two steps) begin and end none.
        if run is not None and run is not self.run and not self.log.is_probing:
            self.run = run
            self.log.forget(run_begins=True)

    def edit(self, call: AttentionCall) -> AttentionCall:
        self.seen = True
        self.log.layers.setdefault(call.layer, len(self.log.layers))
        self.log.prefix_of(call)
        return call

    def finish(self) -> None:
        log = self.log
        if log.is_probing:
            log.probed += 1
        else:
            log.forwards += 1
        log.layer_count = len(log.layers)
        if not self.settled:
            self.settled = True
            for handler in log.handlers:
                handler.scope.check_layers(list(log.layers))


@contextmanager
def intervene(
    model: nn.Module, *edits: Intervention, forwards_per_step: int = 1, measure: bool = True, allow_idle: bool = False
) -> Iterator[InterventionLog]:
    """Apply edits to every attention call of the model inside the block; the model itself is never touched.

        with intervene(model, MaskSinks(k=5)) as log, trace(model) as recording:
            …
        log.summary()

    Edits apply in the order given, each to the call the one before it left, and those of an outer block first. A
    sampler that runs several forwards a step (guidance: two) says so in `forwards_per_step`, so that each is compared
    with its own predecessor. `measure=False` leaves out what the edits really took away (`RemovalRecord.realised_BLH`,
    `left_BLH`), and with it one pass over queries and keys per edit and layer. Without edits the block changes
    nothing. Calls inside `sinklab.attention.unobserved()` are left alone.

    Every run of `sinklab.sampling.denoise` starts afresh: nothing that one has chosen is taken from the next. In a loop
    of your own, call `log.reset()` where a new sequence or batch begins.

    An edit that had an opportunity to act and removed nothing (no key passed its rule) is a dose of zero, a result. One
    that had none (a closed loop over a single step, a first step that is never reached) is an error, unless
    `allow_idle=True` accepts it: then `log.idle` names it.

    Raises ValueError for what is not an edit, a compiled model, one that another thread traces or edits (as with
    `trace`, one thread runs it), layers, heads and positions that are not there, edits that together leave a query no
    key, and at the end of the block when the model ran and never called `scaled_dot_product_attention` (the edits would
    have changed nothing), or an edit had no opportunity to act.
    """
    for edit in edits:
        if isinstance(edit, type) or not hasattr(edit, "handler"):
            raise ValueError(f"intervene takes edits such as MaskSinks(k=1), got {edit!r}: pass instances, not classes")
    if forwards_per_step < 1:
        raise ValueError(f"forwards_per_step counts the forwards of a step, at least 1, got {forwards_per_step}")
    log = InterventionLog(measure=measure, layer_count=count_layers(model) if isinstance(model, nn.Module) else None)
    observer = _ForwardObserver(log)
    with ExitStack() as stack:
        tap = stack.enter_context(tapped(model, observer))
        log._tap = tap
        for edit in edits:
            stack.enter_context(tapped(model, edit.handler(log, forwards_per_step)))
        seen_before = tap.forwards
        yield log
        tap.flush()
    if tap.forwards > seen_before and not observer.seen:
        raise ValueError(no_call_message(model, tap.forwards - seen_before))
    for handler in log.handlers:
        handler.end()
    if log.idle and not allow_idle:
        raise ValueError(next(iter(log.idle.values())))
