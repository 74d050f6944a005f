"""Two processes at one benchmark score what one scores, and answer for one another after an interruption."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("lm_eval")

from test_harness_run import SETTINGS, run_toys

from sinklab.records import open_run

ROOT = Path(__file__).parents[2]
PROGRAM = """
import sys, torch
torch.set_num_threads(1)
from dataclasses import replace
from pathlib import Path
from test_harness_run import SETTINGS, evaluate, tiny_loaded, toy_tasks
folder, limit, resume = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "resume"
settings = replace(SETTINGS, limit=limit, resume=resume)
evaluate(settings, tiny_loaded(1), folder / "run", task_objects=toy_tasks(folder), progress=lambda text: print(text))
"""


def launch(folder: Path, limit: int, *, resume: bool = False) -> str:
    (folder / "program.py").write_text(PROGRAM, "utf-8")
    paths = os.pathsep.join(str(ROOT / part) for part in ("src", "tests", "tests/evaluation"))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command += [str(folder / "program.py"), str(folder), str(limit), "resume" if resume else "anew"]
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_two_processes_score_what_one_scores(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    alone = run_toys(tmp_path / "one", replace(SETTINGS, limit=5))
    printed = launch(tmp_path / "two", 5)
    assert "writing 3 answers" in printed, "the first process has the documents 0, 2 and 4, and alone speaks"
    assert "writing 2 answers" not in printed
    both = open_run(tmp_path / "two" / "run")
    assert both.info.status == "complete"
    assert both.info.settings == alone.info.settings
    for name in ("samples", "sinks", "scores"):
        one, other = alone.table(name), both.table(name)
        assert one["task"].tolist() == other["task"].tolist()
        numbers = one.select_dtypes("number")
        assert ((numbers - other[numbers.columns]).abs().fillna(0) < 1e-4).all().all(), name
    for column in ("task", "doc_id", "prompt", "response", "answer", "target", "right", "steps"):
        assert alone.table("samples")[column].tolist() == both.table("samples")[column].tolist()
    # one process goes on with what two have answered
    said: list[str] = []
    run_toys(tmp_path / "two", replace(SETTINGS, limit=5, resume=True), progress=said.append)
    assert said[0] == "writing 5 answers, 5 of them there already"
