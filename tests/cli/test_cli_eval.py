"""`sinklab eval` on a tiny model and a few questions of GSM8K's form."""

import re
from pathlib import Path

import pytest

pytest.importorskip("lm_eval")

from commands import cli
from launched import launch
from refusals import refusing
from sinklab.lab.cli.command import conduct
from sinklab.lab.records import open_run
from sinklab.lab.studies.benchmarks.study import EvalSettings, Evaluation
from tiny_diffusion import save_tiny
from tiny_tasks import write_gsm8k


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    monkeypatch.setenv("TQDM_DISABLE", "1")


@pytest.fixture
def model(tmp_path):
    write_gsm8k(4)
    return str(save_tiny(tmp_path / "model", 1, context=160))


def evaluated(model, settings, **how):
    print("\n".join(conduct(Evaluation(), (model,), Path("out"), settings, **how)))


def test_mistakes_show_before_a_model_is_read(model, monkeypatch):
    monkeypatch.setattr("sinklab.lab.checkpoints.loading.load", None)
    for settings, message in (
        ({"tasks": ("gsm9k",), "data": "data"}, "unknown task 'gsm9k'; did you mean 'gsm8k'"),
        ({"tasks": ("piqa",), "data": "data"}, "piqa needs its"),
        ({"tasks": ("humaneval",), "data": "data"}, "allow it with --run-code"),
    ):
        with refusing(message):
            evaluated(model, EvalSettings(**settings))
        assert not Path("out").exists()


def test_a_benchmark_is_scored_masked_and_resumed_from_the_command_line(model, capsys):
    asked = f"eval --model {model} --data data --num-fewshot 0 --new-tokens 4 --limit 2 --out out"
    asked += " --tasks gsm8k,gsm8k --mask-sinks 1 --edits window_attention:radius=8"
    assert cli(asked.replace("window_attention", "window_atention")) == 2
    assert "did you mean 'window_attention'" in capsys.readouterr().err
    assert cli(asked) == 0
    printed = capsys.readouterr()
    assert re.search(r"at this rate the whole takes 0:\d\d:\d\d$", printed.err, re.M)
    lines = printed.out.splitlines()
    assert lines[0] == "run folder: out"
    assert lines[1].startswith("gsm8k: exact_match (strict-match) 0.0000 ± 0.0000 on 2 documents")
    run = open_run("out")
    kept = [run.info.settings[name] for name in ("tasks", "mask_sinks", "edits")]
    assert kept == [["gsm8k"], 1, ["window_attention:radius=8"]]
    assert run.table("samples")["prompt"][0] == "Question: What is 0 and 0?\nAnswer:"
    assert cli(asked) == 0
    assert cli(asked.replace("--limit 2 --out out", "--out whole")) == 0
    assert "at this rate" not in capsys.readouterr().err


SUMS = """
task: my_plain
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}, cache_dir: {cache}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{q}}}}"
doc_to_target: "{{{{a}}}}"
generation_kwargs: {{until: ["zzz"], max_gen_toks: 4}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""


@pytest.fixture
def own_tasks(tmp_path):
    """A task file of one's own."""
    folder = tmp_path / "own"
    folder.mkdir()
    (folder / "rows.jsonl").write_text('{"q": "The sea", "a": "4"}\n' * 2)
    text = SUMS.format(rows=folder / "rows.jsonl", cache=tmp_path / "data_sets")
    (folder / "plain.yaml").write_text(text)
    return str(folder)


# nothing is imported or registered so far, as in a new interpreter
OWN = """
import runpy, sys
from functools import partial
import lm_eval.tasks
from lm_eval.api.registry import model_registry
model_registry._clear()
# thousands of files of lm-eval's own tasks are left alone
lm_eval.tasks.TaskManager = partial(lm_eval.tasks.TaskManager, include_defaults=False)
for name in ("lm_eval", "lab.studies.benchmarks.harness_model"):
    sys.modules.pop(f"sinklab.{name}", None)
runpy.run_module("sinklab.lm_eval", run_name="__main__")
"""


@pytest.mark.slow
def test_lm_evals_own_command_line_has_our_model(model, own_tasks, python):
    given = f"--model sinklab --model_args pretrained={model},block_length=None --tasks my_plain"
    done = launch(python, "-c", OWN, "run", *given.split(), "--include_path", own_tasks)
    assert done.returncode == 0, done.stderr
    assert "sinklab ({'pretrained'" in done.stdout and "|my_plain|" in done.stdout
