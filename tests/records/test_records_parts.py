"""Runs that are written in parts, by one process or several, and go on after an interruption."""

import re
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from launched import launch
from refusals import refused
from sinklab.lab.records import Arrays, Contents, RunWriter, open_run

DIMS = {"received": ("step", "key"), "visible": ("step",)}
RUN = {
    "kind": "study",
    "model": {"name": "m", "layers": 2},
    "settings": {"rule": "random", "texts": ["a", "b"]},
    "seed": 3,
    "samples": 12,
}


def contents(sample, keys=3):
    visible = np.array([2049.0, 1.0], np.float32)
    values = {"received": np.full((2, keys), sample + 1 / 3), "visible": visible}
    arrays = {"attention": Arrays(values, DIMS)}
    return Contents({"tokens": {"sample": [sample] * 2, "text": ["a", f"{sample}"]}}, arrays)


def sample(run, part, keys=3):
    run.write(part, {part: contents(part, keys)})


def write(path, parts=range(12), **changes):
    with RunWriter(path, **(RUN | changes)) as run:
        for part in parts:
            sample(run, part, keys=3 + part)
    return open_run(path)


def written(run):
    """The texts of the parts, one behind the other."""
    return ",".join(run.table("tokens")["text"])


def test_samples_are_read_together_or_one_by_one():
    with RunWriter("run", **RUN, part_size=5) as run:
        assert run.missing == [0, 1, 2]
        for part in (2, 0):
            some = run.info.part(part)
            run.write(part, {one: contents(one, keys=3 + one) for one in some})
        assert run.missing == [1]
        run.write(1, {one: contents(one) for one in run.info.part(1)})
        run.table("heldout", {"k": [0, 1]})
    run = open_run("run")
    assert {path.name for path in Path("run").iterdir()} == {
        "run.json",
        "heldout.parquet",
        *(f"tokens-000{part}.parquet" for part in range(3)),
        *(f"attention-000{part}.safetensors" for part in range(3)),
    }
    assert run.tables == ("heldout", "tokens") and run.array_files == ("attention",)
    assert written(run) == ",".join(f"a,{one}" for one in range(12))
    assert run.table("tokens").index.tolist() == [*range(24)]
    assert run.table("tokens", 2)["sample"].tolist() == [2, 2]
    assert run.arrays("attention", 11)["received"].shape == (2, 14)
    received = run.array("attention", "received", 2)
    assert received.tolist() == [[2 + 1 / 3] * 5] * 2
    assert run.array("attention", "visible", 2).tolist() == [2049.0, 1.0]
    assert run.dims("attention", 0) == DIMS
    assert run.has("attention", 3) and not run.has("heldout", 3)
    # readable with pandas alone
    assert pd.read_parquet("run/tokens-0002.parquet")["text"].tolist() == ["a", "10", "a", "11"]


def test_wrong_samples_are_named():
    run = write("run", samples=3, parts=range(3))
    refused("no sample 7 of 'tokens'", run.table, "tokens", 7)
    refused("is 'attend'; did you mean", run.arrays, "attend", 0)
    refused("no array 'recieved'", run.array, "attention", "recieved", 0)
    refused("is 'token'; did you mean 'tokens'", run.table, "token")


KILLED = """
import os, signal, sys
from sinklab.lab.records import RunWriter
setattr(os, sys.argv[2], lambda *_: os.kill(os.getpid(), signal.SIGKILL))
with RunWriter(sys.argv[1], kind="study", model={}, settings={}, seed=0):
    pass
"""


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_run_killed_in_its_very_first_write_begins_anew(tmp_path, python, call):
    killed = launch(python, "-c", KILLED, "killed", call)
    assert killed.returncode == -9, killed.stderr
    # locks, and where there was a byte to be written, the half of a file
    left = {path.name.rpartition(".")[2] for path in Path("killed").iterdir()}
    assert left == {"lock", "part"}
    for number, how in enumerate(({}, {"overwrite": True})):
        path = shutil.copytree("killed", tmp_path / f"run-{number}")
        with RunWriter(path, **RUN | {"samples": 1}, **how) as run:
            sample(run, 0)
        assert open_run(path).info.status == "complete"
        assert not list(path.glob(".*"))


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_folder_of_other_files_is_refused_with_all_that_is_in_it(tmp_path, overwrite):
    for name in (".run.json.part", "notes.txt"):
        (tmp_path / name).write_text("mine")
    writer = RunWriter(tmp_path, **RUN, overwrite=overwrite)
    refused("is taken: it holds notes.txt and no run.json", writer.__enter__)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".run.json.part", "notes.txt"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": 4}, "seed is 3, and now it is 4"),
        ({"settings": {"texts": ["a", "b"]}}, "settings['rule'] is"),
        ({"settings": {"rule": "random", "texts": ["a", "c"]}}, "['texts'][1] is 'b'"),
        ({"model": {"name": "n", "layers": 2}}, "model['name'] is"),
        ({"kind": "training"}, "kind is"),
    ],
)
def test_another_run_cannot_be_continued(changes, message):
    """The first difference is named, also within a long list."""
    write("run")
    refused(re.escape(message), RunWriter("run", **RUN | changes).__enter__)
    # what was there is untouched
    assert open_run("run").info.status == "complete"


def test_a_plugin_that_has_changed_cannot_go_on(monkeypatch):
    path = Path("mine.py")
    monkeypatch.setattr("sinklab.lab.records.writing.plugins", lambda: [path])
    path.write_text("1")
    write("run", parts=range(6))
    write("run", parts=range(6, 12))
    path.write_text("2")
    refused("plug-in mine.py has changed since run was begun", write, "run")
    monkeypatch.undo()
    assert write("run", ()).info.status == "complete", "where it is not loaded, nothing is said"


def test_a_run_or_a_shard_of_it_has_one_writer():
    with RunWriter("run", **RUN, shard=(0, 2)) as run:
        sample(run, 0)
        for how in ({}, {"overwrite": True}, {"shard": (0, 2)}):
            other = RunWriter("run", **RUN, **how)
            refused("run is being written by another one", other.__enter__)
        Path("run/.tokens-0002.parquet.00000000.part").write_bytes(b"half")
        with RunWriter("run", **RUN, shard=(1, 2)) as other:
            assert other.info.parts == [0]
            sample(other, 1)
        assert Path("run/.tokens-0002.parquet.00000000.part").exists(), "somebody may be writing it"
        assert run.refresh().parts == [0, 1]
    # the locks of those that were killed hold nobody up
    (Path("run") / ".lock").touch()
    with RunWriter("run", **RUN) as run:
        for part in run.missing:
            sample(run, part)
    assert not list(Path("run").glob(".*"))
