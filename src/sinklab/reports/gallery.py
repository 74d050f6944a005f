"""The figures of one report: drawn in both appearances, shown on the page, and written beside it."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from sinklab.records import write_beside

from .page import Picture, beside
from .study import Study
from .style import DPI, theme_named, themed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


class Gallery:
    """Collects the pictures in the order drawn."""

    def __init__(self) -> None:
        self.pictures: list[Picture] = []

    def draw(self, name: str, alt: str, draw: Callable[[str], Axes | Figure]) -> Picture:
        """Draw one figure; ``draw`` takes the name of the theme."""
        from matplotlib.figure import Figure

        images = {}
        for theme in ("light", "dark"):
            with themed(theme_named(theme)):
                drawn = draw(theme)
                figure = drawn if isinstance(drawn, Figure) else drawn.figure
                buffer = io.BytesIO()
                figure.canvas.print_figure(buffer, format="png", dpi=DPI, metadata={"Software": None})
                images[theme] = buffer.getvalue()
        self.pictures.append(Picture(name, alt, **images))
        return self.pictures[-1]

    def each(self, studies: Sequence[Study], name: str, alt: str, draw: Callable[[Study, str], Axes | Figure]) -> str:
        """One figure per run, next to each other; ``draw`` takes the run and the name of the theme."""
        cards = []
        for index, study in enumerate(studies):
            own = name if len(studies) == 1 else f"{name}-{index + 1}"
            cards.append(self.draw(own, f"{alt}, {study.label}", partial(draw, study)).html(study.label))
        return beside(cards)

    def save(self, folder: Path) -> None:
        """Write every picture as two PNG files."""
        for picture in self.pictures:
            for suffix, content in (("", picture.light), ("-dark", picture.dark)):
                write_beside(folder / f"{picture.name}{suffix}.png", partial(_put, content))


def _put(content: bytes, part: Path) -> None:
    part.write_bytes(content)
