"""Studies whose numbers are chosen, so that a report must print them."""

import dataclasses
import shutil

import pytest
from browsing import browser as browser
from browsing import one as one
from browsing import page as page
from browsing import two as two
from simulated import simulate

from curves import costed
from pictures import no_pictures as no_pictures
from pictures import page_with
from sinklab.lab.records import open_run


@pytest.fixture(scope="session")
def known(tmp_path_factory):
    """A folder, and the runs in it by what was asked for: the next that ask get a copy."""
    return tmp_path_factory.mktemp("known"), {}


@pytest.fixture
def make_study(tmp_path, known):
    return maker(tmp_path, known)


@pytest.fixture(scope="module")
def make_shared(tmp_path_factory, known):
    """As make_study, for runs that the tests of a module only read."""
    return maker(tmp_path_factory.mktemp("shared"), known)


def maker(root, known):
    place, copies = known

    def make(name="tiny", *, folder=None, **how):
        path, asked = root / (folder or name), repr(sorted(how.items()))
        if how.keys() & {"change", "maps", "whole"}:
            return simulate(path, name, **how)
        if asked not in copies:
            copies[asked] = place / str(len(copies))
            shutil.copytree(simulate(path, name, **how).path, copies[asked])
            return open_run(path)
        shutil.copytree(copies[asked], path)
        info = open_run(path).info
        dataclasses.replace(info, model=info.model | {"name": name}).save(path)
        return open_run(path)

    return make


@pytest.fixture(scope="session")
def drawn_report(tmp_path_factory, known):
    """report.html of a run without and one with an added sink, with some of its figures."""
    make = maker(tmp_path_factory.mktemp("runs"), known)
    runs = [*costed(make("plain")), *costed(make("sink", added=1, text_share=0.1))]
    shown = ("heldout_loss", "sink_paths", "statistics")
    return page_with(*shown, of=runs, out=tmp_path_factory.mktemp("report"), tables=True)
