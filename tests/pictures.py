"""Fixtures for pages of which a test reads words alone: writing pictures takes most of their
time.
"""

import pytest

from sinklab.lab.registry import figures
from sinklab.lab.reports import NotRecorded, build


def undrawn(name, runs, **options):
    """A picture that was drawn and not written."""
    try:
        figures[name].drawn(runs, **options)
    except NotRecorded:
        return ""
    return "<svg></svg>"


def page_with(*drawn, of, out, tables=False, **how):
    """The page of runs that shows these pictures and leaves the writing of others out."""
    with pytest.MonkeyPatch.context() as patch:
        drawn_alone(patch, *drawn)
        return build.report(of, out, tables=tables, **how)


def drawn_alone(patch, *drawn):
    every = build.svg_of

    def some(name, runs, **options):
        return (every if name in drawn else undrawn)(name, runs, **options)

    patch.setattr(build, "svg_of", some)


@pytest.fixture
def no_pictures(monkeypatch):
    drawn_alone(monkeypatch)
