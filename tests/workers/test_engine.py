"""The engine's bookkeeping, with what Ray answers listed; tests/workers/test_workers.py has Ray."""

from types import SimpleNamespace

import pytest

from sinklab.extras.ray import engine
from sinklab.lab.studies import Progress


class FakeRay:
    """What the engine asks of Ray, answered at once from a list of results and errors."""

    class exceptions:
        class RayError(Exception):
            preempted = False

    cloudpickle = SimpleNamespace(dumps=repr)

    def __init__(self, *ends):
        self.ends = iter(ends)
        self.calls = 0
        method = SimpleNamespace(remote=self.call)
        self.actor = SimpleNamespace(begin=method, compute=method)

    def remote(self, _):
        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda: self.actor))

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


STARTED = engine.code_facts() | {"weights": "those"}, ""
DONE = "done", ""
BROKEN = None, "AcceleratorError: CUDA error: device-side assert triggered"


def death(*, preempted=False):
    error = FakeRay.exceptions.RayError("the process is gone\nand more")
    error.preempted = preempted
    return error


def results(*ends, samples=1, weights="those"):
    portions = [(number,) for number in range(samples)]
    pool = engine.Ray(FakeRay(*ends), 1, 0)
    return pool.results(lambda: None, {"weights": weights}, Progress(), portions)


def test_a_portion_whose_worker_dies_is_tried_again():
    assert [*results(STARTED, death(), STARTED, DONE)] == [((0,), "done")]


def test_a_preempted_node_uses_up_no_tries():
    taken = [STARTED, death(preempted=True)] * (engine.TRIES + 2)
    assert [*results(*taken, STARTED, DONE)] == [((0,), "done")]


@pytest.mark.parametrize(
    ("ends", "said"),
    [
        ([STARTED, death()] * engine.TRIES + [STARTED, DONE], "sample 0: ended its worker 3 times"),
        ([STARTED, (None, "RuntimeError: full"), DONE], "sample 0: RuntimeError: full"),
        # it computes nothing more
        ([STARTED, BROKEN, STARTED, DONE], "sample 0: AcceleratorError: .*device-side assert"),
    ],
)
def test_what_fails_is_named_and_the_others_go_on(ends, said):
    found = []
    # of two portions the second waits until the first failed, but where that waits again
    if "ended" in said:
        ends = [STARTED, death(), STARTED, DONE, *[death(), STARTED] * 2]
    with pytest.raises(ValueError, match=f"1 of 2 portions failed.* {said}"):
        found.extend(results(*ends, samples=2))
    assert found == [((1,), "done")]


@pytest.mark.parametrize(
    ("ends", "weights", "said"),
    [
        ([death()] * engine.STARTS, "those", "die while they start: the process is gone$"),
        ([(None, "ValueError: no model")], "those", "a worker cannot start: ValueError: no model"),
        ([STARTED], "others", "same weights .* a worker has those, and this process others"),
    ],
)
def test_a_worker_that_does_not_start_or_differs_ends_it(ends, weights, said):
    with pytest.raises(ValueError, match=said):
        [*results(*ends, weights=weights)]


@pytest.mark.parametrize("workers, gpus", [(0, 0), (-2, 0), (1, -1)])
def test_numbers_that_make_no_sense_are_refused(workers, gpus):
    with pytest.raises(ValueError, match="1 or more"), engine.Ray.started(workers, gpus):
        pass
