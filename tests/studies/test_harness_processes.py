"""Two processes at one benchmark score what one scores, and answer for one another after an interruption."""

import os
import socket
import subprocess
import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

pytest.importorskip("lm_eval")

import torch.distributed as dist
from test_harness_run import SETTINGS, run_toys

from sinklab.records import open_run
from sinklab.studies import processes

ROOT = Path(__file__).parents[2]
PROGRAM = """
import sys, torch
torch.set_num_threads(1)
from dataclasses import replace
from pathlib import Path
from test_harness_run import SETTINGS, run_toys
run_toys(Path(sys.argv[1]), replace(SETTINGS, limit=5), progress=print)
"""


def run_two(first: Path, second: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], str]:
    """What the first process, which is this one, tells, and what the second prints. Their task files lie apart."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    both = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    paths = os.pathsep.join(str(ROOT / part) for part in ("src", "tests", "tests/studies"))
    other = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(second)],
        env={**os.environ, **both, "RANK": "1", "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    said: list[str] = []
    monkeypatch.setattr(processes, "PATIENCE", timedelta(minutes=10))
    try:
        with monkeypatch.context() as here:
            for name, value in {**both, "RANK": "0"}.items():
                here.setenv(name, value)
            run_toys(first, replace(SETTINGS, limit=5), progress=said.append)
        if dist.is_initialized():
            dist.destroy_process_group()
        printed, errors = other.communicate(timeout=600)
    finally:
        other.kill()
        other.wait()
    assert other.returncode == 0, errors
    return said, printed


@pytest.mark.slow
def test_two_processes_score_what_one_scores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("one", "two", "three"):
        (tmp_path / name).mkdir()
    # one run folder for both
    (tmp_path / "two" / "run").mkdir()
    (tmp_path / "three" / "run").symlink_to(tmp_path / "two" / "run")
    alone = run_toys(tmp_path / "one", replace(SETTINGS, limit=5))
    said, printed = run_two(tmp_path / "two", tmp_path / "three", monkeypatch)
    assert said[0] == "writing 3 answers", "the first process has the documents 0, 2 and 4"
    assert "writing" not in printed, "the first process alone speaks"
    both = open_run(tmp_path / "two" / "run")
    assert both.info.status == "complete"
    assert both.info.settings == alone.info.settings
    assert {path.name for path in both.path.glob("requests-*.jsonl")} == {"requests-0.jsonl", "requests-1.jsonl"}
    for name in ("samples", "sinks", "scores"):
        one, other = alone.table(name), both.table(name)
        assert one["task"].tolist() == other["task"].tolist()
        numbers = one.select_dtypes("number")
        assert ((numbers - other[numbers.columns]).abs().fillna(0) < 1e-4).all().all(), name
    for column in ("task", "doc_id", "prompt", "response", "answer", "target", "right", "steps"):
        assert alone.table("samples")[column].tolist() == both.table("samples")[column].tolist()
    # one process goes on with what two have answered
    said = []
    run_toys(tmp_path / "two", replace(SETTINGS, limit=5, resume=True), progress=said.append)
    assert said[0] == "writing 5 answers, 5 of them there already"
