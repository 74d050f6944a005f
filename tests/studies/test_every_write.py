"""Runs of every kind, killed or made to fail where they write; workers that are killed and followed
by others.
"""

import importlib.util
import json

import pytest

from launched import launch

pytestmark = pytest.mark.ring("lab")

# shares of its write steps at which a run is killed, and made to fail. Each kill of the run that
# does nothing but what all studies do; of the others draws that are always the same, and each step
# in benchmarks/kills.py --every-write
SHARES = {
    "units": (1.0, 0.25),
    "trace": (0.02, 0.005),
    "curve": (0.02, 0.01),
    "train": (0.009, 0.001),
    "report": (0.05, 0.03),
}
WITH_HARNESS = {"eval": (0.1, 0.1), "table1": (0.01, 0.002)}


def told(python, module, *arguments):
    """What `main` of a module of tests prints; it forks, which this process must not."""
    done = launch(python, "-c", f"import sys, {module} as it; it.main(*sys.argv[1:])", *arguments)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_a_run_killed_or_failed_at_a_write_goes_on_to_the_same_end(tmp_path, python):
    """All kinds in one process, which has imported what they need."""
    harness = WITH_HARNESS if importlib.util.find_spec("lm_eval") else {}
    shares = SHARES | harness
    found = told(
        python,
        "small_runs",
        tmp_path,
        *(f"{kind}={kills},{fails}" for kind, (kills, fails) in shares.items()),
    )
    assert {kind: one["wrong"] for kind, one in found.items()} == {kind: [] for kind in shares}
    assert found["units"]["tried"] > 20 and all(one["tried"] for one in found.values()), found


@pytest.mark.slow
def test_workers_that_are_killed_are_followed_by_others_in_other_numbers(tmp_path, python):
    """What comes out is the same to the last bit, however many did it: batches do not depend on who
    makes them.
    """
    kinds = ["sleeping", "trace", *(["eval"] if importlib.util.find_spec("lm_eval") else [])]
    for found in told(python, "scheduler", tmp_path, 0, *kinds):
        assert found["apart"] == [], found["log"]
        assert len(set(found["workers"])) == 3
        assert any(-9 in ends for ends in found["ends"]), f"somebody was killed: {found}"
        assert set(found["ends"][-1]) == {0}, found["log"]
