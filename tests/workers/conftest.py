"""One Ray for all tests of a session, small."""

import importlib.util

import pytest

from sinklab.lab.registry import engines


@pytest.fixture(scope="session")
def ray():
    # Ray reads its environment when it is imported
    if importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sinklab.extras.ray.engine.IN_FLIGHT", 150_000_000)
        with engines["ray"].started(2, 0):
            yield
