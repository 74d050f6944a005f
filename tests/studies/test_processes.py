"""Several processes at one study: their folders joined equal what one process writes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from sinklab.records import RunWriter, open_run
from sinklab.studies.processes import Processes, rank_folders
from sinklab.studies.trace.study import StudySettings, study
from tiny_diffusion import TEXT, tiny_loaded

ROOT = Path(__file__).parents[2]
SETTINGS = {
    "prompts": ("The old man", "The sea", "", "The boats", "The wind"),
    "new_tokens": 5,
    "block_length": None,
    "temperature": 1.0,
    "mask_sinks": (1,),
    "ks": (0, 1),
    "heldout_rows": 2,
    "heldout_length": 16,
}
PROGRAM = """
import json, sys, torch
torch.set_num_threads(1)
from sinklab.studies.trace.study import StudySettings, study
from tiny_diffusion import tiny_loaded
out, settings, resume = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3] == "resume"
print(study(tiny_loaded(1), out, StudySettings(**settings), progress=print, resume=resume), flush=True)
"""


def launch(folder: Path, settings: dict, *, resume: bool = False) -> subprocess.CompletedProcess:
    (folder / "program.py").write_text(PROGRAM, "utf-8")
    paths = os.pathsep.join(str(ROOT / part) for part in ("src", "tests"))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command += [str(folder / "program.py"), str(folder / "run"), json.dumps(settings), "resume" if resume else "anew"]
    return subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


@pytest.fixture
def settings(tmp_path: Path) -> dict:
    (tmp_path / "held.txt").write_text(TEXT * 20)
    return {**SETTINGS, "heldout": str(tmp_path / "held.txt")}


@pytest.mark.slow
def test_two_processes_write_what_one_writes(settings: dict, tmp_path: Path) -> None:
    done = launch(tmp_path, settings)
    assert done.returncode == 0, done.stderr
    stages = [line for line in done.stdout.splitlines() if "observation" in line]
    assert stages == [f"writing sample {number} of 5 under observation" for number in (1, 3, 5)], "one process speaks"
    assert done.stdout.count(str(tmp_path / "run")) == 2
    assert rank_folders(tmp_path / "run") == {}
    study(tiny_loaded(1), tmp_path / "alone", StudySettings(**settings))
    run, alone = open_run(tmp_path / "run"), open_run(tmp_path / "alone")
    assert run.info.status == "complete"
    assert run.info.parts == alone.info.parts
    assert (run.info.settings, run.info.model, run.info.seed) == (
        alone.info.settings,
        alone.info.model,
        alone.info.seed,
    )
    assert sorted(run.tables) == sorted(alone.tables)
    for name in run.tables:
        assert run.table(name).equals(alone.table(name)), name
    for part in alone.parts("attention"):
        for key, array in alone.arrays("attention", part=part).items():
            assert np.array_equal(run.array("attention", key, part=part), array, equal_nan=array.dtype.kind == "f")


@pytest.mark.slow
def test_processes_take_up_the_seed_and_resume_their_own_samples(settings: dict, tmp_path: Path) -> None:
    """A run of which one process was interrupted: what the others wrote is kept, and all samples are there at last."""
    settings = {
        **settings,
        "heldout": "",
        "seed": None,
        "prompts": settings["prompts"][:3],
        "mask_sinks": (),
        "twin": False,
    }
    study(tiny_loaded(1), tmp_path / "run", StudySettings(**settings))
    whole = open_run(tmp_path / "run")
    seed, texts = whole.info.seed, whole.table("generations")
    # as if the first process had been stopped before its second sample, and the join had not happened
    info = json.loads((tmp_path / "run" / "run.json").read_text())
    for rank, samples in ((0, [0]), (1, [1])):
        folder = tmp_path / f"run.rank{rank}"
        folder.mkdir()
        for sample in samples:
            for file in (tmp_path / "run").glob(f"*-{sample:04d}.*"):
                file.rename(folder / file.name)
        parts = dict.fromkeys(info["parts"], samples)
        status = "interrupted" if rank == 0 else "complete"
        (folder / "run.json").write_text(json.dumps({**info, "parts": parts, "status": status}))
    for file in (tmp_path / "run").iterdir():
        file.unlink()
    (tmp_path / "run").rmdir()
    with pytest.raises(ValueError, match="was started by 2 processes and is resumed by 1: use the same number"):
        study(tiny_loaded(1), tmp_path / "run", StudySettings(**settings), resume=True)
    done = launch(tmp_path, settings, resume=True)
    assert done.returncode == 0, done.stderr
    run = open_run(tmp_path / "run")
    assert (run.info.status, run.info.seed) == ("complete", seed)
    assert run.table("generations").equals(texts)


def test_samples_are_dealt_by_number(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert Processes.here() == Processes(0, 1)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    second = Processes.here()
    assert (second.is_first, second.share([1, 2, 4, 7]), second.share(range(3))) == (False, [1, 4, 7], [1])
    assert second.folder(tmp_path / "run") == tmp_path / "run.rank1"
    assert Processes(0, 1).folder(tmp_path / "run") == tmp_path / "run"
    assert Processes(0, 1).agreed("value") == "value"
    monkeypatch.setenv("RANK", "3")
    with pytest.raises(ValueError, match="RANK must be a number below WORLD_SIZE, but they are '3' and '3'"):
        Processes.here()


def test_folders_that_are_taken_or_begun_otherwise_are_refused(tmp_path: Path) -> None:
    out = tmp_path / "run"
    several = Processes(0, 2)
    assert several._missing(out, 3, resume=False) == [0, 1, 2]
    (out).mkdir()
    (out / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"run is taken; choose another folder, or continue the run that is there"):
        several._missing(out, 3, resume=False)
    (tmp_path / "left.rank1").mkdir()
    (tmp_path / "left.rank1" / "run.json").write_text("{}")
    for processes in (several, Processes(0, 1)):
        with pytest.raises(ValueError, match=r"left\.rank1 is taken"):
            processes._missing(tmp_path / "left", 3, resume=False)
    # killed in their first writes: the first process wrote its run.json, the second half of one
    (tmp_path / "killed.rank1").mkdir()
    (tmp_path / "killed.rank1" / ".run.json.part").write_text("{")
    assert Processes(0, 1)._missing(tmp_path / "killed.rank1", 3, resume=False) == [0, 1, 2]
    with RunWriter(tmp_path / "killed.rank0", kind="study", model={}, settings={}, seed=0):
        pass
    assert several._missing(tmp_path / "killed", 3, resume=True) == [0, 1, 2]
    with pytest.raises(ValueError, match="killed was started by 2 processes and is resumed by 1: use the same number"):
        Processes(0, 1)._missing(tmp_path / "killed", 3, resume=True)
    quick = StudySettings(
        prompts=("The sea",), new_tokens=3, block_length=None, mask_sinks=(), statistics=(), heldout=""
    )
    study(tiny_loaded(), tmp_path / "one", quick)
    assert several._missing(tmp_path / "one", 1, resume=True) == []
    with pytest.raises(ValueError, match="one was started by 1 processes and is resumed by 2: use the same number"):
        several._missing(tmp_path / "one", 2, resume=True)
    assert Processes(0, 1)._missing(tmp_path / "one", 2, resume=True) == [1]
