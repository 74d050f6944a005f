"""The benchmarks themselves, end to end and offline on the packaged model, where their files are at
hand.
"""

import pytest

from shared_data import shared
from sinklab.lab.cli import main
from sinklab.lab.records import open_run

TASKS = ("gsm8k", "humaneval", "hellaswag", "arc_easy", "piqa", "lambada_openai")


@pytest.mark.slow
def test_the_benchmarks_run_offline_on_the_packaged_model(tmp_path, capsys):
    pytest.importorskip("lm_eval")
    data = str(shared("data"))
    words = [
        "eval",
        "--tasks",
        *TASKS,
        "--data",
        data,
        "--run-code",
        "--limit",
        "2",
        "--num-fewshot",
        "0",
    ]
    words += ["--mask-sinks", "5", "--new-tokens", "8", "--mc-samples", "2", "--record-sinks", "1"]
    assert main([*words, "--out", str(tmp_path / "run")]) == 0, capsys.readouterr().err
    run = open_run(tmp_path / "run")
    scores = run.table("scores")
    assert set(scores["task"]) == set(TASKS) and set(scores["samples"]) == {2}
    assert set(run.table("samples")["task"]) == set(TASKS)
    watched = run.table("sinks")
    assert set(watched["task"]) == set(TASKS)
    assert watched.loc[watched["task"] == "gsm8k", "removed"].between(0, 1).all()
    assert list(tmp_path.glob("run/results_*.json")), "lm-eval's own results lie beside"
    assert f"run folder: {tmp_path / 'run'}" in capsys.readouterr().out
