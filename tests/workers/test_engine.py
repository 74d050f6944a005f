"""Ray hands out portions: what fails is named, what dies is tried again, and the others go on."""

import os
import signal
import sys
from types import SimpleNamespace

import pytest

from sinklab.extras.ray import engine
from sinklab.lab.registry import engines

pytestmark = pytest.mark.slow


def squares(marks):
    """A beginning: 3 raises, 5 always ends its process, and 7 does so once."""

    def compute(portion):
        (number,) = portion
        mark = os.path.join(marks, "seven")
        if number == 3:
            raise RuntimeError("three is out of memory")
        if number == 5 or (number == 7 and not os.path.exists(mark)):
            open(mark, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        return number**2, os.environ.get("OMP_NUM_THREADS")

    return {"weights": "those"}, compute


@pytest.fixture(autouse=True)
def travels(ray):
    """Workers do not find this file."""
    from ray import cloudpickle

    cloudpickle.register_pickle_by_value(sys.modules[__name__])


def test_what_fails_is_named_and_the_others_are_done(tmp_path):
    found = {}
    with engines["ray"].started(2, 0) as pool, pytest.raises(ValueError) as caught:
        portions = [(number,) for number in range(8)]
        begin = lambda: squares(str(tmp_path))
        for portion, result in pool.results(begin, {"weights": "those"}, portions):
            assert portion not in found
            found[portion] = result
    assert found == {(number,): (number**2, "1") for number in (0, 1, 2, 4, 6, 7)}
    assert "2 of 8" in str(caught.value)
    assert "sample 3: RuntimeError: three is out of memory" in str(caught.value)
    assert "sample 5: ended its worker 3 times" in str(caught.value)


def test_a_worker_that_differs_is_refused_by_name(tmp_path):
    begin = lambda: squares(str(tmp_path))
    with engines["ray"].started(2, 0) as pool:
        with pytest.raises(ValueError, match="same weights .* has those, and this process others"):
            [*pool.results(begin, {"weights": "others"}, [(0,)])]
        with pytest.raises(ValueError, match="cannot start: ZeroDivisionError"):
            [*pool.results(lambda: 1 / 0, {}, [(0,)])]


def test_more_gpus_than_there_are_are_refused():
    with pytest.raises(ValueError, match="2 workers with 99 GPUs each need 198"):
        with engines["ray"].started(2, 99):
            pass


class FakeRay:
    """What the engine asks of Ray, at once: what becomes of each call is listed."""

    class exceptions:  # noqa: N801 (as in Ray)
        class RayError(Exception):
            preempted = False

    def __init__(self, ends):
        self.ends = iter(ends)
        self.calls = 0
        start = SimpleNamespace(remote=self.call)
        actor = SimpleNamespace(begin=start, compute=start)
        self.actor = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda: actor))

    def remote(self, _):
        return self.actor

    def put(self, value):
        return value

    def kill(self, actor):
        pass

    def call(self, *_):
        self.calls += 1
        return self.calls

    def wait(self, references, timeout):
        return references[:1], references[1:]

    def get(self, reference):
        end = next(self.ends)
        if isinstance(end, Exception):
            raise end
        return end


STARTED = (engine.code_facts(), "")


def death(*, preempted):
    error = FakeRay.exceptions.RayError("the node is gone")
    error.preempted = preempted
    return error


def test_a_preempted_node_uses_up_no_tries():
    ends = [STARTED, death(preempted=True)] * (engine.TRIES + 2) + [STARTED, ("done", "")]
    pool = engine.Ray(FakeRay(ends), 1, 0)
    assert [*pool.results(lambda: None, {}, [(0,)])] == [((0,), "done")]


def test_workers_that_die_at_the_start_end_it():
    pool = engine.Ray(FakeRay([death(preempted=False)] * engine.STARTS), 1, 0)
    with pytest.raises(ValueError, match="die while they start: the node is gone"):
        [*pool.results(lambda: None, {}, [(0,)])]


def test_after_an_assertion_on_a_gpu_another_worker_goes_on():
    broken = (None, "AcceleratorError: CUDA error: device-side assert triggered")
    fake = FakeRay([STARTED, broken, STARTED, ("done", "")])
    found = []
    with pytest.raises(ValueError, match="sample 0: .*device-side assert"):
        found.extend(engine.Ray(fake, 1, 0).results(lambda: None, {}, [(0,), (1,)]))
