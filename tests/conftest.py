"""Every test: no network, one thread, one seed, uninitialised memory filled with NaN."""

import gc
import logging
import os
import sys

# Before anything imports torch, transformers, datasets or matplotlib; child processes inherit it.
# With a test on every core, threads of a small product wait for one another, and burn a core.
os.environ.update(
    HF_HUB_OFFLINE="1",
    HF_DATASETS_OFFLINE="1",
    TOKENIZERS_PARALLELISM="false",
    MPLBACKEND="Agg",
    OMP_NUM_THREADS="1",
)

import random
import tempfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from forked import forks
from rings import is_missing, ring_of

# Asserts are rewritten and src is compiled once, not in each run, worker and child process: seven
# seconds a worker.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
torch.set_num_threads(1)
# A fork makes torch's threads anew when they are first asked for, which two at once may not.
os.register_at_fork(after_in_child=lambda: torch.set_num_threads(torch.get_num_threads()))
# Also fills torch.empty with NaN, so a buffer read before it is written shows.
torch.use_deterministic_algorithms(True)
if not torch.accelerator.is_available():
    # The stack is written down for each kind of device that is not there: half of an empty test.
    torch.manual_seed = torch.default_generator.manual_seed
# 12 ms a file, for a disk that loses power: tests kill processes alone.
os.fsync = lambda _: None

LONGEST = ("test_workers", "test_docs", "test_sink_contents", "test_site")
"""modules with tests of 10 s and more"""


@pytest.fixture
def scratch():
    """Lets registries forget afterwards what a test registers, and loads examples as plug-ins."""
    with pytest.MonkeyPatch.context() as patch:

        def begin(*registries, example=None):
            for registry in registries:
                patch.setattr(registry, "_classes", dict(registry._all()))
            if example:
                from sinklab.lab.files import load_plugin

                sys.modules.pop(f"sinklab_plugin_{example}", None)
                load_plugin(Path(__file__).parents[1] / "examples" / f"{example}.py")

        yield begin
    for name in [name for name in sys.modules if name.startswith("sinklab_plugin_")]:
        del sys.modules[name]


@pytest.fixture
def logged():
    """What transformers logs meanwhile."""
    records = []
    handler = logging.Handler()
    handler.emit = records.append
    logger = logging.getLogger("transformers")
    logger.addHandler(handler)
    yield records
    logger.removeHandler(handler)


@pytest.fixture(autouse=True)
def seeded():
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def python(pytestconfig):
    """A Python, a path, whose processes cost no imports: forks of this one before any test."""
    return pytestconfig.python


def pytest_ignore_collect(collection_path):
    """Leave out files of a ring whose folder was deleted, and folders whose conftest.py is one."""
    if not is_missing("extras"):
        return None
    file = collection_path
    if file.is_dir():
        file = file / "conftest.py"
    if file.suffix == ".py" and file.is_file() and is_missing(ring_of(file)):
        return True
    return None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Leave out tests marked for a ring that is not there. A test with a browser is slow.

    Slow tests begin first, the longest of all, lest one worker end alone with them.
    """
    items[:] = [
        item
        for item in items
        if not any(is_missing(mark.args[0]) for mark in item.iter_markers("ring"))
    ]
    for item in items:
        if "browser" in getattr(item, "fixturenames", ()):
            item.add_marker("slow")
    items.sort(
        key=lambda item: (item.get_closest_marker("slow") is None, item.path.stem not in LONGEST)
    )


def pytest_collection_finish():
    """What was imported and collected stays: collections of garbage need not look at it again,
    and are rarer.

    Each training begins and ends by collecting, to give memory back to a GPU: a tenth of its time
    at these sizes.
    """
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    if memory := sys.modules.get("accelerate.utils.memory"):
        memory.gc = SimpleNamespace(collect=lambda: 0)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtestloop(session):
    """Fork the process of which the fixture `python` makes others, before tests leave traces."""
    session.config.python = sys.executable
    if sys.platform != "linux" or not any("python" in item.fixturenames for item in session.items):
        return (yield)
    with tempfile.TemporaryDirectory() as folder, forks(Path(folder)):
        session.config.python = f"{folder}/python"
        return (yield)
