"""Ideas of three readers who had ARCHITECTURE and five files (`benchmarks/readers/`): they run, and
hold what the package relies on.
"""

import subprocess

import pytest

from launched import ROOT

FILES = sorted((ROOT / "benchmarks" / "readers").glob("reader_*.py"))


@pytest.mark.slow
@pytest.mark.ring("lab")
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_the_ideas_of_a_reader_hold(file, python):
    given = [python, "-m", "sinklab", "check", str(file)]
    done = subprocess.run(given, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(": holds") == 5, done.stdout


def test_there_are_three():
    assert len(FILES) == 3
