"""The engine's bookkeeping, with what Ray answers listed; tests/workers/test_workers.py has Ray."""

import pickle
from types import SimpleNamespace

import pytest

from sinklab.extras.ray import engine
from sinklab.lab.studies import Progress


class FakeRay:
    """What the engine asks of Ray, answered at once from a list of results and errors."""

    class exceptions:
        class RayError(Exception):
            pass

    cloudpickle = SimpleNamespace(dumps=repr)

    def __init__(self, *ends):
        self.ends = iter(ends)
        self.calls = 0
        self.killed = []
        method = SimpleNamespace(remote=self.call)
        self.actor = SimpleNamespace(error=method, compute=method)

    def remote(self, _):
        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda _: self.actor))

    def kill(self, actor, no_restart=True):
        self.killed.append(no_restart)

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


STARTED, DONE = (None, ""), ("done", "")
BROKEN = None, "AcceleratorError: CUDA error: device-side assert triggered"
DEATH = FakeRay.exceptions.RayError("the process is gone\nand more")


def results(ray, samples=2):
    portions = [(number,) for number in range(samples)]
    return engine.Ray(ray, 1, 0).results(lambda: None, {}, Progress(), portions)


@pytest.mark.parametrize(
    ("end", "said"),
    [
        (DEATH, "sample 0: its worker died: the process is gone$"),
        ((None, "RuntimeError: full"), "sample 0: RuntimeError: full"),
        (BROKEN, "sample 0: AcceleratorError: .*device-side assert"),
    ],
)
def test_what_fails_is_named_and_the_others_go_on(end, said):
    found, ray = [], FakeRay(STARTED, end, DONE)
    with pytest.raises(ValueError, match=f"1 of 2 portions failed.* {said}"):
        found.extend(results(ray))
    assert found == [((1,), "done")]
    # after an assertion on a GPU a worker can do no more
    assert ray.killed == [False] * (end is BROKEN) + [True]


@pytest.mark.parametrize("end", [DEATH, (None, "a worker cannot start: no model")])
def test_a_worker_that_does_not_start_ends_it(end):
    with pytest.raises(ValueError, match=r"^(its worker died: the process|a worker cannot start)"):
        [*results(FakeRay(end))]


def begun():
    return {"weights": "those"}, str


@pytest.mark.parametrize("weights", ["those", "others"])
def test_a_worker_computes_if_it_has_the_same_weights(weights):
    given = engine.surroundings(), pickle.dumps(begun), {"weights": weights}
    worker = engine.Worker(given)
    result, error = worker.compute((0,))
    if weights == "those":
        assert (result, error) == ("(0,)", "")
    else:
        assert result is None and "same weights everywhere, but this worker has those" in error


@pytest.mark.parametrize("workers, gpus", [(0, 0), (-2, 0), (1, -1)])
def test_numbers_that_make_no_sense_are_refused(workers, gpus):
    with pytest.raises(ValueError, match="1 or more"), engine.Ray.started(workers, gpus):
        pass
