"""The cells of Table 1: one run folder each, with the paper's protocol, gone on with and never
mixed up.
"""

from dataclasses import replace
from pathlib import Path

import pytest

from refusals import refused
from sinklab.core.sinks import Gu
from sinklab.lab.records import RunWriter, open_run
from sinklab.lab.studies import kept_record
from sinklab.lab.studies.benchmarks.offline import LIKELIHOODS, SOURCES
from sinklab.lab.studies.benchmarks.run import table1
from sinklab.lab.studies.benchmarks.study import EvalSettings, Evaluation, Plan
from tiny_diffusion import tiny_loaded
from tiny_llama import tiny_llama

SETTINGS = EvalSettings(tasks=("gsm8k", "humaneval"))


@pytest.fixture
def asked(monkeypatch):
    """The settings of every cell that was scored; the third fails once."""
    seen = []

    def evaluate(_, loaded, out, settings, *, progress):
        seen.append(settings)
        about = {
            "kind": "benchmark",
            "model": {"name": "m"},
            "settings": kept_record(settings),
        }
        with RunWriter(out, **about, seed=0) as run:
            if len(seen) == 3:
                raise KeyboardInterrupt
            run.table("scores", {"task": list(settings.tasks)})
        return out

    monkeypatch.setattr(Evaluation, "__call__", evaluate)
    monkeypatch.setattr("sinklab.lab.studies.benchmarks.run.read_tasks", lambda settings: None)
    return seen


def cells(settings, plan, **models):
    """The folders of the cells of some models, by default of one that is called `a`."""
    return table1(models or {"a": tiny_loaded}, settings, Path(), plan)


def test_the_paper_s_protocol_a_folder_a_cell(asked):
    asked += [SETTINGS] * 3  # nothing fails
    said = []
    models = {"a": tiny_loaded}
    settings, how = replace(SETTINGS, run_code=True), {"progress": said.append}
    folders = table1(models, settings, Path(), Plan(ks=(5,)), **how)
    assert [str(path) for path in folders] == [
        "a/gsm8k-k0",
        "a/gsm8k-k5",
        "a/humaneval-k0",
        "a/humaneval-k5",
    ]
    assert [(cell.tasks, cell.mask_sinks, cell.new_tokens) for cell in asked[3:]] == [
        (("gsm8k",), None, 256),
        (("gsm8k",), 5, 256),
        (("humaneval",), None, 512),
        (("humaneval",), 5, 512),
    ]
    assert {(cell.block_length, cell.temperature, cell.steps, cell.chat) for cell in asked[3:]} == {
        (32, 0.0, None, False)
    }
    # nor does a cell depend on what is allowed for another
    assert [cell.run_code for cell in asked[3:]] == [False, False, True, True]
    assert said[:2] == [
        "a, gsm8k, nothing blocked",
        "a, gsm8k, protocol paper, 5 most attended keys blocked",
    ]


def test_protocols_stand_side_by_side_and_likelihoods_know_the_clean_pass_alone(asked):
    asked += [SETTINGS] * 3
    plan = Plan(
        ks=(5,),
        protocols=("paper", "held", "rule"),
        controls=("sinks", "equal_mass"),
        sink_rule="gu",
    )
    settings = replace(SETTINGS, tasks=("gsm8k", "piqa"), new_tokens=7)
    folders = cells(settings, plan)
    arms = ("", "-matched", "-equal_mass")
    assert [path.name for path in folders] == [
        "gsm8k-k0",
        *(f"gsm8k-k5{own}{arm}" for own in ("", "-held", "-rule") for arm in arms),
        "piqa-k0",
        *(f"piqa-k5{own}{arm}" for own in ("", "-rule") for arm in arms),
    ]
    held = next(cell for cell in asked if cell.protocol == "held" and cell.control == "matched")
    assert (held.mask_sinks, held.sink_rule, kept_record(held)["sink_rule"]) == (5, Gu(), "gu")
    plain = [cell for cell in asked[3:] if cell.mask_sinks is None]
    assert {(cell.protocol, cell.control, cell.sink_rule) for cell in plain} == {
        ("paper", "sinks", None)
    }
    # a cell of other masking is another run
    moved = Path("b/gsm8k-k5")
    moved.parent.mkdir()
    Path("a/gsm8k-k5-held").rename(moved)
    refused(
        "'held', and now it is 'paper'",
        cells,
        replace(settings, tasks=("gsm8k",)),
        replace(plan, protocols=("paper",)),
        b=tiny_loaded,
    )


def test_the_tasks_of_likelihoods_are_those_that_lm_eval_calls_so():
    lm_eval = pytest.importorskip("lm_eval")
    from lm_eval.tasks._yaml_loader import load_yaml

    root = Path(lm_eval.__file__).parent / "tasks"
    kinds = {
        name: load_yaml(root / one.include, resolve_func=False).get("output_type")
        for name, one in SOURCES.items()
    }
    assert {name for name, kind in kinds.items() if kind != "generate_until"} == LIKELIHOODS


def test_an_interrupted_table_goes_on(asked):
    loads = []

    def loader(name):
        return lambda: (loads.append(name), tiny_loaded() if name == "a" else tiny_llama())[1]

    models = {"a": loader("a"), "b": loader("b")}
    settings, plan = replace(SETTINGS, tasks=("gsm8k",)), Plan(ks=(1, 5))
    with pytest.raises(KeyboardInterrupt):
        cells(settings, plan, **models)
    assert open_run("a/gsm8k-k5").info.status == "interrupted"
    assert loads == ["a"]
    cells(settings, plan, **models)
    # two were there; the third goes on, and the second model follows
    assert [cell.mask_sinks for cell in asked[3:]] == [5, None, 1, 5]
    assert loads == ["a", "a", "b"]
    cells(settings, plan, **models)
    assert len(asked) == 7
    assert loads == ["a", "a", "b"]


def test_a_folder_of_another_run_is_refused_before_anything_is_scored(asked):
    asked += [SETTINGS] * 3
    settings = replace(SETTINGS, tasks=("gsm8k",))
    cells(settings, Plan(ks=(5,)))
    refused(
        "is None, and now it is 3",
        cells,
        replace(settings, limit=3),
        Plan(ks=(5,)),
        z=tiny_loaded,
        a=tiny_loaded,
    )
    with RunWriter("b/gsm8k-k0", kind="study", model={}, settings={}, seed=0):
        pass
    refused(
        "gsm8k-k0 holds another run: its kind",
        cells,
        settings,
        Plan(ks=(5,)),
        b=tiny_loaded,
    )
    assert len(asked) == 5


def test_plans_and_settings_that_make_no_sense():
    refused("ks must be at least 0", Plan, ks=(-1,))
    refused("'rndom'; did you mean 'random'", Plan, controls=("rndom",))
    refused("controls must not be empty", Plan, controls=())
    refused("leave out mask_sinks and", table1, {}, EvalSettings(mask_sinks=5), Path())
