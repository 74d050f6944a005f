"""Attention of all queries so far, added up while an autoregressive text grows."""

# W windows of queries, L layers, H heads, K keys

import numpy as np

from sinklab.lab.measures.statistics import WINDOW


class SoFar:
    """Column sums of one text over all its queries so far, as a forward over the whole text would
    give them.

    Under a cache every forward has the rows of its own queries alone; added up they are the columns
    of the causal map. A forward over the whole text (the prompt, or one without a cache) begins
    anew.
    """

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self.queries = 0
        """Queries so far."""
        self.received = np.zeros((0, 0, 0), np.float32)
        """(L, H, K) column sums."""
        self.visible = np.zeros(0, np.float32)
        """(K,) queries that may see the key."""
        self._windows: list[np.ndarray] = []

    def add(
        self,
        received_LHK: np.ndarray,
        visible_K: np.ndarray,
        window_WLHK: np.ndarray,
        added: int = 0,
    ) -> None:
        """Add the column sums of one forward.

        Args:
            received_LHK: its column sums.
            visible_K: how many of its queries may see each key.
            window_WLHK: the column sums of its queries, `WINDOW` after another (the statistic
                "received_by_window").
            added: added sink columns in front of the keys.

        Raises:
            ValueError: for a forward of several queries that begins inside of a window.
        """
        ran = int(visible_K.max())
        if ran == np.count_nonzero(visible_K[added:]):
            self._begin()
        begins, into = divmod(self.queries, WINDOW)
        if into and ran > 1:
            raise ValueError(
                f"rows are added up of whole prompts and single tokens, but after {self.queries} "
                f"queries came a forward of {ran}: read the text in one piece, or token by token"
            )
        keys = received_LHK.shape[-1]
        self.received = _widened(self.received, received_LHK.shape) + received_LHK
        self.visible = np.pad(self.visible, (0, keys - len(self.visible))) + visible_K
        for number, sums_LHK in enumerate(window_WLHK, begins):
            if number == len(self._windows):
                self._windows.append(np.zeros((0, 0, 0), np.float32))
            self._windows[number] = _widened(self._windows[number], sums_LHK.shape) + sums_LHK
        self.queries += ran

    def windows(self, keys: int, added: int = 0) -> np.ndarray:
        """(W, L, H, keys) mean weight that the queries of each whole window give the keys that all
        of them may see.

        Window w has the queries 8w … 8w + 7 of the text; the other keys hold NaN. Of the text, the
        first ``keys`` keys.

        Args:
            keys: keys to tell of, added sinks among them; a window that reaches beyond them is left
                out.
            added: added sink columns in front.
        """
        whole = min(self.queries, keys - added) // WINDOW
        found = np.full((whole, *self.received.shape[:2], keys), np.nan, np.float32)
        for number, sums_LHK in enumerate(self._windows[:whole]):
            seen = added + number * WINDOW + 1
            found[number, ..., :seen] = sums_LHK[..., :seen] / WINDOW
        return found


def _widened(sums_LHK: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The sums with zeros for keys, heads or layers that did not exist yet."""
    return np.pad(
        sums_LHK, [(0, size - had) for size, had in zip(shape, sums_LHK.shape, strict=True)]
    )
