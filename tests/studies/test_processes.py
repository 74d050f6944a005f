"""Several workers at one study: the folder that they share equals what one writes."""

import json
import os
import re
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from launched import torchrun
from refusals import refused
from sinklab.lab.records import leases, open_run
from sinklab.lab.records.leases import Claims
from sinklab.lab.studies.processes import Processes, Units
from sinklab.lab.studies.trace.study import StudySettings, study
from small_runs import contents, difference
from tiny_diffusion import tiny_loaded

SETTINGS = {
    "prompts": ("The old man", "The sea", "", "The boats", "The wind"),
    "new_tokens": 3,
    "block_length": None,
    "temperature": 1.0,
    "mask_sinks": (1,),
}
PROGRAM = """
import json, sys, torch
torch.set_num_threads(1)
from sinklab.lab.studies.trace.study import StudySettings, study
from tiny_diffusion import tiny_loaded
out, settings = sys.argv[1], json.loads(sys.argv[2])
done = study(tiny_loaded(1), out, StudySettings(**settings), progress=print)
print(done, flush=True)
"""


@pytest.mark.slow
def test_two_processes_write_what_one_writes(python):
    program, given = Path("program.py"), json.dumps(SETTINGS)
    program.write_text(PROGRAM, "utf-8")
    done = torchrun(python, program, "run", given)
    assert done.returncode == 0, done.stderr
    stages = [line for line in done.stdout.splitlines() if "observation" in line]
    # on a busy machine the one that speaks may come too late for any sample
    assert len(set(stages)) == len(stages) <= 5, (
        "one process speaks, of samples that nobody else has"
    )
    assert done.stdout.splitlines().count("run") == 2
    study(tiny_loaded(1), "alone", StudySettings(**SETTINGS))
    assert difference(Path("run"), contents(Path("alone"))) == ""


@pytest.mark.slow
def test_a_run_of_two_goes_on_with_one_or_three_workers():
    """Whoever is there writes what is missing, without waiting for those who began; the seed is
    that of the run.
    """
    settings = {**SETTINGS, "seed": None, "mask_sinks": (), "twin": False}
    study(tiny_loaded(1), "whole", StudySettings(**settings))
    whole = contents(Path("whole"))
    info = json.loads(Path("whole/run.json").read_text())
    for world in (1, 3):
        # as if both had been killed: three of five samples are there, one of them is damaged,
        # another one has no list
        out = Path(shutil.copytree("whole", f"run-{world}"))
        parts = {name: [0, 1, 3] for name in info["parts"]}
        sums = {
            file: one for file, one in info["checksums"].items() if not re.search("-000[24]", file)
        }
        text = json.dumps({**info, "parts": parts, "checksums": sums, "status": "running"})
        (out / "run.json").write_text(text)
        with open(out / "tokens-0001.parquet", "rb+") as file:
            file.seek(100)
            file.write(b"damage")
        for file in out.glob("*-0002.*"):
            file.unlink()
        said = []
        workers = [Processes.here(f"{rank}/{world}") for rank in range(world)]
        with ThreadPoolExecutor(world) as pool:
            how = {"resume": True, "progress": said.append}
            jobs = [
                pool.submit(
                    study, tiny_loaded(1), out, StudySettings(**settings), worker=worker, **how
                )
                for worker in workers
            ]
            assert [job.result() for job in jobs] == [out] * world
        assert sorted(text for text in said if "observation" in text) == [
            f"writing sample {number} of 5 under observation" for number in (2, 3, 5)
        ]
        # one that comes after the end finishes what is there once more
        assert any(worker.finished for worker in workers)
        assert difference(out, whole) == ""
        assert not list(out.glob(".*"))


def test_workers_are_named_by_the_command_or_the_environment(monkeypatch):
    assert Processes.here() == Processes(0, 1)
    assert Processes.here("2/5") == Processes(2, 5, joins=True)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    second = Processes.here()
    assert second == Processes(1, 3, joins=True)
    assert not second.is_first
    assert second.ordered([0, 1, 2, 3, 4, 7]) == [4, 7, 0, 1, 2, 3], (
        "its own four in a row first, then those of the others"
    )
    assert Processes().ordered([2, 0, 1]) == [0, 1, 2]
    monkeypatch.setenv("RANK", "3")
    refused("number below WORLD_SIZE", Processes.here)
    for wrong in ("5/5", "1", "", "a/b", "-1/2", "1/2/3"):
        refused("--shard is i/n with i from 0", Processes.here, wrong)


QUICK = StudySettings(
    prompts=("The sea",),
    new_tokens=3,
    block_length=None,
    mask_sinks=(),
    statistics=(),
    twin=False,
)


def test_workers_come_into_a_folder_of_their_run_and_of_no_other():
    Path("notes").mkdir()
    Path("notes/notes.txt").write_text("mine")
    worker = Processes.here("1/2")
    refused(r"notes.txt but no run.json", study, tiny_loaded(), "notes", QUICK, worker=worker)
    refused("notes is taken; choose another", study, tiny_loaded(), "notes", QUICK)
    study(tiny_loaded(), "run", QUICK, worker=Processes.here("0/2"))
    before = open_run("run").info
    study(tiny_loaded(), "run", QUICK, worker=worker)
    assert open_run("run").info == before
    refused(
        r"settings\['new_tokens'\] is 3",
        study,
        tiny_loaded(),
        "run",
        replace(QUICK, new_tokens=4),
        worker=worker,
    )
    refused(
        r"share its seed.*\(--seed\)",
        study,
        tiny_loaded(),
        "drawn",
        replace(QUICK, seed=None),
        worker=worker,
    )
    assert not Path("drawn").exists()


def test_units_are_done_once_and_those_of_the_dead_again(monkeypatch):
    """One worker stops in the middle of a unit: the others do all the rest, and that one when it
    counts as gone.
    """
    done, given, together = set(), [], threading.Barrier(3)

    class Clock:
        """The dead worker counts as gone once everything else is done."""

        sleep = staticmethod(time.sleep)

        @staticmethod
        def monotonic():
            return 0.0 if len(done) < 29 else 2 * leases.EXPIRY

    monkeypatch.setattr(leases, "time", Clock)

    def work(rank):
        claims = Claims(Path())
        assert not claims.is_held("unit-4"), "nobody knows yet"
        # all have seen it, and all have a unit, before one can have done the rest
        together.wait()
        with Units(claims, Processes(rank, 3).ordered(range(30)), done.__contains__) as units:
            assert len(units) == 30
            for number, unit in enumerate(units):
                given.append((rank, unit))
                if number == 0:
                    together.wait()
                done.add(unit)

    dead = Claims(Path()).take("unit-4")
    assert dead is not None
    # it says nothing any more, and its machine is another one
    dead._ends.set()
    os.pwrite(dead._file, b"another-kernel holder host 00000009\n", 0)
    with ThreadPoolExecutor(3) as pool:
        for job in [pool.submit(work, rank) for rank in range(3)]:
            job.result()
    assert sorted(unit for _, unit in given) == list(range(30))
    assert given[-1][1] == 4, "it was waited for, and everything else came first"
    assert {rank for rank, _ in given} == {0, 1, 2}
    os.close(dead._file)
    assert not Path(".claims").exists()


def test_a_world_without_a_rank_is_no_launch(monkeypatch):
    """Interactive shells of Slurm set WORLD_SIZE alone; the command waited for workers there."""
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    here = Processes.here()
    assert (here.rank, here.world, here.joins) == (0, 1, False)
