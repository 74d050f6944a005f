"""Tables of benchmarks: the answers are chosen here, so the tables must give them back."""

import json
import math
import re
from contextlib import suppress

import numpy as np
import pandas as pd
import pytest
from test_report_training import made

from refusals import refused
from shared_data import shared
from sinklab.lab.records import RunWriter, open_run
from sinklab.lab.reports.printed import latex
from sinklab.lab.studies.benchmarks.onetoken import (
    TABLES,
    onetoken_numbers,
    onetoken_text,
    read_scores,
    write_onetoken,
)
from sinklab.lab.studies.benchmarks.table1 import (
    equal_mass_text,
    lost_text,
    read_cells,
    table1_numbers,
    table1_text,
    write_table1,
)
from sinklab.lab.studies.benchmarks.tables import TABLE1, Benchmark, found_in


def benchmark(
    folder,
    right,
    *,
    k=0,
    control="sinks",
    model=None,
    finished=True,
    choices=0,
    dose=None,
    **settings,
):
    """A run of kind "benchmark": task -> which documents are right, of so many choices."""
    about = {"name": "tiny", "family": "diffusion", "weights_sha256": "w", "sink_kind": "none"}
    about |= {"sink_count": 0, "hidden_size": 8, "layers": 2, "heads": 1} | (model or {})
    given = {"tasks": [*right], "mask_sinks": k or None, "control": control, "limit": None}
    given |= {"edits": []} | settings
    scores, samples = [], []
    for task, flags in right.items():
        metric, filters = "acc", ("none",)
        if task == "gsm8k":
            metric, filters = "exact_match", ("strict-match", "flexible-extract")
        for number, name in enumerate(filters):
            # of the strict filter nothing is right
            values = [flag * (number + 1 == len(filters)) for flag in flags]
            share = float(np.mean(values))
            measured = {metric: share} | ({"acc_norm": 1 - share} if task == "arc_easy" else {})
            row = {"task": task, "filter": name, "samples": len(flags), "stderr": 9.0}
            row |= {"no_answer": 0.25 if task == "gsm8k" else math.nan, "higher_is_better": True}
            scores += [row | {"metric": one, "value": value} for one, value in measured.items()]
            samples += [
                {"task": task, "filter": name, "doc_id": place, "right": float(value)}
                | {"metrics": json.dumps({metric: value}), "logprobs": [-1.0] * choices}
                for place, value in enumerate(values)
            ]
    found = {"scores": scores, "samples": samples}
    if k:
        dose = DOSE | {"protocol": settings.get("protocol", "paper")} | (dose or {})
        found["doses"] = [{"task": task, **dose} for task in right]
    writer = RunWriter(folder, kind="benchmark", model=about, settings=given, seed=0)
    with suppress(KeyboardInterrupt), writer as run:
        if not finished:
            raise KeyboardInterrupt
        for name, rows in found.items():
            run.table(name, rows)
    return open_run(folder)


DOSE = {"keys": 2.0, "sinks": 0.25, "held": 0.3, "removed": 0.2, "overlap": 0.5, "matched": 0.8}


def numbers_of(*folders):
    return table1_numbers(*read_cells(found_in(folders)[0]))


def against_equal_mass(root):
    cells = read_cells(found_in([root])[0])
    return equal_mass_text(*cells).to_dict("records")


def piqa(folder, right=90, lost=0, *how, **dose):
    """A run of a task with two choices, and its dose."""
    given = {"choices": 2, "dose": {"protocol": "clean"} | dose}
    return benchmark(folder, {"piqa": flags(100, right, lost)}, **given, **dict(how))


def test_each_masked_score_has_its_dose_and_protocols_are_columns(tmp_path):
    piqa(tmp_path / "0")
    piqa(tmp_path / "2", 90, 60, ("k", 2), matched=math.nan)
    none = dict.fromkeys(DOSE, 0.0) | {"sinks": math.nan, "protocol": "rule"}
    piqa(tmp_path / "2r", 90, 0, ("k", 2), ("protocol", "rule"), **none)
    numbers = numbers_of(tmp_path)
    text = table1_text(numbers)
    assert list(text.columns) == ["task", "model", "source", "none", "2, clean", "2, rule"]
    # likelihoods know the clean pass alone, whatever was asked for
    assert text["2, clean"][0] == "0.300 ± 0.046"
    cells = lost_text(numbers).set_index("masked")
    shares = [f"{share}\u00a0%" for share in ("25.0", "30.0", "20.0")]
    assert cells.loc["2, clean", "keys a head":].tolist() == ["2.00", *shares, "–"]
    # a dose of zero is a result
    assert cells.loc["2, rule", "keys a head":].tolist() == ["0.00", "–", *["0.0\u00a0%"] * 3]
    assert cells["verdict"].to_dict() == {"2, clean": "drops", "2, rule": "holds"}
    assert against_equal_mass(tmp_path) == []


@pytest.mark.parametrize(
    "heads, verdict",
    [(0.5, "cost more"), (0.49, "inconclusive, 49.0\u00a0% of heads have such others")],
)
def test_keys_are_held_against_others_of_equal_mass_if_enough_heads_have_such(
    heads, verdict, tmp_path
):
    piqa(tmp_path / "0")
    piqa(tmp_path / "m", 90, 40, ("k", 2), ("control", "matched"), matched=heads)
    piqa(tmp_path / "e", 90, 10, ("k", 2), ("control", "equal_mass"))
    (row,) = against_equal_mass(tmp_path)
    assert (row["task"], row["model"], row["masked"]) == ("piqa", "tiny", "2, clean")
    # 30 of 100 more are lost: Agresti and Min
    assert row["points"].startswith("−30.0 (−38.") and row["verdict"] == verdict


def test_a_task_at_chance_has_nothing_to_lose(tmp_path):
    # chance is one in two, and two standard errors of 100 questions are 10 points
    for right, word in ((59, "floor"), (61, "drops")):
        piqa(tmp_path / word / "0", right)
        piqa(tmp_path / word / "5", right, 55, ("k", 5))
        assert numbers_of(tmp_path / word)["verdict"].tolist()[1] == word


def flags(count, right, lost=0, gained=0):
    """The first `right` are right; of these `lost` become wrong, and `gained` of the others
    right.
    """
    return [0] * lost + [1] * (right - lost) + [1] * gained + [0] * (count - right - gained)


@pytest.fixture(scope="module")
def table1_folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("table1")
    for k, (lost, gained) in {0: (0, 0), 1: (4, 2), 5: (25, 5), 10: (150, 0)}.items():
        benchmark(root / "tiny" / f"gsm8k-k{k}", {"gsm8k": flags(400, 200, lost, gained)}, k=k)
    random = {"gsm8k": flags(400, 200, 0, 0)}
    benchmark(root / "tiny" / "gsm8k-k10-random", random, k=10, control="random")
    return root


def test_table_1_pairs_by_question_and_says_what_is_sure(table1_folder):
    numbers = numbers_of(table1_folder)
    mine = numbers[numbers["source"] == "measured"].set_index(["control", "k"])
    assert mine["accuracy"].to_dict() == {
        ("sinks", 0): 0.5,
        ("sinks", 1): 0.495,
        ("sinks", 5): 0.45,
        ("sinks", 10): 0.125,
        ("random", 10): 0.5,
    }
    # the filter that finds numbers anywhere, and the binomial error in place of lm-eval's
    assert set(mine["filter"]) == {"flexible-extract"}
    assert mine["stderr"]["sinks", 10] == pytest.approx(math.sqrt(0.125 * 0.875 / 400))
    assert mine["mean"].to_dict() == pytest.approx(
        {
            ("sinks", 0): math.nan,
            ("sinks", 1): -0.005,
            ("sinks", 5): -0.05,
            ("sinks", 10): -0.375,
            ("random", 10): 0.0,
        },
        nan_ok=True,
    )
    # 25 lost and 5 won of 400: Agresti and Min by hand
    p, q, n = 25.5, 5.5, 402
    reach = 1.959964 * math.sqrt(p + q - (p - q) ** 2 / n) / n
    ends = (mine["low"]["sinks", 5], mine["high"]["sinks", 5])
    assert ends == pytest.approx(((q - p) / n - reach, (q - p) / n + reach))
    assert mine["verdict"].dropna().to_dict() == {
        ("sinks", 1): "holds",
        ("sinks", 5): "inconclusive",
        ("sinks", 10): "drops",
        ("random", 10): "holds",
    }
    assert mine["no_answer"]["sinks", 0] == 0.25


def test_table_1_stands_beside_the_paper(table1_folder):
    text = table1_text(numbers_of(table1_folder))
    rows = text.set_index(["source", "model"])
    assert rows.loc[("measured", "tiny"), "10, paper"] == "0.125 ± 0.017"
    assert rows.loc[("measured", "tiny, random keys"), "10, paper"] == "0.500 ± 0.025"
    assert rows.loc[("measured", "tiny, random keys"), "1, paper"] == "–"
    assert rows.loc[("published", "LLaDA-8B"), "10, paper"] == "0.55 ± 0.01"
    assert list(text["source"]) == ["measured"] * 2 + ["published"] * 4
    assert set(text["task"]) == {"GSM8K"}


def test_runs_with_other_settings_or_weights_are_not_compared(tmp_path):
    runs = [
        benchmark(tmp_path / "a", {"gsm8k": flags(100, 60)}),
        benchmark(tmp_path / "b", {"gsm8k": flags(50, 10)}, k=5, limit=50),
        benchmark(tmp_path / "c", {"gsm8k": flags(100, 10)}, k=5, model={"weights_sha256": "v"}),
    ]
    numbers = table1_numbers(*read_cells(map(Benchmark, runs)))
    mine = numbers[numbers["source"] == "measured"]
    assert mine["mean"].isna().all()
    assert mine["model"].nunique() == 3
    refused(
        "d both hold gsm8k of tiny",
        read_cells,
        [Benchmark(runs[0]), Benchmark(benchmark(tmp_path / "d", {"gsm8k": flags(100, 61)}))],
    )


def test_table_1_is_written_in_every_form(table1_folder, tmp_path):
    printed = write_table1([table1_folder, tmp_path], tmp_path / "out")
    assert [path.name for path in printed.paths] == [
        f"table1.{end}" for end in ("md", "tex", "csv")
    ]
    assert all(path.stat().st_size > 500 for path in printed.paths)
    text = printed.paths[0].read_text()
    assert "| GSM8K | tiny | measured | 0.500 ± 0.025 | 0.495 ± 0.025 |" in text
    assert "| GSM8K | tiny | 10, paper | −37.5 (−42.1 … −32.6) | 400 | drops |" in text
    assert "0.01 ± 0.03" in text
    assert "presumably a misprint" in text
    tex = printed.paths[1].read_text()
    assert r"GSM8K & tiny & measured & 0.500 $\pm$ 0.025" in tex
    numbers = pd.read_csv(printed.paths[2])
    assert len(numbers) == 5 + 16


def test_latex_escapes():
    table = pd.DataFrame({"a_b": ["50 % & {x} ± 1", "−3 \\ ~"]})
    assert r"a\_b \\" in latex(table, "c#")
    assert r"50 \% \& \{x\} $\pm$ 1 \\" in latex(table, "c#")
    assert r"$-$3 \textbackslash \space \textasciitilde" in latex(table, "c#")
    assert r"\caption{c\#}" in latex(table, "c#")


def test_folders_without_runs_are_named(tmp_path):
    refused(r"but .*nowhere is not a folder", found_in, [tmp_path / "nowhere"])
    refused(f"there is none below {tmp_path}", found_in, [tmp_path])
    benchmark(tmp_path / "half", {"gsm8k": [1]}, finished=False)
    refused("there is none below", write_table1, [tmp_path], tmp_path / "out")


# -- One Token Is Enough


def test_published_numbers_are_the_paper_s():
    papers = sorted(shared("seeds").glob("002*"))
    text = papers[0].read_text(encoding="utf-8")
    printed = [
        tuple(map(float, re.findall(r"\d+\.\d\d", line)))
        for line in re.findall(r"^DLM.*\t.*$", text, re.M)
    ]
    blocks = [rows for table in TABLES[:2] for rows in table["blocks"].values()]
    assert printed == [tuple(row[2:]) for rows in blocks for row in rows]
    for table in TABLES[2:]:
        (rows,) = table["blocks"].values()
        for place, name in enumerate(table["benchmarks"], 2):
            assert "\t".join([name, *(f"{row[place]:.2f}" for row in rows)]) in text
    facts = shared("facts/papers.md")
    for task, models in TABLE1.items():
        for place, words in enumerate(("unmasked", "mask 1", "mask 5", "mask 10")):
            cells = [
                f"{value:.2f}±{error:.2f}"
                for value, error in (cells[place] for cells in models.values())
            ]
            assert f"| {words} | {' | '.join(cells)} |" in facts.read_text(), task


SINK = {"sink_kind": "token", "sink_count": 1}


def trained(root, name, *, start="runs/causal/model", added=0, **settings):
    settings |= {"init_from": start, "hidden_size": 8, "batch": 4, "length": 16}
    return made(root / name, added=added, **(SINK if added else {}), **settings)


@pytest.fixture(scope="module")
def onetoken_folder(tmp_path_factory):
    """A plain model, one with a sink in two seeds, and their scores."""
    root = tmp_path_factory.mktemp("onetoken")
    trained(root, "plain-0", seed=0)
    for seed in (0, 1):
        trained(root, f"sink-{seed}", seed=seed, added=1)
    plain = {"name": str(root / "plain-0" / "model")}
    sink = SINK | {"name": str(root / "sink-0" / "model")}
    for name, model, right in (("plain", plain, 5), ("sink", sink, 8)):
        scored = dict.fromkeys(("arc_easy", "lambada_openai"), flags(10, right))
        benchmark(root / "eval" / name, scored, model=model)
    other = SINK | {"name": str(root / "sink-1" / "model")}
    benchmark(root / "eval" / "other", {"arc_easy": flags(10, 6)}, model=other)
    # a first try of fewer questions does not count, nor are masked runs cells of these tables
    benchmark(root / "eval" / "few", {"arc_easy": [1, 1]}, model=plain, limit=2)
    masked = {"name": sink["name"]}
    benchmark(root / "eval" / "masked", {"piqa": [1]}, k=5, model=masked)
    return root


def onetoken(*folders):
    return onetoken_numbers(read_scores(*found_in(folders)))


def measured(numbers, table):
    found = numbers[(numbers["table"] == table) & (numbers["source"] == "measured")]
    return found.set_index(["row", "column"])


@pytest.mark.slow
def test_each_cell_stands_beside_the_published_one(onetoken_folder):
    numbers = onetoken(onetoken_folder)
    mine = measured(numbers, 1)
    assert mine["value"]["DLM", "ARC-e"] == 50
    assert mine["stderr"]["DLM", "ARC-e"] == pytest.approx(100 * math.sqrt(0.25 / 10))
    assert mine["task"]["DLM", "LAMBADA"] == "lambada_openai"
    assert math.isnan(mine["value"]["DLM + extra token", "PIQA"])
    # two seeds
    cell = mine.loc[("DLM + extra token", "ARC-e")]
    assert (cell["value"], cell["low"], cell["high"], cell["runs"]) == (70, 60, 80, 2)
    assert measured(numbers, 4)["value"]["1", "ARC-e"] == 70
    # Tables 3 and 5 need two of their variants
    assert set(numbers.loc[numbers["source"] == "measured", "table"]) == {1, 4}
    text = onetoken_text(numbers, 1)
    assert text.loc[text["row"] == "DLM + extra token", "ARC-e"].tolist() == [
        "55.47",
        "68.18",
        "70.00 (60.00 to 80.00)",
    ]
    assert text["LAMBADA"].tolist()[-3:] == ["50.00 ± 15.81", "80.00 ± 12.65", "–"]
    assert text["models"].iloc[-1].endswith("parameters, 1,920 tokens (measured)")


def test_a_fine_tuned_model_answers_for_the_one_it_was_made_of(onetoken_folder, tmp_path):
    base = str(onetoken_folder / "sink-0" / "model")
    tuned = trained(tmp_path, "sft", start=base, loss=1.0, added=1, pairs="published")
    model = SINK | {"name": str(tuned.path / "model")}
    benchmark(tmp_path / "eval", {"gsm8k_two_stage": [1, 1, 0, 0]}, model=model)
    mine = measured(onetoken(onetoken_folder, tmp_path), 1)
    assert mine["value"]["DLM + extra token", "GSM8K"] == 50


def test_a_metric_can_be_asked_for(onetoken_folder, tmp_path):
    tables = write_onetoken([onetoken_folder], tmp_path, metric="acc_norm")
    assert [path.name for table in tables for path in table.paths][:4] == [
        "onetoken-1.md",
        "onetoken-1.tex",
        "onetoken-1.csv",
        "onetoken-2.md",
    ]
    mine = measured(pd.read_csv(tables[0].paths[2]), 1).loc["DLM + extra token"]
    assert mine["value"]["ARC-e"] == pytest.approx(30)
    assert mine["metric"]["LAMBADA"] == "acc"
    text = tables[2].paths[0].read_text()
    assert "| Qwen2.5-0.5B, 30B tokens (published) | End | 56.14 |" in text
    assert "models: `sinklab train laptop-from-causal --variant …`" in text
    assert "PIQA as published: `sinklab eval --tasks piqa --estimator chain_rule" in text
