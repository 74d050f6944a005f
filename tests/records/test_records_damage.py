import errno
import json
import resource
import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest
import safetensors.numpy

from refusals import refused
from sinklab.lab.records import RunWriter, open_run, write_beside
from sinklab.lab.records.info import read_info
from sinklab.lab.records.reading import lost_files


def writer(path, **how):
    return RunWriter(path, kind="study", model={}, settings={}, seed=0, **how)


@pytest.fixture
def folder(tmp_path):
    with writer("run") as run:
        run.table("tokens", {"position": list(range(50))})
        run.arrays("attention", {"received": np.ones((4, 8))}, dims={"received": ("step", "key")})
    open_run("run")
    return tmp_path / "run"


@pytest.mark.parametrize("name", ["attention.safetensors", "tokens.parquet"])
def test_truncated_and_missing_files_are_refused_by_name(folder, name):
    whole = (folder / name).read_bytes()
    for keep in (0, 5, -10):
        (folder / name).write_bytes(whole[:keep])
        refused(rf"{name} is damaged and cannot be read", open_run, folder)
    (folder / name).unlink()
    refused(f"{name} is missing", open_run, folder)


def test_damage_after_opening_is_refused_too(folder):
    run = open_run(folder)
    for name in ("attention.safetensors", "tokens.parquet"):
        (folder / name).write_bytes(b"x" * 40)
    refused(r"tokens.parquet is damaged", run.table, "tokens")
    refused("safetensors is damaged", run.arrays, "attention")


def test_safetensors_of_another_program_is_refused(folder):
    safetensors.numpy.save_file({"x": np.zeros(2)}, folder / "attention.safetensors")
    refused("safetensors is damaged", open_run, folder)


def test_not_a_run(tmp_path):
    refused("nowhere is not a run folder", open_run, tmp_path / "nowhere")
    refused(r"run folder: it has no run.json", open_run, tmp_path)
    # A run that was stopped during its very first write.
    (tmp_path / ".run.json.part").write_text('{"schema": 1')
    refused(r"it has no run.json", open_run, tmp_path)


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (("{half", "", "\xff\xfe"), r"run.json is damaged and cannot be read"),
        (("[1]", "{}"), r"run.json does not describe a run: it has no schema version"),
        (('{"schema": 2}',), r"run.json has schema 2, and this version of sinklab reads schema 3"),
        (('{"schema": true}',), r"run.json has schema True"),
        (
            ('{"schema": 3, "kind": "study"}',),
            r"run.json is damaged .*it lacks model, settings, seed",
        ),
    ],
)
def test_bad_run_json(folder, texts, message):
    for text in texts:
        (folder / "run.json").write_bytes(text.encode("latin-1"))
        refused(message, open_run, folder)


def test_wrong_fields_are_named(folder):
    info = json.loads((folder / "run.json").read_text())
    for field, value in (
        ("status", "done"),
        ("files", {"../tokens.parquet": "0"}),
        ("files", {"": "0"}),
        ("files", {"tokens.txt": "0"}),
        ("files", ["tokens.parquet"]),
        ("model", []),
        ("seed", "1"),
        ("others", {"../run.json": "0"}),
        ("others", {"/run.json": "0"}),
        ("others", {"tokens.parquet": 0}),
    ):
        (folder / "run.json").write_text(json.dumps(info | {field: value}))
        refused(rf"run.json is damaged .*{field} is", open_run, folder)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("NaN logits at step 3")])
def test_interrupted_run_is_readable(tmp_path, error):
    with pytest.raises(type(error)), writer(tmp_path) as run:
        run.table("steps", {"step": [0, 1]})
        raise error
    got = open_run(tmp_path)
    assert got.info.status == "interrupted" and got.table("steps")["step"].tolist() == [0, 1]
    assert got.info.error == (f"RuntimeError: {error}" if str(error) else "KeyboardInterrupt")


def test_killed_run_is_readable_and_says_running(tmp_path):
    run = writer(tmp_path)
    run.__enter__()
    run.table("steps", {"step": [0]})
    (tmp_path / ".tokens.parquet.part").write_bytes(b"half")
    got = open_run(tmp_path)
    assert got.info.status == "running" and got.tables == ("steps",)


def full_disk(path, *_, **__):
    Path(path).write_bytes(b"half of it")
    raise OSError(errno.ENOSPC, "No space left on device")


def test_full_disk_leaves_everything_as_it_was(tmp_path, monkeypatch):
    with writer(tmp_path) as run:
        run.table("curve", {"loss": [3.0]})
        monkeypatch.setattr(pyarrow.parquet, "ParquetWriter", lambda path, _: full_disk(path))
        monkeypatch.setattr(
            safetensors.numpy, "save_file", lambda arrays, path, metadata: full_disk(path)
        )
        with pytest.raises(OSError, match=r"No space left.*tokens\.parquet"):
            run.table("tokens", {"a": [1]})
        with pytest.raises(OSError, match=r"No space left.*safetensors"):
            run.arrays("attention", {"x": np.zeros(2)}, dims={"x": ("key",)})
        with pytest.raises(OSError, match="No space left"):
            run.table("curve", {"loss": [3.0, 2.0]})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["curve.parquet", "run.json"]
    assert open_run(tmp_path).tables == ("curve",)
    assert open_run(tmp_path).table("curve")["loss"].tolist() == [3.0]


def test_full_disk_for_real(tmp_path):
    """A file size limit makes the operating system itself refuse to write on, which is an OSError:
    the command line says in one line that the disk is full.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with writer(tmp_path) as run:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
        try:
            with pytest.raises(OSError, match=r"File too large|os error"):
                run.arrays("attention", {"x": np.zeros(100_000)}, dims={"x": ("key",)})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


def test_error_of_the_block_survives_a_full_disk_at_the_end(tmp_path, monkeypatch):
    with pytest.raises(RuntimeError, match="the cause") as caught, writer(tmp_path):
        monkeypatch.setattr(Path, "write_text", lambda self, *_, **__: full_disk(self))
        raise RuntimeError("the cause")
    assert any("could not be noted" in note for note in caught.value.__notes__)
    assert open_run(tmp_path).info.status == "running"
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


def test_what_is_no_run_is_kept_when_a_run_is_replaced(folder):
    (folder / "notes.txt").write_text("mine")
    with writer(folder, overwrite=True):
        pass
    assert sorted(path.name for path in folder.iterdir()) == ["notes.txt", "run.json"]
    refused("is a file", writer(folder / "notes.txt").__enter__)


def test_every_file_can_be_read_by_whom_run_json_can(folder):
    modes = {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()}
    assert len(modes) > 2 and set(modes.values()) == {modes["run.json"]}, modes


def test_processes_that_write_the_same_file_do_not_take_each_others_half(tmp_path):
    def meanwhile(part):
        part.write_text("the same")
        write_beside(tmp_path / "kept.txt", lambda other: other.write_text("the same"))

    write_beside(tmp_path / "kept.txt", meanwhile)
    assert [path.name for path in tmp_path.iterdir()] == ["kept.txt"]
    assert (tmp_path / "kept.txt").read_text() == "the same"


def flip(file, place=-1):
    """Flip a bit of a byte, by default of the last one: the file is as long as before and its head
    is whole.
    """
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)


READS = {
    "attention.safetensors": {
        "arrays": lambda run: run.arrays("attention"),
        "array": lambda run: run.array("attention", "received"),
        "to_xarray": lambda run: run.to_xarray("attention"),
    },
    "tokens.parquet": {"table": lambda run: run.table("tokens")},
}


@pytest.mark.parametrize(
    ("name", "read"), [(name, read) for name, reads in READS.items() for read in reads]
)
def test_a_file_that_is_not_what_was_written_is_refused_where_it_is_read(folder, name, read):
    flip(folder / name, 40 if name == "tokens.parquet" else -1)
    run = open_run(folder)
    refused(f"{name} .*SHA-256.* --resume", READS[name][read], run)


def test_a_reader_follows_a_run_that_is_being_written(tmp_path):
    with writer(tmp_path) as run:
        run.table("curve", {"loss": [3.0]})
        reader = open_run(tmp_path)
        run.table("curve", {"loss": [3.0, 2.0]})
        assert reader.table("curve")["loss"].tolist() == [3.0, 2.0]
    assert reader.table("curve")["loss"].tolist() == [3.0, 2.0]
    assert open_run(tmp_path).tables == ("curve",)


@pytest.mark.parametrize("name", ["run.json", "attention.safetensors", "tokens.parquet"])
def test_a_link_in_place_of_a_file_is_refused(folder, tmp_path, name):
    shutil.move(folder / name, tmp_path / name)
    (folder / name).symlink_to(tmp_path / name)
    refused(rf"{name} is a link", open_run, folder)
    if name != "run.json":
        assert lost_files(folder, read_info(folder / "run.json")) == {name}
    assert (tmp_path / name).is_file()
