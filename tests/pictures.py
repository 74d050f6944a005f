"""Fixtures for pages of which a test reads words alone: writing pictures takes most of their
time.
"""

from importlib import import_module

import pytest

from sinklab.lab.registry import figures
from sinklab.lab.reports import NotRecorded
from sinklab.lab.reports.inline import Picture


def undrawn(name, runs, words, place, **options):
    """A picture that was drawn and not written."""
    try:
        numbers = figures[name].drawn(runs, **options)[1]
    except NotRecorded:
        return []
    return [Picture(name, "<svg></svg>", words, place, numbers)]


@pytest.fixture
def draw_only(monkeypatch):
    """Pages show these pictures and leave the writing of others out."""
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
