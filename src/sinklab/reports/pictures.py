"""Figures as pictures inside a page: vector graphics in the light and in the dark look, in the markup itself."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Sequence
from html import escape
from typing import Any

from .drawing import figure_of, save
from .recorded import NotRecorded
from .style import theme_named, themed

DARK = "screen and (prefers-color-scheme: dark)"


def picture(draw: Callable[..., Any], alternative: str) -> str:
    """What ``draw(theme=…)`` draws as HTML; empty where the runs did not record enough for it."""
    try:
        light, dark = (_address(draw, theme) for theme in ("light", "dark"))
    except NotRecorded:
        return ""
    return (
        f'<figure><picture><source media="{DARK}" srcset="{dark}">'
        f'<img src="{light}" alt="{escape(alternative)}"></picture></figure>'
    )


def pictured(
    anchor: str, title: str, how: str, pictures: Sequence[str], sentences: Sequence[str] = (), details: str = ""
) -> str:
    """A card with pictures, sentences and numbers; empty when there is no picture."""
    if not any(pictures):
        return ""
    said = "".join(f"<p>{escape(sentence)}</p>" for sentence in sentences)
    return (
        f'<article class="card" id="{escape(anchor)}"><h2>{escape(title)}</h2><p class="how">{escape(how)}</p>'
        f"{''.join(pictures)}{said}{details}</article>"
    )


def _address(draw: Callable[..., Any], theme: str) -> str:
    import matplotlib

    written = io.BytesIO()
    # Letters stay letters: a tenth of the size of their outlines.
    with themed(theme_named(theme)), matplotlib.rc_context({"svg.fonttype": "none"}):
        save(figure_of(draw(theme=theme)), "svg", written)
    return f"data:image/svg+xml;base64,{base64.b64encode(written.getvalue()).decode('ascii')}"
