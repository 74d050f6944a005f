"""Fixtures for pages of which a test reads words alone: drawing takes most of their time."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest

from sinklab.core.registry import figures
from sinklab.lab.reports import NotRecorded
from sinklab.lab.reports.inline import Picture


def undrawn(name: str, runs: Any, words: str, place: str, **options: Any) -> list[Picture]:
    """A picture that was prepared and not drawn."""
    shown = figures[name]
    try:
        shown.prepare(runs) if shown.y else shown._readers(runs)
    except NotRecorded:
        return []
    return [Picture(name, "<svg></svg>", words, place)]


@pytest.fixture
def draw_only(monkeypatch) -> Callable[..., None]:
    """Pages show these pictures and leave the drawing of others out."""
    build = import_module("sinklab.lab.reports.build")
    every = build.picture

    def only(*drawn: str) -> None:
        def some(name: str, *about: Any, **options: Any) -> list[Picture]:
            return (every if name in drawn else undrawn)(name, *about, **options)

        monkeypatch.setattr(build, "picture", some)

    return only


@pytest.fixture
def no_pictures(draw_only) -> None:
    draw_only()
