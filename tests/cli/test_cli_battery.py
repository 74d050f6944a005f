"""`sinklab battery`: several models of both kinds, their report, and what is refused."""

import pytest
from transformers.utils import logging

from refusals import refused
from sinklab.lab.cli import main
from sinklab.lab.cli.command import conduct
from sinklab.lab.records import open_run
from sinklab.lab.studies.battery import Battery, BatterySettings
from sinklab.lab.studies.battery.study import of_kind
from tiny_diffusion import save_tiny, tiny_loaded, tiny_tokenizer
from tiny_llama import tiny_llama

SMALL = {
    "skills": ("arithmetic", "copying"),
    "levels": (1,),
    "problems": 2,
    "ks": (5,),
    "new_tokens": 4,
    "twin": False,
}


def battery(models, out, *, settings=None, resume=False):
    print("\n".join(conduct(Battery(), models, out, settings or BatterySettings(), resume=resume)))


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A diffusion model and an autoregressive one, as training leaves them: RUN/model."""
    logging.disable_progress_bar()
    root = tmp_path_factory.mktemp("models")
    save_tiny(root / "dlm" / "model")
    tiny_llama().model.save_pretrained(root / "ar" / "model")
    tiny_tokenizer().save_pretrained(root / "ar" / "model")
    return str(root / "dlm" / "model"), str(root / "ar" / "model")


def test_a_battery_without_random_keys_is_told_beside_its_twins(
    models, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr("sinklab.lab.studies.battery.figures.write_battery_figures", lambda *_: [])
    small = SMALL | {"ks": (0, 2), "skills": ("copying",), "controls": ("sinks",), "twin": True}
    battery(models[:1], tmp_path / "out", settings=BatterySettings(**small))
    said = capsys.readouterr().out
    assert (
        "most attended keys" in said
        and "random keys" not in said
        and "No untrained control" not in said
    )


@pytest.mark.slow
def test_models_of_both_kinds_are_scored_side_by_side(models, tmp_path, capsys, monkeypatch):
    settings = BatterySettings(
        **SMALL, conditions=("pure", "blocks-2"), controls=("sinks", "random")
    )
    battery(models, tmp_path / "out", settings=settings)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(
        "dlm, pure: 0 of 2 skills are above 90% at level 1 with nothing blocked (not arithmetic 0%"
    )
    assert sum(line.startswith("dlm, blocks-2: ") for line in lines) == 3
    said = next(
        line for line in lines if line.startswith("ar: most attended keys, protocol paper: ")
    )
    assert " keys a head (" in said
    # seven tokens cannot lose five random columns beside five sinks
    assert "ar: 1 of 6 parts left out, questions too short for so many keys" in lines
    assert lines[-1] == f"tables and figures: {tmp_path / 'out' / 'report'} (7 files)"
    runs = [open_run(tmp_path / "out" / name) for name in ("dlm", "ar")]
    assert [run.info.settings["conditions"] for run in runs] == [["pure", "blocks-2"], ["greedy"]]
    assert (tmp_path / "out" / "report" / "battery_by_skill.png").is_file()
    refused("A run folder is written once", battery, models, tmp_path / "out", settings=settings)
    # drawn once is enough
    monkeypatch.setattr("sinklab.lab.studies.battery.figures.write_battery_figures", lambda *_: [])
    battery(models, tmp_path / "out", settings=settings, resume=True)
    assert capsys.readouterr().out.splitlines()[:-1] == lines[:-1]


def test_the_command_line_reaches_every_setting(models, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("sinklab.lab.studies.battery.figures.write_battery_figures", lambda *_: [])
    options = (
        "--skills copying --levels 1 2 --problems 1 --ks 2 --controls clean_pass "
        "--conditions random --no-twin"
    )
    arguments = [
        "battery",
        models[0],
        "--out",
        str(tmp_path / "out"),
        "--seed",
        "4",
        "--batch",
        "2",
        *options.split(),
    ]
    arguments += ["--new-tokens", "3"]
    assert main(arguments) == 0
    assert f"run folders: {tmp_path / 'out' / 'dlm'}" in capsys.readouterr().out
    info = open_run(tmp_path / "out" / "dlm").info
    assert info.seed == 4
    asked = {
        "skills": ["copying"],
        "levels": [1, 2],
        "problems": 1,
        "ks": [0, 2],
        "controls": ["clean_pass"],
        "protocols": ["paper"],
        "sink_rule": None,
    }
    assert info.settings == asked | {
        "conditions": ["random"],
        "new_tokens": 3,
        "seed": 4,
        "batch": 2,
    }, "a random order depends on the batch"
    assert main([*arguments, "--resume", "--problems", "2"]) == 2
    assert "its settings['problems'] is 1, and now it is 2" in capsys.readouterr().err
    assert main(["battery", models[0], "--conditions", "blocks-x"]) == 2
    assert "a condition is made of" in capsys.readouterr().err


def test_what_makes_no_sense_is_refused(models, tmp_path):
    refused("battery needs at least one", battery, (), tmp_path)
    refused(
        "did you mean 'copying'",
        lambda: battery(
            models,
            tmp_path / "out",
            settings=BatterySettings(skills=("copyng",)),
        ),
    )
    refused("model can be loaded from 'tny'", battery, ("tny",), tmp_path / "out")
    refused(
        "dlm/model can have greedy",
        lambda: battery(
            models[:1],
            tmp_path / "out",
            settings=BatterySettings(conditions=("greedy", "pure")),
        ),
    )
    assert not (tmp_path / "out").exists()


def test_each_model_takes_the_conditions_of_its_kind():
    names = ("pure", "greedy+window-8", "blocks-6")
    assert of_kind(tiny_loaded().family, names) == ("pure", "blocks-6")
    assert of_kind(tiny_llama().family, names) == ("greedy+window-8",)
