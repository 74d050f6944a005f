"""`intervene`: edits on the attention calls of a model, for the length of a block; and the log of
their effects.
"""

# B batch, L layers, H query heads that were edited, M keys taken away (-1 fills rows that lost
# fewer)
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
from torch import Tensor

from sinklab.core.attention.context import decoding_run, module_of
from sinklab.core.compat import config_value
from sinklab.core.errors import check_count
from sinklab.core.probing.backends import no_call_message
from sinklab.core.probing.call import Call, Listener
from sinklab.core.probing.dose import MEASURED, Dose
from sinklab.core.probing.tap import tapped
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
    held_BLH: Tensor
    """Share of attention (0 to 1) that these keys held in the forward they were chosen in: the
    attention they would have held. For keys that stay blocked (``when="kept"``), that of the newly
    chosen. NaN if attention did not choose: for fixed positions and windows, and once a limit is
    reached.
    """
    overlap_BLH: Tensor
    """Jaccard overlap with the keys this edit removed one step before; NaN if there was no step
    before.
    """
    removed_BLH: Tensor
    """The share of attention (0 to 1) that this edit really took away in this forward, from the
    call it was given; for zeroed values the share whose values were zeroed. NaN with `intervene(…,
    measure=False)`, and if an edit changes the scores themselves.
    """
    left_BLH: Tensor
    """Number of keys that stay for a query, mean over the queries that are not padding; NaN as for
    `removed_BLH`.
    """
    keys_BLH: Tensor
    """Number of keys removed; for a window the mean over queries."""
    chosen_BLH: Tensor
    """Number of keys newly chosen; NaN if attention did not choose, as for `held_BLH`."""
    sinks_BLH: Tensor
    """Number of these that the rule called sinks when they were chosen: the edit's own rule, or
    `DEFAULT`.
    """
    matched_BLH: Tensor
    """1 if the head has a control of equal mass, 0 if it has none and loses nothing; NaN if none is
    sought.
    """
    alone_BLH: Tensor
    """Number of queries (padding not counted) that lost every other key that they saw: they keep
    their own, or without `queries` all keys that they had before the edit. NaN for windows and
    rows.
    """
    strongest_BLH: Tensor
    """The share of attention (0 to 1, mean over queries) of the key that receives most after all
    edits: whether a new sink has grown. NaN with `intervene(…, measure=False)`."""
    strongest_at_BLH: Tensor
    """Index of that strongest key, sink columns included."""
    layer_numbers: tuple[int, ...]
    """Numbers of these layers in the order of execution, from 0."""
    heads: tuple[int, ...]
    """The query heads, the H axis."""
    label: str
    """Registered name of the edit; "block_keys#2" for the second of its name in the block."""

    def columns(self) -> dict[str, np.ndarray]:
        """The record's numbers as columns of `InterventionLog.table`, one row per batch row, layer
        and head.
        """
        row, layer, head = np.indices(self.keys_BLH.shape).reshape(3, -1)
        table = {
            "forward": np.full(len(row), self.forward),
            "layer": np.asarray(self.layer_numbers)[layer],
            "head": np.asarray(self.heads)[head],
            "row": row,
        }
        return table | {name: part.flatten().numpy() for name, part in self.measured().items()}

    def measured(self) -> dict[str, Tensor]:
        """The measures (B, L, H) by name, as in `MEASURED`."""
        return {name: getattr(self, f"{name}_BLH") for name in MEASURED}


@dataclass(eq=False, repr=False)
class InterventionLog(Listener):
    """Filled while the block runs: it comes before any edit, counts forwards and hears of runs that
    begin.
    """

    removals: list[RemovalRecord] = field(default_factory=list)
    forwards: int = 0
    """Forwards that ran with the edits in place, the unedited first ones included."""
    probed: int = 0
    """Forwards that ran inside `probing()`."""
    idle: dict[str, str] = field(default_factory=dict)
    """Edits that had no opportunity to act, by label, and why; filled when the block ends. See
    `allow_idle`.
    """
    prefix: int | None = None
    """Sink columns in front of the keys, which are no columns of the canvas: from the canvas that
    runs, if the denoiser announces one, else from the first call of the sequence, which should be a
    full one.
    """
    measure: bool = True
    """Whether handlers measure the attention they take away (`RemovalRecord.removed_BLH`,
    `left_BLH`).
    """
    layers: dict[str, int] = field(default_factory=dict)
    """Module paths of the attention calls seen so far, each with its number in the order of
    execution.
    """
    layer_count: int | None = None
    """Number of attention calls of a forward; None before it is known."""
    handlers: list[Any] = field(default_factory=list)
    """Handlers that carry the interventions out, in the order they were given."""
    is_probing: bool = False
    _run: object = None

    def begin(self) -> None:
        run = decoding_run()
        # Forwards of no run (a loop of the caller's, or a measurement between two steps) begin and
        # end none.
        if run is not None and run is not self._run and not self.is_probing:
            self._run = run
            self.forget(run_begins=True)

    def edit(self, call: Call) -> Call:
        self.layers.setdefault(call.layer, len(self.layers))
        if self.prefix is None:
            visibility = call.visibility
            if visibility.running is not None:
                self.prefix = call.k_BKSD.shape[2] - visibility.running.ids_BS.shape[1]
            else:
                # a full call: its keys that are seen, less the queries that are not padding
                seen_B = (visibility.visible_BS > 0).sum(-1)
                self.prefix = int((seen_B - visibility.counted_BQ.sum(-1)).max())
        return call

    def finish(self) -> None:
        if self.is_probing:
            self.probed += 1
        else:
            self.forwards += 1
        self.layer_count = len(self.layers)
        for handler in self.handlers:
            handler.scope.check_layers(list(self.layers))

    @property
    def cross_attention(self) -> list[str]:
        """Paths of the modules that attended to another sequence: edits leave their calls alone."""
        return list(self.tap.left_alone)

    def reset(self) -> None:
        """Begin a new sequence or batch: forget every selection. The log stays.

        For loops of your own: a run of `denoise` begins a sequence by itself.
        """
        self.tap.flush()
        self.forget()

    def forget(self, *, run_begins: bool = False) -> None:
        """Forget selections: the forward that begins now is the first of a denoising run, or
        `reset` was called.

        When a run begins, the choice of a clean pass stays: it may have been run ahead, and the
        next one replaces it.
        """
        self.prefix = None
        for handler in self.handlers:
            handler.reset(run_begins=run_begins)

    @contextmanager
    def probing(self) -> Iterator[None]:
        """Forwards inside run as if the intervention were not there; `when="clean"` chooses in
        them.

        They are no steps: a trace around them does not record them.
        """
        self.tap.flush()
        self.is_probing = True
        self.tap.suspended += 1
        try:
            yield
        finally:
            self.tap.flush()
            self.tap.suspended -= 1
            self.is_probing = False

    def summary(self) -> dict[str, float | int]:
        """Means over everything that was removed, and the counts.

        "keys": number of keys a head; "held": share of attention they held in the forward that
        chose them; "removed": share really taken away; "overlap" of successive steps; "left": keys
        that stay for a query; "alone": queries of a head that have no other key; "strongest": share
        of the strongest key after the edits. NaN if nothing was measured.
        """
        dose = self.dose()
        names = ("keys", "held", "removed", "overlap", "left", "alone", "strongest")
        counts = {"forwards": self.forwards, "removals": len(self.removals)}
        return counts | {name: dose.mean(name) for name in names}

    def dose(self, label: str | None = None) -> Dose:
        """Dose of one edit (`RemovalRecord.label`), or of all together: to stand beside a score."""
        return Dose.of(record for record in self.removals if label in (None, record.label))

    def table(self, *, keys: bool = False) -> dict[str, Any]:
        """Everything that was removed as columns of a table, one row per (forward, edit, batch row,
        layer, head).

        forward: index since its run began; edit: registered name, "#2" for the second of that name;
        layer: number in the order of execution; head: query head; row: of the batch; the others
        as in `RemovalRecord`. With `keys=True` a list column "key_list" holds the keys themselves,
        sink columns included. Numpy arrays, "edit" and "key_list" lists. No rows when nothing was
        removed.
        """
        parts = [removal.columns() for removal in self.removals]
        table: dict[str, Any] = dict.fromkeys(TABLE_COLUMNS)
        for name, kind in _NUMBERS.items():
            numbers = [np.empty(0, kind), *(part[name] for part in parts)]
            table[name] = np.concatenate(numbers, dtype=kind, casting="unsafe")
        table["edit"] = [
            removal.label for removal in self.removals for _ in range(removal.keys_BLH.numel())
        ]
        if keys:
            # Fixed positions share one tensor from step to step: its lists are made once.
            columns = {id(removal.columns_BLHM): removal.columns_BLHM for removal in self.removals}
            rows = {which: _key_lists(columns_BLHM) for which, columns_BLHM in columns.items()}
            table["key_list"] = [
                keys for removal in self.removals for keys in rows[id(removal.columns_BLHM)]
            ]
        return table


TABLE_COLUMNS = ("forward", "edit", "layer", "head", "row", *MEASURED)
"""Columns of `InterventionLog.table`, in order."""

_NUMBERS: dict[str, Any] = dict.fromkeys(("forward", "layer", "head", "row"), np.dtype("int32"))
_NUMBERS |= dict.fromkeys(MEASURED, np.dtype("float32"))


def _key_lists(columns_BLHM: Tensor) -> list[list[int]]:
    """The keys of every batch row, layer and head, without the filling."""
    return [[key for key in row if key >= 0] for row in columns_BLHM.flatten(0, 2).tolist()]


@runtime_checkable
class Intervention(Protocol):
    """A frozen dataclass that describes a change of attention calls; `handler` makes the listener
    that does it.

    `sinklab.core.probing.BlockKeys` takes keys away; `LayerIntervention` is the base of any other
    change of a call.
    """

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

    An edit may be its text: ``intervene(model, "window_attention:radius=8")``.

    Edits apply in the order given, each to the call the one before it left, and those of an outer
    block first. A sampler that runs several forwards a step (guidance: two) says so in
    `forwards_per_step`, so that each is compared with its own predecessor. `measure=False` leaves
    out the attention that the edits really took away (`RemovalRecord.removed_BLH`, `left_BLH`),
    and with it one pass over queries and keys per edit and layer. Without edits the block changes
    nothing. Calls inside `sinklab.core.attention.unobserved()` are left alone.

    Every run of `sinklab.core.sampling.denoise` starts afresh: nothing that one has chosen is taken
    from the next. In a loop of your own, call `log.reset()` when a new sequence or batch begins.

    An edit that had an opportunity to act and removed nothing (no key passed its rule) is a dose of
    zero, a result. One that had none (a closed loop over a single step, a first step that is never
    reached) is an error, unless `allow_idle=True` accepts it: then `log.idle` names it.

    Raises ValueError for an argument that is no edit, a compiled model, one that another thread
    traces or edits (as with `trace`, one thread runs it), layers, heads and positions that are not
    there, edits that together leave a query no key, and at the end of the block when the model ran
    and never called `scaled_dot_product_attention` (the edits would have changed nothing), or an
    edit had no opportunity to act.
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
    if tap.forwards > seen_before and not log.layers:
        raise ValueError(no_call_message(tap, tap.forwards - seen_before))
    for handler in log.handlers:
        handler.end()
    if log.idle and not allow_idle:
        raise ValueError(next(iter(log.idle.values())))
