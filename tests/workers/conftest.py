"""One Ray for all tests of a session, small."""

import pytest

from sinklab.lab.registry import engines


@pytest.fixture(scope="session")
def ray():
    pytest.importorskip("ray")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sinklab.extras.ray.engine.IN_FLIGHT", 150_000_000)
        with engines["ray"].started(2, 0):
            yield
