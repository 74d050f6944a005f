"""Runs of every kind, killed or made to fail where they write."""

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
WITH_HARNESS = {"eval": (0.1, 0.1)}


@pytest.mark.slow
def test_a_run_killed_or_failed_at_a_write_goes_on_to_the_same_end(tmp_path, python):
    """All kinds in one process, which has imported what they need."""
    harness = WITH_HARNESS if importlib.util.find_spec("lm_eval") else {}
    shares = SHARES | harness
    asked = [f"{kind}={kills},{fails}" for kind, (kills, fails) in shares.items()]
    # it forks, which this process must not
    code = "import sys, small_runs; small_runs.main(*sys.argv[1:])"
    done = launch(python, "-c", code, tmp_path, *asked)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {kind: one["wrong"] for kind, one in found.items()} == {kind: [] for kind in shares}
    assert found["units"]["tried"] > 20 and all(one["tried"] for one in found.values()), found
