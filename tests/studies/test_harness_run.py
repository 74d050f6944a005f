"""`evaluate`: its run folder, what a resumed run asks for, and what is refused."""

import math
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import pytest

pytest.importorskip("lm_eval")

from refusals import refused
from sinklab.lab.records import open_run
from sinklab.lab.studies.benchmarks import harness_model, requests
from sinklab.lab.studies.benchmarks.study import EvalSettings, Evaluation
from sinklab.lab.studies.benchmarks.tables import rows_of, score_sentences
from tiny_diffusion import tiny_loaded
from tiny_llama import tiny_llama
from tiny_tasks import toy_tasks

SETTINGS = EvalSettings(
    block_length=None, mc_samples=4, limit=4, batch=2, mask_sinks=1, record_sinks=2
)


def run_toys(settings=SETTINGS, loaded=None, out="run", **named):
    loaded = tiny_loaded(1) if loaded is None else loaded
    return open_run(Evaluation(toy_tasks())(loaded, Path(out), settings, **named))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return run_toys(out=tmp_path_factory.mktemp("toys") / "run")


@pytest.mark.slow
def test_scores_are_means_over_samples(finished):
    assert (finished.info.kind, finished.info.status) == ("benchmark", "complete")
    assert finished.info.settings["tasks"] == ["toy_texts", "toy_choices", "toy_ends"]
    assert not {"batch", "likelihood_batch", "resume"} & finished.info.settings.keys()
    scores, samples = finished.table("scores"), finished.table("samples")
    about = ["task", "metric", "filter", "samples", "higher_is_better"]
    assert scores.loc[:1, about].to_numpy().tolist() == [
        ["toy_texts", "exact_match", "vowel", 4, True],
        ["toy_choices", "acc", "none", 4, True],
    ]
    assert samples.groupby("task")["doc_id"].apply(list).tolist() == [[0, 1, 2, 3]] * 3
    for row in scores.to_dict("records"):
        part = samples[samples["task"] == row["task"]]
        assert row["value"] == pytest.approx(part["right"].mean())
        assert row["stderr"] == pytest.approx(part["right"].std(ddof=1) / 2)
    texts = samples[samples["task"] == "toy_texts"]
    missing = [not set("aeiou") & set(text) for text in texts["response"]]
    assert texts["no_answer"].tolist() == missing
    assert scores["no_answer"][0] == pytest.approx(sum(missing) / 4)
    assert scores["no_answer"][1:].isna().all()
    assert (texts["steps"] == 6).all()
    assert texts["prompt"].str.startswith("The old man sat").all()


def test_the_likelier_choice_is_the_answer(finished):
    samples = finished.table("samples")
    rows = samples[samples["task"] == "toy_choices"].to_dict("records")
    for row in rows:
        best = ("rain", "wind")[int(row["logprobs"][1] > row["logprobs"][0])]
        assert row["answer"] == best
        assert row["right"] == float(best == ("rain", "wind")[int(row["target"])])
        assert len(row["stderrs"]) == 2
    assert all(len(row) == 1 for row in samples[samples["task"] == "toy_ends"]["logprobs"])


def test_sinks_are_those_of_the_watched_requests(finished):
    sinks = finished.table("sinks")
    assert set(sinks["task"]) == {"toy_texts", "toy_choices", "toy_ends"}
    assert set(sinks["doc_id"]) == {0, 1}
    assert len(sinks) == 2 * (2 + 4 + 2), "documents × layers, and two choices of one task"
    written = sinks[sinks["task"] == "toy_texts"]
    assert (written["steps"] == 6).all()
    assert written["share"].between(0, 1, inclusive="neither").all()
    assert sinks[sinks["task"] == "toy_choices"]["in_masked"].isna().all()


def test_lines_say_what_was_not_found(finished):
    lines = score_sentences(finished)
    missing = finished.table("scores")["no_answer"][0]
    expected = f"; no answer found in {missing:.0%}" if missing else ""
    assert lines[0].startswith("toy_texts: exact_match (vowel) 0.0000 ± ")
    assert lines[0].endswith(f"on 4 documents{expected}")
    assert len(lines) == 6
    for line, protocol in zip(lines[3:], ("paper", "clean", "clean"), strict=True):
        assert f"protocol {protocol} (most attended keys): 1.00 keys a head" in line
        assert line.endswith("on 4 documents (what was removed: on 2)")


def test_the_dose_of_each_task_is_recorded(finished):
    doses = finished.table("doses").set_index("task")
    assert doses["protocol"].to_dict() == {
        "toy_texts": "paper",
        "toy_choices": "clean",
        "toy_ends": "clean",
    }
    used = {"toy_texts": "block_keys:keys=top:k=1,when=previous"} | dict.fromkeys(
        ("toy_choices", "toy_ends"), "block_keys:keys=top:k=1,when=clean"
    )
    assert doses["edits"].to_dict() == used
    assert (doses["keys"] == 1).all()
    assert doses[["documents", "measured"]].to_numpy().tolist() == [[4, 2]] * 3
    assert doses["removed"].between(0, 1, inclusive="neither").all()


def asked_for(monkeypatch):
    """Numbers of texts and continuations that the model is asked for from now on."""
    sizes = []

    def counted(own):
        def count(*given, **named):
            sizes.append(len(given[1]))
            return own(*given, **named)

        return count

    for name in ("write_batch", "score"):
        monkeypatch.setattr(requests, name, counted(getattr(requests, name)))
    return sizes


def same(one, other):
    for name in ("scores", "samples", "sinks", "doses"):
        left, right = one.table(name), other.table(name)
        assert left.equals(right), (name, left, right)


@pytest.mark.slow
def test_an_interrupted_run_asks_for_what_is_missing(finished, monkeypatch):
    monkeypatch.setattr(harness_model, "PART", 2)
    said = []

    def stop(text):
        said.append(text)
        if text.startswith("toy_choices"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_toys(progress=stop)
    assert open_run("run").info.status == "interrupted"
    sizes = asked_for(monkeypatch)
    resumed = run_toys(progress=said.append)
    assert sum(sizes) == 3 * 4, "two choices and one end for each document, and no text again"
    assert [task for task, _ in groupby(said)] == ["toy_texts", "toy_choices", "toy_ends"]
    assert resumed.info.status == "complete"
    same(resumed, finished)
    sizes.clear()
    # another pace is no other run
    paced = replace(SETTINGS, batch=1, likelihood_batch=5)
    same(run_toys(paced), finished)
    assert sizes == []


def test_an_autoregressive_model_is_scored_too():
    said = []
    settings = replace(SETTINGS, mask_sinks=2, limit=1, num_fewshot=2)
    run = run_toys(settings, tiny_llama(), progress=said.append)
    assert "toy_texts keeps its 0 worked examples: lm-eval does not allow another number" in said
    assert run.info.model["family"] == "autoregressive"
    assert len(run.table("scores")) == 3
    samples = run.table("samples")
    assert (samples[samples["task"] == "toy_choices"]["stderrs"].map(max) == 0).all()


@pytest.mark.slow
def test_long_prompts_are_cut_and_counted():
    settings = replace(SETTINGS, new_tokens=30, mask_sinks=None, record_sinks=0)
    run = run_toys(settings, tiny_loaded(context=48))
    cut = run.table("samples").query("task == 'toy_texts'")["cut"]
    assert (cut > 0).any()
    line = (
        f"toy_texts: {(cut > 0).sum()} of 4 prompts were longer than the context and lost "
        "their left end"
    )
    assert line in score_sentences(run)


def test_right_is_no_metric_of_which_less_is_better():
    row = {"doc_id": 0, "filter": "none", "arguments": [("a", " b")], "target": " b"}
    row |= {"resps": [[(-9.7, True)]], "filtered_resps": [(-9.7, True)]}
    row |= {"metrics": ["perplexity", "acc"], "perplexity": -9.7, "acc": 1}
    better = {"ends": {"perplexity": False, "acc": True}}
    results = {"samples": {"ends": [row]}, "results": {}, "higher_is_better": better}
    assert rows_of(results, {})[1][0]["right"] == 1.0
    row["metrics"] = ["perplexity"]
    assert math.isnan(rows_of(results, {})[1][0]["right"])


def test_without_lm_eval_the_remedy_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda *_: None)
    refused(r"pip install 'sinklab\[eval\]'", Evaluation(), tiny_loaded, Path("run"), SETTINGS)
