"""Shards of one study: the folder that they share equals what one process writes."""

import json
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from refusals import refused
from sinklab.lab.records import open_run
from sinklab.lab.studies.settings import shard_of
from sinklab.lab.studies.trace import run as observation
from sinklab.lab.studies.trace.study import StudySettings, study
from small_runs import contents, difference
from tiny_diffusion import tiny_loaded

SETTINGS = StudySettings(
    prompts=("The old man", "The sea", "", "The boats", "The wind"),
    new_tokens=3,
    block_length=None,
    temperature=1.0,
    twin=False,
)
QUICK = replace(SETTINGS, prompts=("The sea",), temperature=0.0, statistics=())


@pytest.mark.slow
def test_a_run_that_was_cut_short_goes_on_in_shards(monkeypatch):
    """Whoever is there writes what is missing of its own; the seed is that of the run."""
    monkeypatch.setattr(observation, "SAMPLES", 1)
    shards = 3
    study(tiny_loaded(1), "whole", SETTINGS)
    whole = contents(Path("whole"))
    info = json.loads(Path("whole/run.json").read_text())
    # as if all had been killed: three of five samples are there, one of them is damaged, another
    # one is not listed
    out = Path(shutil.copytree("whole", "run"))
    files = {file: one for file, one in info["files"].items() if not re.search("-000[24]", file)}
    (out / "run.json").write_text(json.dumps({**info, "files": files, "status": "running"}))
    with open(out / "tokens-0001.parquet", "rb+") as file:
        file.seek(100)
        file.write(b"damage")
    for file in out.glob("*-0002.*"):
        file.unlink()
    said = []

    def write(place):
        shard = f"{place}/{shards}"
        return study(tiny_loaded(1), out, SETTINGS, shard=shard, progress=said.append)

    with ThreadPoolExecutor(shards) as pool:
        assert [*pool.map(write, range(shards))] == [out] * shards
    assert sorted(text for text in said if text.startswith("writing")) == [
        f"writing sample {number} of 5" for number in (2, 3, 5)
    ]
    assert difference(out, whole) == ""
    assert not list(out.glob(".*"))


def test_shards_are_counted_from_zero():
    assert (shard_of(None), shard_of("2/5")) == ((0, 1), (2, 5))
    for wrong in ("5/5", "1", "", "a/b", "-1/2", "1/2/3"):
        refused("--shard is i/n with i from 0", shard_of, wrong)


def test_shards_come_into_a_folder_of_their_run_and_of_no_other():
    Path("notes").mkdir()
    Path("notes/notes.txt").write_text("mine")
    refused(r"notes.txt and no run.json", study, tiny_loaded(), "notes", QUICK, shard="1/2")
    study(tiny_loaded(), "run", QUICK, shard="1/2")
    assert open_run("run").info.status == "running", "the one sample is of the other shard"
    study(tiny_loaded(), "run", QUICK, shard="0/2")
    before = open_run("run").info
    assert before.status == "complete"
    study(tiny_loaded(), "run", QUICK, shard="1/2")
    assert open_run("run").info == before
    other = replace(QUICK, new_tokens=4)
    refused(r"settings\['new_tokens'\] is 3", study, tiny_loaded(), "run", other, shard="0/2")
    refused(r"\['weights_sha256'\]", study, tiny_loaded(seed=3), "run", QUICK)
