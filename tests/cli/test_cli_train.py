"""`sinklab train`: recipes, variants, and a run with the settings of another."""

import re
from dataclasses import asdict
from pathlib import Path

import pytest

from commands import cli, error_of
from sinklab.lab.training.settings import RECIPES, VARIANTS, recipe
from tiny_diffusion import TEXT

SIZES = (
    "--tokenizer 270 --hidden-size 32 --layers 2 --heads 2 --mlp-size 48 --length 32 --batch 4 "
    "--steps 3 --no-bf16"
)


@pytest.fixture
def settings(monkeypatch):
    """What the command would have trained."""
    seen = []

    def train(given, progress, count):
        seen.append(given)
        return Path(given.out) / "model"

    monkeypatch.setattr("sinklab.lab.training.run.train", train)
    return seen


def test_the_help_lists_recipes_and_variants(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit):
        cli("train --help")
    printed = re.sub(r"[│\s]+", " ", capsys.readouterr().out)
    for name, about in RECIPES.items():
        assert f"{name}: {about}" in printed
    assert ", ".join(VARIANTS) in printed


def test_the_help_of_a_recipe_shows_its_values(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    with pytest.raises(SystemExit):
        cli("train qwen-0.5b --variant gate --help")
    printed = capsys.readouterr().out
    assert "(default: Qwen/Qwen2.5-0.5B)" in printed
    assert re.search(r"--gate STR[\s\S]*elementwise\)", printed)
    assert re.search(r"--steps INT .*\(default: 28610\)", printed)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_what_runs(name, settings):
    assert cli(f"train {name}") == 0
    assert settings == [recipe(name)]


def test_flags_override_the_recipe_and_nothing_else(settings):
    assert cli("train laptop-from-causal --variant=4-sinks --lr 0.5 --no-bf16 --save-every 7") == 0
    expected = asdict(recipe("laptop-from-causal", "4-sinks")) | {
        "lr": 0.5,
        "bf16": False,
        "save_every": 7,
    }
    assert asdict(settings[0]) == expected
    assert settings[0].out == "runs/laptop-from-causal-4-sinks"
    assert settings[0].sink_count == 4


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (
            "train laptop-scrtch",
            "recipe must be one of .*, but is 'laptop-scrtch'; did you mean 'laptop-scratch'",
        ),
        ("train --variant snk", "variant must be one of .*, but is 'snk'; did you mean 'sink'"),
        ("train --steps 3 laptop-causal", "the recipe comes first: sinklab train laptop-causal"),
        ("train --config nowhere --out there", "nowhere cannot be read as settings"),
    ],
)
def test_a_mistake_names_the_remedy(command, message, settings, capsys):
    assert re.search(message, error_of(command, capsys))
    assert settings == []


@pytest.mark.slow
def test_a_run_reproduces_from_its_folder_alone():
    Path("text.txt").write_text(TEXT * 60)
    assert cli(f"train --variant sink --corpus text.txt --out first {SIZES}") == 0
    assert cli("train --config first --out second") == 0
    first, second = (
        Path(name, "model", "weights.sha256").read_text() for name in ("first", "second")
    )
    assert first == second
