"""Run folders that are damaged or were made to harm, given to every command that reads one."""

import inspect
import json
import re
import shutil
from pathlib import Path

import pytest

from commands import error_of
from pictures import no_pictures as no_pictures
from sinklab.lab.cli import main
from sinklab.lab.studies.trace.study import StudySettings, study
from tiny_diffusion import tiny_loaded

pytestmark = [pytest.mark.ring("extras"), pytest.mark.usefixtures("no_pictures")]


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    place = tmp_path_factory.mktemp("traced") / "run"
    settings = StudySettings(prompts=("The old man", "The sea"), new_tokens=3, block_length=None)
    return Path(study(tiny_loaded(1), place, settings))


def flip(file, place=-1):
    """Flip a bit of a byte."""
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)


READERS = {
    "report": lambda bad, good: ["report", str(good), str(bad), "--out", "page"],
    "figures": lambda bad, good: ["figures", str(bad), "--out", "drawn", "--formats", "png"],
}


@pytest.mark.parametrize("command", READERS)
def test_every_reader_names_a_damaged_file(traced, tmp_path, monkeypatch, capsys, command):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    bad = shutil.copytree(traced, tmp_path / "bad")
    flip(bad / "attention-0000.safetensors")
    assert main(READERS[command](bad, traced)) == 2
    said = capsys.readouterr().err
    assert "attention-0000.safetensors is damaged" in said and "repeat the command" in said


def rewritten(folder, **changes):
    told = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(told | changes))


def test_a_run_that_has_fewer_samples_than_it_says_is_refused(traced, tmp_path, capsys):
    bad = shutil.copytree(traced, tmp_path / "bad")
    rewritten(bad, samples=2, part_size=1)
    told = error_of(f"report {bad} --out {tmp_path / 'page'}", capsys)
    assert re.search("run.json is damaged .*lacks parts", told)


PWN = "\x1b]0;pwn\x07"


def hostile(value):
    """A JSON value with an escape sequence in every string and key of its own."""
    if isinstance(value, dict):
        return {key: hostile(one) for key, one in value.items()}
    if isinstance(value, list):
        return [hostile(one) for one in value]
    return f"{value}{PWN}" if isinstance(value, str) else value


def with_escapes(traced, place):
    """A copy of a run with escapes in its name and in every text of its run.json, but for those
    without which it is refused at once.
    """
    run = shutil.copytree(traced, place / f"run{PWN}")
    told = json.loads((run / "run.json").read_text())
    names = ("schema", "kind", "status", "samples", "part_size", "files")
    words = {key: told["model"][key] for key in ("family", "reading")}
    told = hostile(told) | {name: told[name] for name in names}
    told["model"] |= words
    (run / "run.json").write_text(json.dumps(told))
    return run


OVER = {
    "report": ["report", "{run}", "--out", "page"],
    "info": ["info", "{run}"],
    "generate": ["generate", "a", "--model", "{run}"],
    "config": ["generate", "a", "--config", "{run}", "--new-tokens", "1", "--model", "tiny"],
    "defaults": ["trace", "--config", "{run}", "--help-all"],
    "go on": ["trace", "--model", "{run}", "--out", "{run}"],
    "train": ["train", "--config", "{run}", "--out", "again"],
}


@pytest.mark.slow
def test_no_command_prints_the_escapes_of_a_run_folder(traced, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    run, told = with_escapes(traced, tmp_path), 0
    for name, words in OVER.items():
        given = shutil.copytree(run, tmp_path / name / run.name) if name == "go on" else run
        try:
            main([word.format(run=given) for word in words])
        except SystemExit:
            # the model of a run is not taken from it
            assert {"--help-all", "--config"}.intersection(words)
        printed = "".join(capsys.readouterr())
        assert printed and "\x1b" not in printed and "\x07" not in printed, (name, printed)
        told += "\\x1b]0;pwn\\x07" in printed
    assert told > 4, "what was found is spelt out"


def test_commands_print_through_one_module():
    package = Path(inspect.getfile(main)).parent
    printing = {
        file.name
        for file in package.glob("*.py")
        if re.search(r"\b(print|Console)\(", file.read_text("utf-8"))
    }
    assert printing == {"progress.py"}
