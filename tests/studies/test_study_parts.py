"""A study is written sample by sample: interrupted it is readable, and it resumes to what it would
have been.
"""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from sinklab.lab.records import open_run
from sinklab.lab.studies.progress import Progress
from sinklab.lab.studies.trace import run as observation
from sinklab.lab.studies.trace.study import StudySettings, study
from small_runs import contents, difference
from tiny_diffusion import tiny_loaded

FULL = ("The old man", "Will", "The sea", "He said")
SETTINGS = StudySettings(
    prompts=("The old man", "", "The sea"),
    new_tokens=6,
    block_length=None,
    temperature=1.0,
    statistics=("value_norm",),
)


class Heard(Progress):
    def __init__(self):
        self.counts = []
        self.stages = []

    def stage(self, text):
        self.stages.append(text)

    def count(self, done, total):
        self.counts.append((done, total))


def breaking(whole, times):
    """The function, interrupted at its n-th call."""
    calls = []

    def broken(*args, **kwargs):
        calls.append(None)
        if len(calls) == times:
            raise KeyboardInterrupt
        return whole(*args, **kwargs)

    return broken


@pytest.mark.slow
def test_after_an_interruption_a_study_resumes_bit_for_bit(tmp_path, monkeypatch):
    monkeypatch.setattr(observation, "SAMPLES", 1)
    heard = Heard()
    whole = contents(study(tiny_loaded(1), tmp_path / "whole", SETTINGS, progress=heard))
    # 3 samples, each written in 6 steps; the control reads one canvas of each
    writing = [round(6 * done) for done, _ in heard.counts[:-4]]
    assert writing == sorted(writing) and {*writing} == {*range(19)}
    assert heard.counts[-1] == (3, 3)
    assert heard.stages[1] == "writing sample 2 of 3"

    path = tmp_path / "run"
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(observation, "follow", breaking(observation.follow, 2))
        study(tiny_loaded(1), path, SETTINGS)
    run = open_run(path)
    assert (run.info.status, run.info.error) == ("interrupted", "KeyboardInterrupt")
    assert run.samples == (0,)
    assert run.arrays("attention", sample=0)["received"].shape[0] == 6
    said = []
    study(tiny_loaded(1), path, SETTINGS, progress=said.append)
    assert sum("writing sample " in text for text in said) == 2
    assert difference(path, whole) == ""
    # nothing is left to do
    before = (path / "generations-0001.parquet").stat().st_mtime_ns
    study(tiny_loaded(1), path, SETTINGS)
    assert (path / "generations-0001.parquet").stat().st_mtime_ns == before


@pytest.mark.slow
@pytest.mark.ring("extras")
def test_short_texts_are_written_in_one_batch_and_resume_bit_for_bit(tmp_path, monkeypatch):
    settings = StudySettings(prompts=(*FULL, "A boat"), new_tokens=3, statistics=())
    together, own = [], observation.follow

    def follow(tasks, *given):
        together.append(len(tasks))
        return own(tasks, *given)

    monkeypatch.setattr(observation, "follow", follow)
    monkeypatch.setattr(observation, "SAMPLES", 4)
    whole = contents(study(tiny_loaded(1), tmp_path / "whole", settings))
    # the fifth has nobody beside it
    assert together == [4, 1]
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(observation, "_tokens", breaking(observation._tokens, 5))
        study(tiny_loaded(1), tmp_path / "run", settings)
    assert open_run(tmp_path / "run").samples == (0, 1, 2, 3)
    study(tiny_loaded(1), tmp_path / "run", settings)
    assert together == [4, 1, 4, 1, 1]
    assert difference(tmp_path / "run", whole) == ""


ALONE = {
    "drawn": {"temperature": 0.7},
    "under a cache": {"cache": "dual"},
    "edited": {"edits": ("block_keys:keys=top:k=1",)},
    "exact": {"exact": True},
    "long": {"new_tokens": 200},
    "with maps": {"maps": ("0:0:0",)},
    "to an end": {"stop_ids": (7,)},
    "guided": {"cfg_scale": 1.0},
    "by confidence": {"schedule": "threshold"},
    "drawn positions": {"rule": "random"},
    "without a prompt": {"prompts": ("The old man", "", "The sea")},
    "another statistic": {"statistics": ("drift",)},
}


@pytest.mark.ring("extras")
@pytest.mark.parametrize("why", ALONE)
def test_other_texts_are_written_alone(why):
    quick = StudySettings(prompts=FULL, new_tokens=6)
    for settings, together in ((quick, True), (replace(quick, **ALONE[why]), False)):
        plan = observation.prepare(tiny_loaded(1, context=256), settings)
        assert observation.in_one_batch(plan.tasks) is together


@pytest.mark.slow
@pytest.mark.ring("extras")
@pytest.mark.parametrize(("sink", "shift"), [(0, False), (2, True)])
def test_a_text_in_a_batch_is_what_it_is_alone(sink, shift, tmp_path, monkeypatch):
    loaded = tiny_loaded(sink, logit_shift=shift)
    settings = StudySettings(
        prompts=FULL, new_tokens=4, block_length=2, statistics=("all",), layers=(1,), every=2
    )
    batch = open_run(study(loaded, tmp_path / "batch", settings))
    monkeypatch.setattr(observation, "POSITIONS", 1)
    alone = open_run(study(loaded, tmp_path / "alone", settings))
    assert batch.tables == alone.tables
    for name in alone.tables:
        pd.testing.assert_frame_equal(batch.table(name), alone.table(name), rtol=1e-4, atol=1e-5)
    for sample in alone.samples:
        ours, theirs = (run.arrays("attention", sample) for run in (batch, alone))
        assert ours.keys() == theirs.keys()
        for name, one in theirs.items():
            # stored as float16
            np.testing.assert_allclose(ours[name], one, rtol=2e-3, atol=1e-4, err_msg=name)
