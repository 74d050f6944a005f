import json
import resource
import shutil

import numpy as np
import pytest

from refusals import refused
from sinklab.lab.records import Arrays, Contents, RunWriter, open_run, write_beside
from sinklab.lab.records.info import read_info
from sinklab.lab.records.reading import lost_files


def writer(path, **how):
    return RunWriter(path, kind="study", model={}, settings={}, seed=0, **how)


BIG = np.zeros(100_000)
ONES = Arrays({"received": np.ones((4, 8))}, {"received": ("step", "key")})


@pytest.fixture
def folder(tmp_path):
    with writer("run", samples=1) as run:
        run.table("tokens", {"position": list(range(50))})
        run.write(0, {0: Contents({}, {"attention": ONES})})
    open_run("run")
    return tmp_path / "run"


READS = {
    "attention-0000.safetensors": (
        lambda run: run.arrays("attention", 0),
        lambda run: run.array("attention", "received", 0),
        lambda run: run.to_xarray("attention", 0),
    ),
    "tokens.parquet": (lambda run: run.table("tokens"),),
}


@pytest.mark.parametrize("name", READS)
def test_a_file_that_is_not_what_was_written_is_refused_where_it_is_read(folder, name):
    whole = (folder / name).read_bytes()
    changed = bytes([*whole[:40], whole[40] ^ 1, *whole[41:]])
    for content in (b"", whole[:-10], changed, b"x" * 40):
        run = open_run(folder)
        (folder / name).write_bytes(content)
        for read in READS[name]:
            refused(rf"{name} is damaged .*repeat the command.*SHA-256", read, run)
        assert lost_files(folder, run.info) == {name}
    (folder / name).unlink()
    refused(f"{name} is .*missing", open_run, folder)


def test_not_a_run(tmp_path):
    refused("nowhere is not a run folder", open_run, tmp_path / "nowhere")
    refused(r"run folder: it has no run.json", open_run, tmp_path)
    # A run that was stopped during its very first write.
    (tmp_path / ".run.json.part").write_text('{"schema": 1')
    refused(r"it has no run.json", open_run, tmp_path)


def test_a_run_json_that_no_run_wrote_is_refused(folder):
    path = folder / "run.json"
    info = json.loads(path.read_text())
    for text in ("{half", "", "\xff\xfe", "[1]", '{"schema": 3, "kind": "study"}'):
        path.write_bytes(text.encode("latin-1"))
        refused("run.json is damaged", open_run, folder)
    for text in ("{}", '{"schema": 2}', '{"schema": true}'):
        path.write_text(text)
        refused("run.json has schema .*reads schema 3", open_run, folder)
    for field, value in (
        ("files", {"../tokens.parquet": "0"}),
        ("files", ["tokens.parquet"]),
        ("model", []),
        ("seed", "1"),
        ("others", {"/run.json": "0"}),
        ("others", {"tokens.parquet": "", "other": 0}),
        ("samples", 10**40),
        ("more", 1),
    ):
        path.write_text(json.dumps(info | {field: value}))
        refused("run.json is damaged", open_run, folder)


def test_interrupted_run_is_readable(tmp_path):
    with pytest.raises(RuntimeError), writer(tmp_path) as run:
        run.table("steps", {"step": [0, 1]})
        raise RuntimeError("NaN logits at step 3")
    got = open_run(tmp_path)
    assert got.info.status == "interrupted" and got.table("steps")["step"].tolist() == [0, 1]
    assert got.info.error == "RuntimeError: NaN logits at step 3"


def test_full_disk_for_real(tmp_path):
    """A file size limit makes the operating system itself refuse to write on, which is an OSError:
    the command line says in one line that the disk is full.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with (
        pytest.raises(OSError, match=r"File too large|os error"),
        writer(tmp_path, samples=1) as run,
    ):
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
        try:
            run.write(0, {0: Contents({}, {"a": Arrays({"x": BIG}, {"x": ("key",)})})})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


def test_what_is_no_run_is_kept_when_a_run_is_replaced(folder):
    (folder / "notes.txt").write_text("mine")
    with writer(folder, overwrite=True):
        pass
    assert sorted(path.name for path in folder.iterdir()) == ["notes.txt", "run.json"]
    refused("is a file", writer(folder / "notes.txt").__enter__)


def test_processes_that_write_the_same_file_do_not_take_each_others_half(tmp_path):
    def meanwhile(part):
        part.write_text("the same")
        write_beside(tmp_path / "kept.txt", lambda other: other.write_text("the same"))

    write_beside(tmp_path / "kept.txt", meanwhile)
    assert [path.name for path in tmp_path.iterdir()] == ["kept.txt"]
    assert (tmp_path / "kept.txt").read_text() == "the same"


def test_a_reader_follows_a_run_that_is_being_written(tmp_path):
    with writer(tmp_path) as run:
        run.table("curve", {"loss": [3.0]})
        reader = open_run(tmp_path)
        run.table("curve", {"loss": [3.0, 2.0]})
        assert reader.table("curve")["loss"].tolist() == [3.0, 2.0]
    assert reader.table("curve")["loss"].tolist() == [3.0, 2.0]


@pytest.mark.parametrize("name", ["run.json", "attention-0000.safetensors", "tokens.parquet"])
def test_a_link_in_place_of_a_file_is_refused(folder, tmp_path, name):
    shutil.move(folder / name, tmp_path / name)
    (folder / name).symlink_to(tmp_path / name)
    refused(rf"{name} is a link", open_run, folder)
    if name != "run.json":
        assert lost_files(folder, read_info(folder / "run.json")) == {name}
    assert (tmp_path / name).is_file()
