"""Untrained twins of a traced model: on the run's own canvases, stored with it, made where they are
asked for.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from sinklab.lab.analysis.counts import mean_weight
from sinklab.lab.checkpoints import controls
from sinklab.lab.checkpoints.controls import UNTRAINED
from sinklab.lab.records import open_run
from sinklab.lab.reports.runs import as_studies
from sinklab.lab.studies.trace import again
from sinklab.lab.studies.trace.run import prepare
from sinklab.lab.studies.trace.study import StudySettings, Trace, study
from small_runs import traced
from tiny_diffusion import tiny_loaded
from tiny_llama import tiny_llama

QUICK = StudySettings(
    prompts=("The old man",),
    new_tokens=6,
    block_length=3,
    statistics=("value_norm", "row_entropy"),
    twin=True,
)
CASES = {
    "plain": (lambda: tiny_loaded(1), {}),
    "shifted": (lambda: tiny_loaded(logit_shift=True), {"every": 2}),
    "cached": (lambda: tiny_loaded(1), {"cache": "dual"}),
    "edited": (lambda: tiny_loaded(1), {"edits": ("block_keys:keys=top:k=2",)}),
    "clean pass": (tiny_loaded, {"edits": ("block_keys:keys=top:k=2,when=clean",)}),
    "by state": (
        tiny_loaded,
        {"edits": ("block_keys:keys=top:k=2,queries=committed,when=now",)},
    ),
    "compared": (lambda: tiny_loaded(1), {"statistics": ("drift",)}),
    "tokens edited": (
        tiny_loaded,
        {
            "rule": "low_confidence",
            "schedule": "editing:editing_threshold=0.01,max_post_steps=3",
            "edits": ("block_keys:keys=top:k=2",),
        },
    ),
    "causal": (tiny_llama, {"block_length": 32}),
    "causal, whole": (tiny_llama, {"block_length": 32, "full_forward": True}),
}


WITH_EXTRAS = pytest.param("tokens edited", marks=pytest.mark.ring("extras"))


@pytest.mark.slow
@pytest.mark.parametrize("case", [*(one for one in CASES if one != "tokens edited"), WITH_EXTRAS])
def test_on_its_own_canvases_a_model_does_what_it_did(tmp_path, case):
    make, changes = CASES[case]
    loaded, settings = make(), replace(QUICK, twin=False, **changes)
    run, plan = traced(loaded, tmp_path / "run", settings), prepare(loaded, settings)
    before = run.arrays("attention", sample=0)
    after = again.retraced(plan.tasks[0], run.table("tokens"), plan.selection).arrays()
    assert before.keys() == after.keys()
    for name, array in before.items():
        # as it is stored; canvases that ran together differ in the last digits of float32
        np.testing.assert_allclose(
            after[name].astype(float), array.astype(float), rtol=2e-3, atol=1e-3
        )


@pytest.mark.slow
def test_a_trace_records_alone_and_gets_its_twins_later(tmp_path):
    settings = StudySettings(new_tokens=6, block_length=3)
    alone = traced(tiny_loaded(), tmp_path / "run", settings)
    path = alone.path
    assert alone.array_files == ("attention", "measures") and "twins" not in alone.tables
    (line,) = [line for line in Trace().results([alone], path, settings) if "--twin" in line]
    assert line.endswith(f"--config {path} --out {path} --twin")
    # the finished run gets them
    wanted = replace(settings, twin=True)
    study(tiny_loaded(), path, wanted)
    run = open_run(path)
    twins = {f"{name}-{kind}" for kind in UNTRAINED for name in alone.array_files}
    assert {*run.array_files} == {*alone.array_files} | twins
    assert not any("--twin" in line for line in Trace().results([run], path, settings))


def weights(loaded):
    return {name: one.clone() for name, one in loaded.model.state_dict().items()}


def assert_same(loaded, before):
    for name, one in loaded.model.state_dict().items():
        assert torch.equal(one.view(torch.uint8), before[name].view(torch.uint8)), name


@pytest.mark.slow
@pytest.mark.parametrize("case", ["plain", "edited", "causal"])
def test_a_trace_without_options_has_a_control_of_its_first_answer(tmp_path, case):
    make, changes = CASES[case]
    loaded, prompts = make(), tuple(f"The old man of {place}" for place in "abcdefgh")
    before = weights(loaded)
    how = {"new_tokens": 9, "prompts": prompts, "statistics": ()}
    settings = replace(QUICK, twin=None, **how, **changes)
    run = traced(loaded, tmp_path / "run", settings)
    assert_same(loaded, before)
    table = run.table("control")
    steps = run.table("tokens", sample=0)["step"].unique()
    read = {"causal": steps[-1:], "edited": steps[:2]}.get(case, steps[::-8][::-1])
    assert (table["steps"] == len(read)).all()
    arrays = run.arrays("attention", sample=0)
    at = np.isin(arrays["step_number"], read)
    weight = mean_weight(arrays["received"][at], arrays["visible"][at][:, None, None])
    assert table["strongest"][0] == pytest.approx(np.nanmean(np.fmax.reduce(weight, -1)))
    assert (table["control"] < table["strongest"] + 0.5).all() and (table["why"] == "").all()
    # without a control the answer could not be anything else
    assert as_studies(run)[0].answers["exist"].word != "inconclusive"


def test_after_an_exception_a_model_has_its_weights_again(tmp_path, monkeypatch):
    loaded = tiny_llama()
    before = weights(loaded)
    settings = replace(QUICK, twin=None, block_length=32)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(again, "retraced", stopped)
        study(loaded, tmp_path / "run", settings)
    assert_same(loaded, before)
    assert "control" not in open_run(tmp_path / "run").tables
    # in the middle of the shuffling too, before and after a tensor was written
    write, writes = controls._write, []
    for is_early in (False, True):

        def interrupted(tensor, bits, is_early=is_early):
            writes.append(tensor)
            if len(writes) == 3 and is_early:
                raise KeyboardInterrupt
            write(tensor, bits)
            if len(writes) == 3:
                raise KeyboardInterrupt

        writes.clear()
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(controls, "_write", interrupted)
            with controls.shuffled(loaded):
                raise AssertionError
        assert_same(loaded, before)


def stopped(*given, **named):
    raise KeyboardInterrupt


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shuffled_weights_keep_their_numbers_and_come_back(dtype):
    module = torch.nn.ModuleDict({"a": torch.nn.Linear(300, 500), "b": torch.nn.Linear(1, 1)})
    module.to(dtype)["a"].weight.data[0, :2] = torch.tensor([float("nan"), -0.0])
    loaded = replace(tiny_llama(), model=module)
    before = weights(loaded)
    with controls.shuffled(loaded, seed=1):
        now = weights(loaded)
    assert_same(loaded, before)
    for name, one in before.items():
        assert sorted(one.float().nan_to_num(9).flatten().tolist()) == sorted(
            now[name].float().nan_to_num(9).flatten().tolist()
        )
    moved = (now["a.weight"] != before["a.weight"]).float().mean()
    assert moved > 0.95


def test_tensors_that_share_memory_come_back(tmp_path):
    module = torch.nn.Linear(30, 50)
    module.register_buffer("part", module.weight.detach()[3:9])
    module.register_buffer("whole", module.weight.detach().flatten())
    loaded = replace(tiny_llama(), model=module)
    before = weights(loaded)
    with controls.shuffled(loaded):
        assert not torch.equal(module.weight, before["weight"])
    assert_same(loaded, before)


def test_no_control_follows_a_cache_of_which_steps_are_left_out(tmp_path):
    settings = replace(QUICK, twin=None, cache="dual", every=2)
    run = traced(tiny_loaded(1), tmp_path / "run", settings)
    table = run.table("control")
    assert table["control"].isna().all() and "step by step" in table["why"][0]


def test_where_no_control_can_be_the_answer_says_why(tmp_path):
    loaded = tiny_llama()
    loaded.model.register_buffer("scale", torch.ones(3, dtype=torch.int8))
    run = traced(loaded, tmp_path / "run", replace(QUICK, twin=None, block_length=32))
    found = as_studies(run)[0].answers["exist"]
    assert "no control: the weights of" in found.sentence and "% of its attention" in found.sentence
