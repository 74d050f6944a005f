"""Evaluations of the fast decoder as a trace hears them: each attention call and the states behind
it, where they are computed.

The slow twin is the model's own forward under the tap.
"""

# B batch, W columns that run, H query heads, D head dim, A attention width H·D, E hidden size
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from sinklab.core.probing.call import AttentionCall
from sinklab.core.probing.tap import Tap


class Heard:
    """One evaluation, told to the listeners of a tap. None of them edits: see `FastDecoder.tap`."""

    def __init__(self, tap: Tap) -> None:
        self.tap = tap
        self._known: dict[tuple, Any] = {}

    def layer(self, index: int, given: dict[str, Any], out_BWA: Tensor, states_BWE: Tensor) -> None:
        """A layer has run.

        Args:
            index: its number.
            given: its attention call, by the names of `scaled_dot_product_attention`.
            out_BWA: output of the heads.
            states_BWE: hidden states that leave the layer.
        """
        path = f"model.layers.{index}.self_attn"
        call = AttentionCall.of(path, self.tap.model.get_submodule(path), given, self._known)
        out_BHWD = out_BWA.unflatten(2, (call.query_BHQD.shape[1], -1)).transpose(1, 2)
        for listener in self.tap.listeners:
            listener.observe(call, out_BHWD)
            listener.observe_states([path], states_BWE)


@contextmanager
def told(tap: Tap) -> Iterator[Heard]:
    """One evaluation, from its beginning to its end: a forward to the listeners."""
    tap.owner.check("runs the model or a part of it")
    tap.flush()
    tap.begin()
    try:
        yield Heard(tap)
    except BaseException:
        tap.flush(complete=False)
        raise
    tap.forwards += 1
    tap.flush(complete=True)
