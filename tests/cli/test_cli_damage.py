"""Run folders that are damaged or were made to harm, given to every command that reads one."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from sinklab.cli import main
from sinklab.records import RunWriter, open_run
from sinklab.studies.trace.study import StudySettings, study
from tiny_diffusion import tiny_loaded


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("traced") / "run"
    settings = StudySettings(prompts=("The old man", "The sea"), new_tokens=3, block_length=None)
    return Path(study(tiny_loaded(1), place, settings))


def scored(place: Path) -> Path:
    """A folder as `sinklab eval` leaves it."""
    model = {"name": "x", "family": "diffusion", "dtype": "float32", "device": "cpu", "weights_sha256": "0"}
    with RunWriter(place, kind="benchmark", model=model, settings={"seed": 0}, seed=0) as run:
        columns = {"task": "gsm8k", "filter": "strict", "doc_id": [0, 1], "response": ["a", "b"], "prompt": ["q", "r"]}
        columns |= {"right": [1.0, 0.0], "answer": "", "target": "7", "cut": 0}
        run.table("samples", pd.DataFrame(columns | {"logprobs": [[], []], "stderrs": [[], []]}))
    return place


def flip(file: Path, place: int = -1) -> None:
    """Flip a bit of a byte."""
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)


READERS: dict[str, Callable[[Path, Path], list[str]]] = {
    "report": lambda bad, good: ["report", str(good), str(bad), "--out", "page"],
    "compare": lambda bad, good: ["compare", str(good), str(bad), "--out", "page"],
    "gallery": lambda bad, good: ["gallery", str(good), str(bad), "--out", "site"],
    "figures": lambda bad, good: ["figures", str(bad), "--out", "drawn", "--formats", "png"],
    "push": lambda bad, good: ["push", str(bad), "me/run", "--dry-run"],
    "merge": lambda bad, good: ["merge", str(bad), "--out", "merged"],
}


@pytest.mark.parametrize("command", READERS)
def test_every_reader_names_a_damaged_file(
    traced: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, command: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    bad = shutil.copytree(traced, tmp_path / "bad")
    flip(bad / "attention-0000.safetensors")
    assert main(READERS[command](bad, traced)) == 2
    said = capsys.readouterr().err
    assert "attention-0000.safetensors is damaged" in said and "--resume" in said


def test_the_referee_names_a_damaged_file(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    one, two = scored(tmp_path / "one"), scored(tmp_path / "two")
    flip(two / "samples.parquet", 40)
    assert main(["referee", str(one), str(two), "--out", str(tmp_path / "out")]) == 2
    assert "two/samples.parquet is damaged" in capsys.readouterr().err


def rewritten(folder: Path, **changes: Any) -> None:
    told = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(told | changes))


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        ("lost sample", "run.json is damaged: .*sample 1"),
        ("null", "generations lacks texts"),
        ("empty", "generations lacks texts"),
    ],
)
def test_runs_that_say_less_than_a_trace_writes(
    traced: Path, tmp_path: Path, capsys: pytest.CaptureFixture, damage: str, named: str
) -> None:
    """Without checksums, as of an earlier version, so that what is read must speak for itself."""
    bad = shutil.copytree(traced, tmp_path / "bad")
    rewritten(bad, checksums={})
    if damage == "lost sample":
        rewritten(bad, parts={name: [0] for name in open_run(bad).info.parts})
    for file in bad.glob("generations-*.parquet"):
        texts = pd.read_parquet(file)
        if damage == "null":
            texts.assign(completion=None).to_parquet(file)
        if damage == "empty":
            texts.iloc[:0].to_parquet(file)
    assert main(["report", str(bad), "--out", str(tmp_path / "page")]) == 2
    assert re.search(named, capsys.readouterr().err)
