import json
import re
import shlex
from importlib import import_module
from pathlib import Path

import pytest

import sinklab
from commands import cli, out_of
from sinklab.lab.cli import main
from tiny_diffusion import tiny_model

GREEDY = "--temperature 0 --rule low_confidence"
COMMANDS = (
    "tour",
    "generate",
    "serve",
    "info",
    "validate",
    "trace",
    "train",
    "report",
)


def help_of(command, capsys):
    with pytest.raises(SystemExit) as end:
        cli(f"{command} --help")
    assert end.value.code == 0
    return capsys.readouterr().out


def examples(text):
    whole = re.sub(r"\\\n\s*", "", text.partition("Try")[2])
    lines = [line.strip() for line in whole.splitlines()]
    # a launcher runs the same command as a module
    lines = [
        re.sub(r"^accelerate launch .*-m sinklab(?:\.cli)? ", "sinklab ", line) for line in lines
    ]
    return [
        part.strip() for line in lines if line.startswith("sinklab ") for part in line.split("&&")
    ]


class Reached(BaseException):
    """An example was understood, and its command began its work."""


REACHED = {
    "lab.checkpoints.loading": "load",
    "lab.checkpoints.info": "describe",
    "extras.validate.command": "Saved",
    "lab.training.run": "train",
    "lab.training.checkpoints": "settings_of",
    "lab.records.reading": "open_run",
    "lab.cli.options": "read_info",
}


@pytest.mark.ring("extras")
@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_teaches_by_examples_that_can_be_typed(command, capsys, monkeypatch):
    text = help_of(command, capsys)
    Path("runs/plain").mkdir(parents=True)
    Path("questions.jsonl").write_text('{"question": "What is 17 + 25?"}\n' * 30)
    found = examples(text)
    assert any(example.startswith(f"sinklab {command}") for example in found), text

    def reached(*_, **__):
        raise Reached

    for module, name in REACHED.items():
        monkeypatch.setattr(f"sinklab.{module}.{name}", reached)
        # a package keeps what it has once looked up
        package = import_module(f"sinklab.{module.rpartition('.')[0]}")
        monkeypatch.setitem(vars(package), name, reached)
    for example in found:
        with pytest.raises(Reached):
            main(shlex.split(example)[1:])


def test_generate_prints_what_the_model_writes(model, capsys):
    options = f"--model {model} --new-tokens 6 --block-length None {GREEDY}"
    both = out_of(f"generate 'The old man' 'The sea' {options}", capsys)
    assert both.startswith("The old man")
    assert "\nThe sea" in both
    alone = out_of(f"generate 'The sea' {options}", capsys)
    loaded = sinklab.load(model)
    ids = loaded.tokenizer("The sea", return_tensors="pt")["input_ids"]
    written = loaded.model.generate(ids, max_new_tokens=6)
    assert alone == loaded.tokenizer.decode(written[0], skip_special_tokens=True) + "\n"
    assert both.endswith(alone)


def test_without_tokenizer_files_a_prompt_is_ids(tmp_path, capsys):
    tiny_model(1).save_pretrained(tmp_path / "ids")
    options = f"--model {tmp_path / 'ids'} --new-tokens 6 --block-length 3 --cache dual {GREEDY}"
    both = [
        [int(part) for part in line.split()]
        for line in out_of(f"generate '5 17, 3' 9 {options}", capsys).splitlines()
    ]
    assert [len(row) for row in both] == [9, 7]
    assert (both[0][:3], both[1][:1]) == ([5, 17, 3], [9])
    assert [int(part) for part in out_of(f"generate 9 {options}", capsys).split()] == both[1]


def test_info_reads_the_config_alone(model, tmp_path, capsys):
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_text((Path(model) / "config.json").read_text())
    lines = out_of(f"info {tmp_path / 'bare'}", capsys)
    parameters = sinklab.load(model).model.num_parameters()
    assert re.search(rf"^parameters +{parameters:,}$", lines, re.M)
    facts = json.loads(out_of(f"info {tmp_path / 'bare'} --json", capsys))
    assert (facts["parameters"], facts["sink"]) == (parameters, "1 (token, front)")
    assert facts["memory_bytes"]["bfloat16"]["weights"] == 2 * parameters


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (
            "generat",
            "command must be one of .*, but is 'generat'; did you mean 'generate'",
        ),
        ("generate", "generate needs a prompt, e.g."),
        (
            "generate x --model tiny-snik",
            "no model can be loaded from 'tiny-snik'.*did you mean 'tiny-sink'",
        ),
        (
            "generate x --model {model} --new-tokens -1",
            "new_tokens must be at least 0, .* but is -1",
        ),
        (
            "train",
            "a corpus is needed; name a folder",
        ),
        (
            "trace x --prompts p.txt --model {model}",
            "arguments or from a file, but there are both: 'x'",
        ),
        ("trace --prompts p.txt --model {model}", "p.txt is none or does not exist"),
        ("trace --samples 3 --model {model}", "--samples takes the first prompts of a file"),
        (
            "trace --out {model} --model {model}",
            "is written into an empty or absent folder, but .* is taken",
        ),
        ("report", "report needs at least one run folder"),
    ],
)
def test_a_mistake_is_one_line_on_stderr_and_status_2(command, message, model, tmp_path, capsys):
    capsys.readouterr()
    assert cli(command.format(model=model)) == 2
    printed = capsys.readouterr()
    # stages that were passed stand above it
    *stages, error = printed.err.splitlines()
    assert re.fullmatch(rf"sinklab: .*{message}.*", error), printed.err
    assert all(re.fullmatch(r" +\d+\.\d s  .*", stage) for stage in stages)
    assert printed.out == ""
    assert list(tmp_path.iterdir()) == []


def test_an_interruption_is_said_and_has_its_own_status(monkeypatch, capsys):
    def interrupted(settings, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("sinklab.lab.training.run.train", interrupted)
    assert cli("train") == 130
    assert (
        capsys.readouterr().err.splitlines()[-1]
        == "sinklab: interrupted; a run folder that was begun is kept"
    )


def test_generate_samples_unless_told_otherwise(model, capsys):
    texts = set()
    for options in ("", "--seed 0", "--seed 1", GREEDY):
        assert cli(f"generate 'The sea' --model {model} --new-tokens 16 {options}") == 0
        texts.add(capsys.readouterr().out)
    assert len(texts) == 3, "seed 0 is the default"
