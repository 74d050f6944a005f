"""Runs of every kind, killed or made to fail where they write; workers that are killed and followed by others."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parents[1]
# of the run that does nothing but what all studies do, each step; of the others some, and all in benchmarks/kills.py
SOME = {"units": None, "trace": 8, "curve": 5, "battery": 4, "probe": 4, "caches": 4, "train": 5}
WITH_HARNESS = {"eval": 3, "table1": 4}


def told(script: str, *arguments: Any) -> Any:
    """What a script of tests prints; it forks, which this process must not."""
    done = subprocess.run(
        [sys.executable, str(TESTS / script), *map(str, arguments)],
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(TESTS.parent / "src"), str(TESTS)]),
        },
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("kind", SOME)
def test_a_run_killed_or_failed_at_a_write_goes_on_to_the_same_end(kind: str, tmp_path: Path) -> None:
    found = told("small_runs.py", kind, tmp_path, *([SOME[kind]] if SOME[kind] else []))
    assert found["wrong"] == []
    assert found["tried"] > (SOME[kind] or 100) // 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", WITH_HARNESS)
def test_a_benchmark_killed_or_failed_at_a_write_goes_on_to_the_same_end(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    found = told("small_runs.py", kind, tmp_path, WITH_HARNESS[kind])
    assert found["wrong"] == []
    assert found["tried"] > WITH_HARNESS[kind] // 2


@pytest.mark.slow
def test_a_report_killed_or_failed_at_a_write_is_written_again(tmp_path: Path) -> None:
    assert told("small_runs.py", "report", tmp_path, 2)["wrong"] == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sleeping", "trace", "eval"])
def test_workers_that_are_killed_are_followed_by_others_in_other_numbers(kind: str, tmp_path: Path) -> None:
    """What comes out is the same to the last bit, however many did it: batches do not depend on who makes them."""
    if kind == "eval":
        pytest.importorskip("lm_eval")
    found = told("scheduler.py", kind, tmp_path, 0)
    assert found["apart"] == [], found["log"]
    assert len(set(found["workers"])) == 3
    assert any(-9 in ends for ends in found["ends"]), "somebody was killed"
    assert set(found["ends"][-1]) == {0}, found["log"]
