"""Runs that are written in parts, by one process or several, and go on after an interruption."""

import json
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from launched import launch
from refusals import refused
from sinklab.lab.records import RunWriter, open_run
from sinklab.lab.records.reading import lost_files

DIMS = {"received": ("step", "key"), "visible": ("step",)}
RUN = {
    "kind": "study",
    "model": {"name": "m", "layers": 2},
    "settings": {"rule": "random", "texts": ["a", "b"]},
    "seed": 3,
}


def sample(run, part, keys=3):
    run.arrays(
        "attention",
        {"received": np.full((2, keys), part + 1 / 3), "visible": np.array([2049.0, 1.0])},
        DIMS,
        dtype={"visible": "float32"},
        part=part,
    )
    run.table("tokens", {"sample": [part] * 2, "text": ["a", f"{part}"]}, part=part)


def write(path, parts=(0, 1), **changes):
    with RunWriter(path, **(RUN | changes)) as run:
        for part in parts:
            sample(run, part, keys=3 + part)
    return open_run(path)


def written(run):
    """The texts of the parts, one behind the other."""
    return ",".join(run.table("tokens")["text"])


def test_parts_are_read_joined_or_one_by_one():
    run = write("run", parts=(2, 0, 11))
    assert run.tables == ("tokens",)
    assert run.array_files == ("attention",)
    assert run.parts("tokens") == run.parts("attention") == (0, 2, 11)
    Path("run/tokens-0002.parquet").rename("tokens")
    refused("tokens-0002.parquet is missing", open_run, "run")
    Path("tokens").rename("run/tokens-0002.parquet")
    assert written(run) == "a,0,a,2,a,11"
    assert run.table("tokens").index.tolist() == [0, 1, 2, 3, 4, 5]
    assert run.table("tokens", part=2)["sample"].tolist() == [2, 2]
    assert run.arrays("attention", part=11)["received"].shape == (2, 14)
    received = run.array("attention", "received", part=2)
    assert received.dtype == np.float16
    assert received.tolist() == [[np.float16(2 + 1 / 3)] * 5] * 2
    visible = run.array("attention", "visible", part=2)
    assert (visible.dtype, visible.tolist()) == (np.float32, [2049.0, 1.0])
    assert run.dims("attention", part=0) == DIMS
    # readable with pandas alone
    assert pd.read_parquet("run/tokens-0011.parquet")["text"].tolist() == ["a", "11"]


def test_what_is_whole_has_no_parts():
    with RunWriter("run", **RUN) as run:
        run.table("heldout", {"k": [0, 1]})
        assert run.has("heldout")
        assert not run.has("heldout", 0)
    run = open_run("run")
    assert run.parts("heldout") == ()
    refused("no part 3 of 'heldout'", run.table, "heldout", part=3)


def test_wrong_parts_are_named():
    run = write("run", parts=(0, 1, 2))
    refused(r"read one of 0–2, e\.g\. part=0", run.arrays, "attention")
    refused("no part 7 of 'tokens'", run.table, "tokens", part=7)
    refused("'token'; did you mean 'tokens'", run.parts, "token")
    refused("'attend'; did you mean", run.arrays, "attend", part=0)
    refused("'recieved'; did you mean", run.array, "attention", "recieved", part=0)
    with RunWriter("other", **RUN) as run:
        run.table("tokens", {"a": [1]}, part=0)
        refused("'tokens' is already written", run.table, "tokens", {"a": [1]})
        refused("numbered from 0: got part=-1", run.table, "tokens", {"a": [1]}, part=-1)
        refused(
            "field 'recieved'; did you mean",
            run.arrays,
            "x",
            {"received": np.zeros(2)},
            {"received": ("key",)},
            dtype={"recieved": "float32"},
        )


def test_parts_that_no_run_writes_are_refused(tmp_path):
    write(tmp_path)
    path = Path("run.json")
    info = json.loads(path.read_text())
    wrong = [[], [0, 0], [1, 0], [-1], [True], [0.0], ["0"], [[0]], [0, "1"], 3]
    some = [{"../x.parquet": [0]}, {"other.parquet": [0]}]
    for parts in some + [{"tokens.parquet": numbers} for numbers in wrong]:
        path.write_text(json.dumps(info | {"parts": parts}))
        refused(r"run.json is damaged .*parts is", open_run, tmp_path)


def test_an_interrupted_run_goes_on():
    with pytest.raises(KeyboardInterrupt), RunWriter("run", **RUN) as run:
        sample(run, 0)
        raise KeyboardInterrupt
    before = open_run("run").info
    assert before.status == "interrupted"
    # a file that was written but not yet listed when the power went
    Path("run/tokens-0001.parquet").write_bytes(b"half")
    Path("run/.tokens-0002.parquet.part").write_bytes(b"half")
    with RunWriter("run", **RUN, resume=True) as run:
        assert run.has("tokens", 0)
        assert run.has("attention", 0)
        assert not run.has("tokens", 1)
        assert open_run("run").info.status == "running"
        sample(run, 1)
    run = open_run("run")
    assert (run.info.status, run.info.error, run.info.created) == ("complete", None, before.created)
    assert written(run) == "a,0,a,1"
    assert not list(Path("run").glob(".*"))


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
    for number, how in enumerate(({}, {"resume": True}, {"overwrite": True})):
        path = shutil.copytree("killed", tmp_path / f"run-{number}")
        with RunWriter(path, **RUN, **how) as run:
            sample(run, 0)
        assert open_run(path).info.status == "complete"
        assert not list(path.glob(".*"))


@pytest.mark.parametrize("does", ["", "resume", "overwrite"])
def test_a_folder_of_other_files_is_refused_with_all_that_is_in_it(tmp_path, does):
    for name in (".run.json.part", "notes.txt"):
        (tmp_path / name).write_text("mine")
    message, how = "is taken", {}
    if does:
        message, how = f"{does}=True .* holds notes.txt but no run.json", {does: True}
    refused(message, RunWriter(tmp_path, **RUN, **how).__enter__)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".run.json.part", "notes.txt"]


@pytest.mark.parametrize(
    ("changes", "name", "before", "now"),
    [
        ({"seed": 4}, "seed", 3, 4),
        ({"settings": {"texts": ["a", "b"]}}, "settings['rule']", "'random'", "'absent'"),
        ({"settings": {"rule": "random", "texts": ["a", "c"]}}, "['texts'][1]", "'b'", "'c'"),
        ({"settings": {"rule": "random", "texts": ["a"] * 3}}, "['texts'][1]", "'b'", "'a'"),
        ({"settings": {"rule": "random", "texts": ["a", "b", "c"]}}, "['texts'])", 2, 3),
        ({"model": {"name": "n", "layers": 2}}, "model['name']", "'m'", "'n'"),
        ({"kind": "training"}, "kind", "'study'", "'training'"),
    ],
)
def test_another_run_cannot_be_continued(changes, name, before, now):
    """The first difference is named, also within a long list."""
    write("run")
    message = re.escape(f"{name} is {before}, and now it is {now}")
    refused(message, RunWriter("run", **RUN | changes, resume=True).__enter__)
    # what was there is untouched
    assert open_run("run").info.status == "complete"


def test_overwriting_removes_parts_too(tmp_path):
    write(tmp_path)
    both = {"overwrite": True, "resume": True}
    refused("overwrite=True .*resume=True", RunWriter, tmp_path, **RUN, **both)
    with RunWriter(tmp_path, **RUN, overwrite=True):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


def test_a_run_has_one_writer():
    with RunWriter("run", **RUN) as run:
        sample(run, 0)
        for how in ({"resume": True}, {"overwrite": True}, {"resume": True, "shard": (0, 2)}):
            refused(r"run is being written by another", RunWriter("run", **RUN, **how).__enter__)
        sample(run, 1)
    assert open_run("run").parts("tokens") == (0, 1)
    assert not list(Path("run").glob(".*"))


def test_shards_write_one_run_and_keep_what_the_others_wrote():
    def fill(first):
        with RunWriter("run", **RUN, resume=True, shard=(first, 4)) as run:
            run.is_whole = False
            for part in range(first, 12, 4):
                sample(run, part)

    with ThreadPoolExecutor(4) as pool:
        for job in [pool.submit(fill, first) for first in range(4)]:
            job.result()
    run = open_run("run")
    assert run.info.status == "running", "none of them said that it is whole"
    assert run.parts("tokens") == run.parts("attention") == tuple(range(12))
    assert lost_files(run.path, run.info) == set()
    assert not list(Path("run").glob(".*"))


def test_a_shard_has_one_writer_and_all_divide_a_run_alike():
    with RunWriter("run", **RUN, resume=True, shard=(0, 2)) as run:
        sample(run, 0)
        Path("run/.tokens-0002.parquet.part").write_bytes(b"half")
        for wrong in ((0, 2), (1, 3), (0, 1)):
            other = RunWriter("run", **RUN, resume=True, shard=wrong)
            refused("run is being written by another", other.__enter__)
        with RunWriter("run", **RUN, resume=True, shard=(1, 2)) as other:
            assert other.has("tokens", 0)
            sample(other, 1)
        assert Path("run/.tokens-0002.parquet.part").exists(), "somebody may be writing it"
        assert run.refresh().parts["tokens.parquet"] == [0, 1]
    # the locks of those that were killed hold nobody up, however they divided the run
    for name in (".lock", ".2-of-5.lock"):
        (Path("run") / name).touch()
    with RunWriter("run", **RUN, resume=True) as run:
        sample(run, 2)
    assert not list(Path("run").glob(".*"))
