"""Base of everything that hears of the attention calls of a model: recorders and edits."""

# B batch, Q queries, D width of hidden states
from typing import Any

from torch import Tensor

from sinklab.core.probing.call import Call


class Listener:
    """Hears of every forward of a model: it begins with the first attention call and ends by
    `finish` or `discard`.
    """

    tap: Any
    """The `Tap` that it listens to; there once it is `tapped`."""
    reads_scores = False
    """Whether it takes statistics from the scores of calls."""
    exact = True
    """Whether it hears of the model's own forward alone; False: of a fast decoder's as well, whose
    numbers are equal within rounding.
    """
    of_states = ""
    """Feature that needs hidden states here, as errors name it; empty if nothing does."""

    def __getstate__(self) -> dict[str, Any]:
        # a copy listens to no model
        return {**vars(self), "tap": None}

    def begin(self) -> None:
        """A forward begins."""

    def edit(self, call: Call) -> Call:
        """Return the call to make; the same object when nothing is to change."""
        return call

    def observe(self, call: Call, out: Tensor) -> None:
        """Observe the call as it was made, after every edit, and its output (`call.unrolled`);
        neither is to be changed.
        """

    def edit_states(self, calls: list[str], states_BQD: Tensor) -> Tensor:
        """The hidden states to leave a decoder layer, in which these attention calls were made; the
        same object when nothing is to change."""
        return states_BQD

    def observe_states(self, calls: list[str], states_BQD: Tensor) -> None:
        """The hidden states as they leave the layer, after every edit; not to be changed."""

    def finish(self) -> None:
        """The forward came to its end."""

    def discard(self) -> None:
        """Forget the observations of a forward that failed."""
