"""`intervene`: edits on the attention calls of a model, for the length of a block; and the log of
their effects.
"""

# B batch, L layers, H query heads that were edited, M keys taken away (-1 fills rows that lost
# fewer)
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from sinklab.core.attention.context import decoding_run, module_of
from sinklab.core.compat import config_value
from sinklab.core.errors import check_count
from sinklab.core.instrument.backends import no_call_message
from sinklab.core.instrument.edits.dose import Dose, by_row
from sinklab.core.instrument.routes import tapped
from sinklab.core.instrument.tap import Listener
from sinklab.core.registry import interventions


@dataclass(frozen=True, repr=False)
class RemovalRecord:
    """Effect of one edit in one forward: the keys it removed and the attention they held."""

    forward: int
    """Index of the forward since its run began (see `InterventionLog.reset`); one that changed
    nothing has no entry.
    """
    edit: Any
    layers: tuple[str, ...]
    """Module paths of the layers, the L axis below."""
    columns_BLHM: Tensor
    """The removed keys, sink columns included, by falling score, int64; -1 if a head has fewer than
    M. M = 0 for a window, whose keys differ from query to query.
    """
    numbers: dict[str, Tensor]
    """The measures of `MEASURED` by name, each (B, L, H); also ``record["removed"]``."""
    layer_numbers: tuple[int, ...]
    """Numbers of these layers in the order of execution, from 0."""
    heads: tuple[int, ...]
    """The query heads, the H axis."""
    label: str
    """Registered name of the edit; "block_keys#2" for the second of its name in the block."""

    def __getitem__(self, name: str) -> Tensor:
        return self.numbers[name]


@dataclass(eq=False, repr=False)
class InterventionLog(Listener):
    """Log of the edits of a block. It comes before them, and hears of runs that begin."""

    removals: list[RemovalRecord] = field(default_factory=list)
    forwards: int = 0
    """Forwards that ran with the edits in place, the unedited first ones included."""
    probed: int = 0
    """Forwards that ran inside `probing()`."""
    idle: dict[str, str] = field(default_factory=dict)
    """Edits that had no opportunity to act, by label, and why; filled when the block ends."""
    measure: bool = True
    """Whether editors measure the attention they take away."""
    layer_count: int | None = None
    """Number of attention calls of a forward; None before it is known."""
    handlers: list[Any] = field(default_factory=list)
    """Editors, in the order of their edits."""
    is_probing: bool = False
    _run: object = None

    def begin(self) -> None:
        run = decoding_run()
        # Forwards of no run (a loop of the caller's, or a measurement between two steps) begin and
        # end none.
        if run is not None and run is not self._run and not self.is_probing:
            self._run = run
            self.reset(run_begins=True)

    def finish(self) -> None:
        if self.is_probing:
            self.probed += 1
        else:
            self.forwards += 1
        self.layer_count = len(self.tap.layers)
        for handler in self.handlers:
            handler.scope.check_layers(list(self.tap.layers))

    def reset(self, *, run_begins: bool = False) -> None:
        """Begin a new sequence or batch: forget every choice of keys. The log stays.

        A run of `denoise` begins one by itself (`run_begins`): what a clean pass chose ahead stays.
        """
        if not run_begins:
            self.tap.flush()
        self.tap.prefix = None
        for handler in self.handlers:
            handler.reset(run_begins=run_begins)

    @contextmanager
    def probing(self) -> Iterator[None]:
        """Forwards inside run unedited, and edits look on; `when="clean"` chooses in them.

        They are no steps: a trace around them does not record them.
        """
        self.tap.flush()
        outside = self.is_probing
        self.is_probing = True
        self.tap.suspended += 1
        try:
            try:
                yield
            finally:
                self.tap.flush()
        finally:
            self.tap.suspended -= 1
            self.is_probing = outside

    def summary(self) -> dict[str, float | int]:
        """Counts of forwards and removals, and means over all of them by name (`MEASURED`)."""
        dose = self.dose()
        names = ("keys", "held", "removed", "overlap", "left", "alone", "strongest")
        counts = {"forwards": self.forwards, "removals": len(self.removals)}
        return counts | {name: dose.mean(name) for name in names}

    def dose(self, label: str | None = None) -> Dose:
        """Dose of one edit (`RemovalRecord.label`), or of all together: to stand beside a score."""
        records = [record for record in self.removals if label in (None, record.label)]
        return Dose.pooled(
            Dose(
                {name: (float(sum_B.sum()), float(many_B.sum())) for name, (sum_B, many_B) in rows}
            )
            for rows in (by_row(record).items() for record in records)
        )


@runtime_checkable
class Intervention(Protocol):
    """Anything that `intervene` takes: an `Edit`, or what makes a listener of its own."""

    def handler(self, log: InterventionLog, forwards_per_step: int) -> Listener: ...


def as_edits(edits: Iterable[Intervention | str]) -> list[Intervention]:
    """Edits, with those given as text parsed. Raises ValueError for a class, and for anything that
    is no edit.
    """
    return [interventions.parse(edit, Intervention) for edit in edits]


@contextmanager
def intervene(
    model: Any,
    *edits: Intervention | str,
    forwards_per_step: int = 1,
    measure: bool = True,
    allow_idle: bool = False,
) -> Iterator[InterventionLog]:
    """Apply edits to every attention call of the model inside the block; the model itself is never
    touched.

        with intervene(model, MaskSinks(k=5)) as log, trace(model) as recording:
            …
        log.summary()

    Edits apply in the order given, those of an outer block first, each to the call that the one
    before it left. Every run of `denoise` starts afresh; in a loop of your own call `log.reset()`
    when a new sequence or batch begins. An edit that removed nothing (no key passed its rule) is a
    result; one that never could (a closed loop over a single step) is an error. A backward pass
    that runs layers again (gradient checkpointing) belongs inside the block.

    Args:
        model: a module, or what has `as_module()`.
        edits: edits, or their texts such as ``"window_attention:radius=8"``.
        forwards_per_step: forwards of a step (guidance: two), each with its own past.
        measure: whether to measure "removed", "left" and "strongest", which takes a pass over
            queries and keys for each edit and layer.
        allow_idle: accept an edit that never could act: `log.idle` names it.

    Raises:
        ValueError: for an argument that is no edit, a model that cannot be tapped, layers, heads
            and positions that are not there, edits that leave a query no key, and at the end of
            the block if the model ran and never called `scaled_dot_product_attention`.
    """
    wanted = as_edits(edits)
    check_count("forwards_per_step", forwards_per_step, "it counts the forwards of a step")
    model = module_of(model)
    log = InterventionLog(measure=measure)
    with ExitStack() as stack:
        tap = stack.enter_context(tapped(model, log))
        named = [config_value(module, "num_hidden_layers") for module in model.modules()]
        log.layer_count = next((number for number in named if isinstance(number, int)), None)
        for edit in wanted:
            stack.enter_context(tapped(model, edit.handler(log, forwards_per_step)))
        seen_before = tap.forwards
        yield log
        tap.flush()
    if tap.forwards > seen_before and not log.forwards + log.probed:
        raise ValueError(no_call_message(tap, tap.forwards - seen_before))
    for handler in log.handlers:
        handler.end()
    if log.idle and not allow_idle:
        raise ValueError(next(iter(log.idle.values())))
