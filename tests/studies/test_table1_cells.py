"""The cells of Table 1: one run folder each, with the paper's protocol."""

from dataclasses import replace
from pathlib import Path

import pytest

from refusals import refused
from sinklab.core.sinks import Gu
from sinklab.lab.studies import kept_record
from sinklab.lab.studies.benchmarks.offline import LIKELIHOODS, SOURCES
from sinklab.lab.studies.benchmarks.run import cells_of, table1
from sinklab.lab.studies.benchmarks.study import EvalSettings, Evaluation, Plan

SETTINGS = EvalSettings(tasks=("gsm8k", "humaneval"), run_code=True)


def test_the_paper_s_protocol_a_folder_a_cell():
    cells = cells_of(Path("a"), SETTINGS, Plan(ks=(5,)))
    found = {
        str(folder): (cell.tasks, cell.mask_sinks, cell.new_tokens, cell.run_code)
        for folder, cell in cells.items()
    }
    # nor does a cell depend on what is allowed for another
    assert found == {
        "a/gsm8k-k0": (("gsm8k",), None, 256, False),
        "a/gsm8k-k5": (("gsm8k",), 5, 256, False),
        "a/humaneval-k0": (("humaneval",), None, 512, True),
        "a/humaneval-k5": (("humaneval",), 5, 512, True),
    }
    paper = (32, 0.0, None, False)
    for cell in cells.values():
        assert (cell.block_length, cell.temperature, cell.steps, cell.chat) == paper


def test_protocols_stand_side_by_side_and_likelihoods_know_the_clean_pass_alone():
    how = {"protocols": ("paper", "held", "rule"), "controls": ("sinks", "equal_mass")}
    plan = Plan(ks=(5,), sink_rule="gu", **how)
    settings = replace(SETTINGS, tasks=("gsm8k", "piqa"), new_tokens=7)
    cells = cells_of(Path(), settings, plan)
    arms = ("", "-matched", "-equal_mass")
    assert [path.name for path in cells] == [
        "gsm8k-k0",
        *(f"gsm8k-k5{own}{arm}" for own in ("", "-held", "-rule") for arm in arms),
        "piqa-k0",
        *(f"piqa-k5{own}{arm}" for own in ("", "-rule") for arm in arms),
    ]
    held = cells[Path("gsm8k-k5-held-matched")]
    assert (held.mask_sinks, held.sink_rule, kept_record(held)["sink_rule"]) == (5, Gu(), "gu")
    plain = cells[Path("piqa-k0")]
    assert (plain.protocol, plain.control, plain.sink_rule) == ("paper", "sinks", None)


def test_models_are_loaded_one_after_the_other(monkeypatch):
    done = []
    monkeypatch.setattr("sinklab.lab.studies.benchmarks.run.read_tasks", lambda settings: None)
    monkeypatch.setattr(
        Evaluation, "__call__", lambda _, load, out, cell, **how: done.append((load(), out)) or out
    )
    said, loads = [], []
    models = {name: lambda name=name: loads.append(name) or name for name in "ab"}
    settings = replace(SETTINGS, tasks=("gsm8k",))
    folders = table1(models, settings, "t", Plan(ks=(5,)), progress=said.append)
    assert done == [(str(folder.parent.name), folder) for folder in folders]
    assert loads == ["a", "b"] and len(folders) == 4
    assert said[:2] == [
        "a, gsm8k, nothing blocked",
        "a, gsm8k, protocol paper, 5 most attended keys blocked",
    ]
    refused("leave out mask_sinks and", table1, {}, EvalSettings(mask_sinks=5), Path())


def test_the_tasks_of_likelihoods_are_those_that_lm_eval_calls_so():
    lm_eval = pytest.importorskip("lm_eval")
    from lm_eval.tasks._yaml_loader import load_yaml

    root = Path(lm_eval.__file__).parent / "tasks"
    kinds = {
        name: load_yaml(root / one.include, resolve_func=False).get("output_type")
        for name, one in SOURCES.items()
    }
    assert {name for name, kind in kinds.items() if kind != "generate_until"} == LIKELIHOODS


def test_plans_that_make_no_sense():
    refused("ks must be at least 0", Plan, ks=(-1,))
    refused("'rndom'; did you mean 'random'", Plan, controls=("rndom",))
    refused("controls must not be empty", Plan, controls=())
