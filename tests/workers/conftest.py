"""One Ray for all tests of a session, small."""

import contextlib
import importlib.util
import sys

import pytest

from sinklab.lab.files import PLUGIN
from sinklab.lab.registry import engines


@pytest.fixture(autouse=True)
def no_plugins(monkeypatch):
    """Runs name the plug-ins of their process, and other tests loaded some."""
    for name in [name for name in sys.modules if name.startswith(PLUGIN)]:
        monkeypatch.delitem(sys.modules, name)


@pytest.fixture(scope="session")
def ray(python):
    # Ray reads its environment when it is imported
    if importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed")
    with contextlib.ExitStack() as last:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("sinklab.extras.ray.engine.IN_FLIGHT", 150_000_000)
            # its workers are those of this Python: forks, which import little
            patch.setattr(sys, "executable", python)
            last.enter_context(engines["ray"].started(2, 0))
        yield
