"""`sinklab eval` on a tiny model and a few questions of GSM8K's form."""

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("lm_eval")

from sinklab.cli.command import conduct
from sinklab.cli.options import checked, typed
from sinklab.records import open_run
from sinklab.studies.benchmarks.study import EvalSettings, Evaluation
from tiny_diffusion import save_tiny


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    monkeypatch.setenv("TQDM_DISABLE", "1")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def model(tmp_path: Path) -> str:
    data = tmp_path / "data" / "gsm8k"
    data.mkdir(parents=True)
    rows = [{"question": f"What is {n} and {n}?", "answer": f"It is {2 * n}.\n#### {2 * n}"} for n in range(4)]
    (data / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(save_tiny(tmp_path / "model", 1, context=160))


def evaluated(model: str, settings: EvalSettings) -> None:
    print("\n".join(conduct(Evaluation(), (model,), Path("out"), settings)))


def test_a_benchmark_is_scored_masked_and_resumed(model: str, capsys: pytest.CaptureFixture) -> None:
    settings = EvalSettings(
        tasks=("gsm8k,gsm8k",), data="data", limit=2, num_fewshot=0, new_tokens=6, block_length=None, mask_sinks=1
    )
    evaluated(model, settings)
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert lines[0].startswith("gsm8k: exact_match (strict-match) 0.0000 ± 0.0000 on 2 documents")
    assert lines[-1] == "run folder: out"
    assert "writing 2 answers" in printed.err
    run = open_run("out")
    assert (run.info.settings["tasks"], run.info.settings["mask_sinks"]) == (["gsm8k"], 1)
    assert run.table("samples")["prompt"][0] == "Question: What is 0 and 0?\nAnswer:"
    with pytest.raises(ValueError, match="out is taken; choose another folder"):
        evaluated(model, settings)
    evaluated(model, replace(settings, resume=True))
    assert "writing 2 answers, 2 of them there already" in capsys.readouterr().err


def test_mistakes_show_before_a_model_is_read(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sinklab.checkpoints.loading.load", None)
    for settings, message in (
        ({"tasks": ("gsm9k",), "data": "data"}, "unknown task 'gsm9k'; did you mean 'gsm8k'"),
        ({"tasks": ("piqa",), "data": "data"}, "piqa needs its"),
        ({"tasks": ("humaneval",), "data": "data"}, "allow it with --run-code"),
        ({"control": "randon"}, "did you mean 'random'"),
        ({"tasks": ()}, "at least one task"),
    ):
        with pytest.raises(ValueError, match=message):
            evaluated(model, checked(typed(EvalSettings()), **settings))
        assert not Path("out").exists()


def test_the_command_takes_the_same_settings_as_python() -> None:
    given = checked(typed(EvalSettings()), tasks=("piqa, race",), limit=3)
    assert given == EvalSettings(tasks=("piqa", "race"), limit=3)
    assert Evaluation().name == "eval"


def test_it_runs_from_the_command_line(model: str, capsys: pytest.CaptureFixture) -> None:
    from sinklab.cli import main

    common = f"eval --model {model} --tasks gsm8k --data data --num-fewshot 0 --new-tokens 4 --limit 1"
    assert main(shlex.split(f"{common} --out out --edits window_attention:radius=8")) == 0
    assert capsys.readouterr().out.endswith("run folder: out\n")
    assert open_run("out").info.settings["edits"] == ["window_attention:radius=8"]
    assert main(shlex.split(f"{common} --out other --edits window_atention:radius=8")) == 2
    assert "did you mean 'window_attention'" in capsys.readouterr().err
