"""launch/shards.slurm under what acts as Slurm: an array of workers that are killed, and another
array after it.
"""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from launched import PATIENCE
from sinklab.lab.cli.main import main
from sinklab.lab.records import open_run

ROOT = Path(__file__).parents[2]
SRUN = """#!/bin/bash
exec "$@"
"""


ASKED = ["trace", *(f"The sea {number}" for number in range(6)), "--new-tokens", "4", "--out"]


def array(python, folder, tasks, out):
    """The tasks of an array, as `sbatch --array` starts them."""
    environment = {
        **os.environ,
        "PATH": f"{folder}:{Path(python).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT / "src"),
        "SLURM_ARRAY_TASK_COUNT": str(len(tasks)),
    }
    running = {}
    for task in tasks:
        own = {"SLURM_ARRAY_TASK_ID": str(task), "SLURM_ARRAY_TASK_MIN": str(tasks[0])}
        with open(folder / f"{task}.log", "a") as log:
            command = ["bash", str(ROOT / "launch" / "shards.slurm"), *ASKED, out]
            running[task] = subprocess.Popen(
                command,
                env=environment | own,
                cwd=folder,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
    return running


@pytest.mark.slow
def test_an_array_of_workers_writes_what_the_command_writes(tmp_path, python):
    (tmp_path / "srun").write_text(SRUN)
    (tmp_path / "srun").chmod(0o755)
    assert main([*ASKED, str(tmp_path / "alone")]) == 0
    tasks = array(python, tmp_path, range(4, 6), "run")
    deadline = time.monotonic() + PATIENCE
    while not list((tmp_path / "run").glob("generations-*")):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    for task in tasks.values():
        # the nodes go down
        os.killpg(task.pid, signal.SIGKILL)
        task.wait()
    if (tmp_path / "run" / "run.json").exists():
        assert open_run(tmp_path / "run").info.status in ("running", "complete")
    for task, worker in array(python, tmp_path, range(2), "run").items():
        assert worker.wait(PATIENCE) == 0, (tmp_path / f"{task}.log").read_text()
    run, alone = open_run(tmp_path / "run"), open_run(tmp_path / "alone")
    assert run.info.status == "complete"
    assert run.info.files == alone.info.files
    assert not list((tmp_path / "run").glob(".*"))
    said = (tmp_path / "0.log").read_text() + (tmp_path / "1.log").read_text()
    assert said.count("next: sinklab report run") >= 1
