"""What is read of a forward from its device: all of it in one piece, when the forward ends.

Reading a number of a GPU makes the program wait for everything that is queued there. Whoever needs
numbers of a forward (a check of a choice, the log of an edit) therefore leaves them here.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from sinklab.core.attention.context import reads_wait


class Reads:
    """Tensors to bring to the host, and who is given them."""

    def __init__(self) -> None:
        self._asked: list[tuple[tuple[Tensor, ...], Callable[..., None]]] = []

    def later(self, use: Callable[..., None], *parts: Tensor) -> None:
        """Have `use` given these tensors, float32 and on the CPU, when the forward ends."""
        self._asked.append((parts, use))

    def check(self, wrong: Tensor, refuse: Callable[[], None], *, at_once: bool) -> None:
        """Have `refuse` raise if the flag is set: now, or later if reading it would wait."""

        def answer(is_wrong: Tensor) -> None:
            if bool(is_wrong):
                refuse()

        if at_once or not reads_wait(wrong.device):
            answer(wrong)
        else:
            self.later(answer, wrong)

    def settle(self) -> None:
        """Bring everything over, and hand it out in the order in which it was asked for."""
        asked = self._asked
        self._asked = []
        if not asked:
            return
        device = asked[0][0][0].device
        flat = [part.to(device).flatten().float() for parts, _ in asked for part in parts]
        there = iter(torch.cat(flat).cpu().split([len(part) for part in flat]))
        for parts, use in asked:
            use(*[next(there).view(part.shape) for part in parts])

    def forget(self) -> None:
        """The forward failed."""
        self._asked = []
