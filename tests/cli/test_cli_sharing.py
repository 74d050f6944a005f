"""`sinklab export`, `push` and `gallery`: what would be sent is a cleaned copy, listed, private,
and asked for.
"""

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
from safetensors import safe_open

from commands import cli, error_of, out_of
from pictures import draw_only as draw_only
from pictures import no_pictures as no_pictures
from sinklab.extras.sharing import export
from sinklab.lab.checkpoints import load, save_sink, sink_file_of
from sinklab.lab.cli import main
from sinklab.lab.records import RunWriter, open_run
from sinklab.lab.records.reading import lost_files
from sinklab.lab.studies.trace.study import StudySettings, study
from tiny_diffusion import save_tiny, tiny_loaded

pytestmark = pytest.mark.usefixtures("no_pictures")


class Hub:
    """Stands in for the Hub: what it was asked, and the files that it was given."""

    def __init__(self, *, private=None):
        self.private, self.asked, self.files = private, [], {}

    def create_repo(self, repo, *, repo_type, private, exist_ok):
        assert exist_ok
        self.asked.append(("create", repo, repo_type, private))
        self.private = private if self.private is None else self.private
        return f"https://hub/{repo}"

    def repo_info(self, repo, *, repo_type):
        return SimpleNamespace(private=self.private)

    def upload_folder(self, *, repo_id, repo_type, folder_path, commit_message):
        self.asked.append(("upload", repo_id, repo_type))
        found = [path for path in folder_path.rglob("*") if path.is_file()]
        self.files = {path.relative_to(folder_path).as_posix(): path.read_bytes() for path in found}


@pytest.fixture
def hub(monkeypatch):
    def put(**how):
        made = Hub(**how)
        monkeypatch.setattr(huggingface_hub, "HfApi", lambda: made)
        return made

    return put


@pytest.fixture(autouse=True)
def no_network(monkeypatch, tmp_path):
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: pytest.fail("the Hub was asked"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    """A run that names places, with what workers and an editor left beside it."""
    place = tmp_path_factory.mktemp("secret") / "run"
    run = study(
        tiny_loaded(1),
        place,
        StudySettings(prompts=("The old /home/x/y man",), new_tokens=3, block_length=None),
    )
    info = json.loads((place / "run.json").read_text())
    info["model"]["name"] = str(place.parent / "models" / "mine")
    info["settings"]["heldout"] = str(place.parent / "held.txt")
    (place / "run.json").write_text(json.dumps(info))
    (place / ".claims").mkdir()
    (place / ".claims" / "run").write_text("node17 secret")
    (place / "notes.txt").write_text("secret")
    return Path(run)


def copy_of(printed):
    return Path(re.search(r"the copy: (\S+)", printed)[1])


def listed(printed):
    rows = re.findall(r"^ +([\d,]+)  (\S+)$", printed, re.M)
    return {name: int(size.replace(",", "")) for size, name in rows}


def test_a_dry_run_lists_every_file_of_a_cleaned_copy(traced, tmp_path, capsys):
    printed = out_of(f"push {traced} me/house --dry-run", capsys)
    copy = copy_of(printed)
    sizes = {
        path.relative_to(copy).as_posix(): path.stat().st_size
        for path in copy.rglob("*")
        if path.is_file()
    }
    assert listed(printed) == sizes and {
        "run.json",
        "report.html",
        "README.md",
        "attention-0000.safetensors",
    } <= {*sizes}
    assert (
        "a private dataset repository me/house would get" in printed
        and "nothing was sent" in printed
    )
    assert (
        "stays here: .claims, notes.txt" in printed
        and f"{sum(sizes.values()):,}  bytes in" in printed
    )
    assert re.search(r"run.json: model.name: '/.*/models/mine' is sent as 'mine'", printed)
    for path in copy.rglob("*"):
        assert path.is_dir() or b"secret" not in path.read_bytes(), path.name
    sent, here = open_run(copy), open_run(traced)
    assert not lost_files(copy, sent.info)
    assert sent.table("tokens").equals(here.table("tokens"))
    assert (
        sent.info.model == here.info.model | {"name": "mine"}
        and sent.info.settings["heldout"] == "held.txt"
    )
    assert sent.info.settings["prompts"] == ["The old /home/x/y man"]
    card = (copy / "README.md").read_text("utf-8")
    assert (
        "- config_name: tokens\n  data_files:\n  - tokens-0000.parquet" in card
        and "of mine, complete" in card
    )
    assert json.loads((traced / "run.json").read_text())["model"]["name"].endswith("models/mine")


def test_another_kind_of_run_is_a_data_set_without_a_page(tmp_path, capsys):
    with RunWriter(
        tmp_path / "run", kind="curve", model={"name": "x"}, settings={}, seed=None
    ) as run:
        run.table("curve", {"k": [1, 2]})
    assert {*listed(out_of(f"push {tmp_path / 'run'} me/x --dry-run", capsys))} == {
        "README.md",
        "run.json",
        "curve.parquet",
    }


@pytest.mark.parametrize("public", [False, True])
def test_a_run_is_sent_private_unless_it_is_said(traced, hub, capsys, tmp_path, public):
    it = hub()
    assert main(["push", str(traced), "me/house", "--yes", *["--public"] * public]) == 0
    assert it.asked == [
        ("create", "me/house", "dataset", not public),
        ("upload", "me/house", "dataset"),
    ]
    printed = capsys.readouterr().out
    assert {name: len(content) for name, content in it.files.items()} == listed(printed)
    assert "sent: https://hub/me/house" in printed and not copy_of(printed).exists()


@pytest.mark.parametrize(
    ("private", "flags", "fact"), [(False, [], "public"), (True, ["--public"], "private")]
)
def test_a_repository_that_is_there_must_be_as_private_as_was_said(
    traced, hub, capsys, private, flags, fact
):
    it = hub(private=private)
    assert main(["push", str(traced), "me/house", "--yes", *flags]) == 2
    assert f"me/house is {fact} already, so nothing was sent" in capsys.readouterr().err
    assert not it.files


@pytest.mark.parametrize(
    ("answer", "sent"), [("y", True), ("YES", True), ("", False), ("no", False)]
)
def test_somebody_at_a_terminal_is_asked(traced, hub, monkeypatch, capsys, answer, sent):
    it, asked = hub(), []
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: True))

    def reply(question):
        asked.append((question, listed(capsys.readouterr().out)))
        return answer

    monkeypatch.setattr("builtins.input", reply)
    assert cli(f"push {traced} me/house") == 0
    ((question, files),) = asked
    assert question.startswith("send it?") and "run.json" in files, "what is sent was listed before"
    assert bool(it.files) == bool(it.asked) == sent


def test_nobody_at_a_terminal_is_not_asked(traced, tmp_path, capsys):
    before = sorted(tmp_path.iterdir())
    assert "give --yes to send it, or --dry-run" in error_of(f"push {traced} me/house", capsys)
    assert sorted(tmp_path.iterdir()) == before


def test_a_sink_file_is_sent_without_the_place_of_its_model(tmp_path, capsys):
    file = save_sink(
        tiny_loaded(2).model, tmp_path / "sink.safetensors", name="/home/secret/models/LLaDA"
    )
    printed = out_of(f"push {file} me/sink --dry-run", capsys)
    copy = copy_of(printed)
    assert (
        listed(printed).keys() == {"README.md", "sink.safetensors"}
        and "a private model repository" in printed
    )
    assert "name: '/home/secret/models/LLaDA' is sent as 'LLaDA'" in printed
    facts = sink_file_of(copy / file.name)
    assert facts == facts.__class__(**{**vars(sink_file_of(file)), "name": "LLaDA"})
    with safe_open(file, "pt") as one, safe_open(copy / file.name, "pt") as other:
        assert torch.equal(one.get_tensor("sink_embeddings"), other.get_tensor("sink_embeddings"))
    card = (copy / "README.md").read_text("utf-8")
    assert (
        "2 added attention sinks of kind `token`" in card
        and facts.weights_sha256 in card
        and "secret" not in card
    )


@pytest.mark.slow
def test_a_model_is_sent_as_export_writes_it_with_its_owners_card(tmp_path, hub, capsys):
    plain = save_tiny(tmp_path / "secret" / "mine", 1)
    it = hub()
    assert cli(f"push {plain} me/mine --yes") == 0
    assert it.asked[0] == ("create", "me/mine", "model", True)
    assert {
        "modeling_sinklab.py",
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    } <= it.files.keys()
    assert not any(b"secret" in content for content in it.files.values())
    folder = export(load(plain), tmp_path / "exported")
    (folder / "README.md").write_text("license: mit")
    (folder / "core_registry.py").write_text("raise SystemExit")
    (folder / "notes.txt").write_text("mine")
    assert cli(f"push {folder} me/mine --yes") == 0
    assert it.files["README.md"] == b"license: mit" and "notes.txt" not in it.files
    assert b"class Registry" in it.files["core_registry.py"]
    assert "whatever the folder held" in capsys.readouterr().out


def test_what_is_neither_and_a_name_without_an_owner_are_refused(tmp_path, capsys):
    (tmp_path / "text.txt").write_text("x")
    (tmp_path / "wrong.safetensors").write_bytes(b"x")
    for what, fault in (
        ("text.txt", "is none of them"),
        ("absent", "is none of them"),
        ("wrong.safetensors", "no sink"),
    ):
        assert fault in error_of(f"push {tmp_path / what} me/x --dry-run", capsys)
    assert "a repository is OWNER/NAME, but this is 'house'" in error_of(
        f"push {tmp_path} house --dry-run", capsys
    )


def test_the_command_exports_the_model_of_a_run(tmp_path, capsys):
    save_tiny(tmp_path / "run" / "model", 1)
    (tmp_path / "run" / "run.json").write_text("{}")
    assert "trust_remote_code=True" in out_of(
        f"export {tmp_path / 'run'} --to {tmp_path / 'exported'}", capsys
    )
    assert load(tmp_path / "exported").model.config.sink_count == 1
    assert "transformers loads it as it is" in error_of(
        f"export tiny-causal --to {tmp_path / 'causal'}", capsys
    )


def test_the_command_makes_a_site(traced, tmp_path, capsys):
    shutil.copytree(traced, tmp_path / "house")
    given = f"{tmp_path / 'house'} --out {tmp_path / 'site'} --title Mine"
    assert "(1 runs)" not in (said := out_of(f"gallery {given}", capsys)) and "index.html" in said
    assert "house/report.html" in (tmp_path / "site" / "index.html").read_text("utf-8")
    assert "at least one run" in error_of(f"gallery --out {tmp_path / 'none'}", capsys)
