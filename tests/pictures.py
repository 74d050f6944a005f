"""Fixtures for pages of which a test reads words alone: drawing takes most of their time."""

from importlib import import_module

import pytest

from sinklab.lab.registry import figures
from sinklab.lab.reports import NotRecorded
from sinklab.lab.reports.inline import Picture


def undrawn(name, runs, words, place, **options):
    """A picture that was prepared and not drawn."""
    shown = figures[name]
    try:
        shown.prepare(runs) if shown.y else shown._readers(runs)
    except NotRecorded:
        return []
    return [Picture(name, "<svg></svg>", words, place)]


@pytest.fixture
def draw_only(monkeypatch):
    """Pages show these pictures and leave the drawing of others out."""
    build = import_module("sinklab.lab.reports.build")
    every = build.picture

    def only(*drawn):
        def some(name, *about, **options):
            return (every if name in drawn else undrawn)(name, *about, **options)

        monkeypatch.setattr(build, "picture", some)

    return only


@pytest.fixture
def no_pictures(draw_only):
    draw_only()
