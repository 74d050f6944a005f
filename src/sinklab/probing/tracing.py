"""`trace`: watch every attention layer of a model for the length of a block."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from sinklab.probing.choice import Choice, Place
from sinklab.probing.frames import Watcher
from sinklab.probing.recording import Recording
from sinklab.probing.statistics import QueryStates, checked_state_of, checked_statistics
from sinklab.probing.tap import no_call_message, tapped


@contextmanager
def trace(
    model: nn.Module,
    statistics: Sequence[str] = ("received", "value_norm"),
    *,
    layers: Iterable[int | str] | int | str | None = None,
    heads: Iterable[int] | int | None = None,
    steps: Container[int] | None = None,
    maps: Iterable[Place] = (),
    canvas: Any = None,
    state_of: str = "predicted",
) -> Iterator[Recording]:
    """Record attention statistics of every forward inside the block, on any module that attends through SDPA.

        with trace(model) as recording:
            for step in denoise(model.denoiser(), canvas):
                recording.mark(step)
        recording.array("received")     # (step, batch, layer, head, key)

    The model keeps its own kernel: outputs are bit-identical, and the statistics are computed beside it. Traces nest,
    also with `intervene` on the same module, in either order: a trace sees the edited calls. Calls inside
    `sinklab.attention.unobserved()` are not seen. The thread that opens the block is the one that runs the model in it;
    other models are unaffected, in any thread, and so is a copy of this one.

    Args:
        statistics: "received" (column sums), "received_by_state" (from masked, committed and prompt queries apart:
            (batch, state, layer, head, key), needs `canvas`), "last_row" (the attention row of the last real query),
            "value_norm", "key_norm" (averaged over all heads), and by query "row_entropy", "row_logsumexp" (nats),
            "output_norm" (of what the head gives, edits included) and "noop_bound" (what bounds it: arXiv 2601.19657,
            Eq. 20-22).
        layers: which to record: numbers in the order they run (from 0; negative from the end), or module paths, their
            ends, or modules that hold them ("layers.3", "*.self_attn"). Of the others nothing is computed.
        heads: numbers of the query heads to record.
        steps: a container of step numbers to record, counted from 0 by marks, or by forwards where nothing is marked.
            The others cost next to nothing.
        maps: (step, layer, head) triples whose whole map is kept: `recording.map(step, layer, head)`. Whatever layers,
            heads and steps say.
        canvas: what is decoded, with `open_BS`, `mask_id` and `attention_BS` (`sinklab.sampling.Canvas`): it tells the
            state of a query, `recording.query_state`. The ids of a step are those the denoiser announces
            (`sinklab.attention.running`), or the model's own `input_ids`.
        state_of: "predicted": a query is in the state of the position it predicts (the next one where
            `model.config.logit_shift` is set); "own": of the position it stands at.

    Raises ValueError for an unknown statistic, layer or head, for states without a canvas, for a compiled model, for
    one that another thread traces or edits (or a part of it), and at the end of the block if no call was seen. Another
    thread that runs the model meanwhile, or a part of it, gets a ValueError there.
    """
    names = checked_statistics(statistics)
    if "received_by_state" in names and canvas is None:
        raise ValueError(
            "received_by_state groups queries by the state of the canvas, but no canvas was given: "
            "trace(model, …, canvas=canvas)"
        )
    of = checked_state_of(state_of)
    states = None if canvas is None else QueryStates(model, canvas, of)
    watcher = Watcher(model, names, Choice.of(layers, heads, steps, maps), states)
    with tapped(model, watcher) as tap:
        watcher.tap = tap
        seen_before = tap.forwards
        yield Recording(watcher)
    if not watcher.choice.known:
        raise ValueError(no_call_message(model, tap.forwards - seen_before))
