"""Fixtures for pages of which a test reads words alone: writing pictures takes most of their
time.
"""

from importlib import import_module

import pytest

from sinklab.lab.registry import figures
from sinklab.lab.reports import NotRecorded


def undrawn(name, runs, **options):
    """A picture that was drawn and not written."""
    try:
        figures[name].drawn(runs, **options)
    except NotRecorded:
        return ""
    return "<svg></svg>"


@pytest.fixture
def draw_only(monkeypatch):
    """Pages show these pictures and leave the writing of others out."""
    build = import_module("sinklab.lab.reports.build")
    every = build.svg_of

    def only(*drawn):
        def some(name, runs, **options):
            return (every if name in drawn else undrawn)(name, runs, **options)

        monkeypatch.setattr(build, "svg_of", some)

    return only


@pytest.fixture
def no_pictures(draw_only):
    draw_only()
