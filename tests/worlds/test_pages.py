"""Run folders of worlds with a known answer, through the reader and the sentences of a report."""

# T steps, L layers, H heads, K keys

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import planted
import pytest

from curves import curve_rows
from sinklab.lab.records import Arrays, Contents, RunWriter, open_run
from sinklab.lab.reports.runs import as_studies
from sinklab.lab.reports.study import Reader
from sinklab.lab.reports.tables import verdicts_of
from sinklab.lab.studies.curve import verdicts

TEXTS = {"words": " house", "punctuation": ",", "newline": "\n", "digits": "7"}
HEADS = 2


def study_of(path, received_NTS, classes_NTS):
    """A run folder in which all heads receive what a world of tokens says."""
    _, steps, length = received_NTS.shape
    model = {"name": "world", "family": "diffusion", "layers": 1, "heads": HEADS, "sink_count": 0}
    model |= {"recorded_layers": [0], "recorded_heads": [*range(HEADS)]}
    dims = {
        "received": ("step", "layer", "head", "key"),
        "visible": ("step", "key"),
        "positions": ("step",),
    }
    how = {"kind": "study", "model": model, "settings": {"steps": steps}, "seed": 0}
    with RunWriter(path, **how, samples=len(received_NTS)) as run:
        for sample, (received_TS, classes_TS) in enumerate(
            zip(received_NTS, classes_NTS, strict=True)
        ):
            share_TS = received_TS / received_TS.sum(-1, keepdims=True) * length
            arrays = {
                "received": np.repeat(share_TS[:, None, None], HEADS, 2).astype(np.float32),
                "visible": np.full((steps, length), length, np.float32),
                "positions": np.full(steps, length, np.float32),
                "step_number": np.arange(steps, dtype=np.int32),
            }
            step, position = (index.ravel() for index in np.indices((steps, length)))
            text = [TEXTS[name] for name in classes_TS.ravel()]
            tokens = pd.DataFrame({"step": step, "position": position, "text": text})
            tokens = tokens.assign(sample=sample, token_id=1, state=1, special="", template=False)
            attention = Arrays(arrays, dims | {"step_number": ("step",)})
            run.write(sample, {sample: Contents({"tokens": tokens}, {"attention": attention})})
    return as_studies(open_run(path))[0]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_a_page_of_a_world_without_effect_finds_none(tmp_path, seed):
    study = study_of(tmp_path / "run", *planted.tokens(np.random.default_rng(seed), 8, steps=8))
    assert len(study.measured.explained.cells) == 8 and not study.measured.explained.word
    assert study.measured.explained.class_over_position.reach > 0
    # one sink in twelve is at the start
    assert verdicts_of(study)[0].holds is False


@pytest.mark.slow
@pytest.mark.parametrize("where, word", [("at_place", "positional"), ("on_class", "semantic")])
def test_a_page_finds_what_was_planted(tmp_path, where, word):
    study = study_of(
        tmp_path / "run", *planted.tokens(np.random.default_rng(1), 12, steps=8, **{where: 0.95})
    )
    assert study.measured.explained.word == word and len(study.measured.explained.cells) == 12


def made_up_curve(folder, rng, effect, rows=12):
    """A curve whose rows lose `effect` (in standard deviations of a row) by the key, and no more
    than others lose.
    """
    ks, arms = (1, 2, 5, 10, 20), ("top", "random", "equal_mass", "matched")
    losses = {(0, "none"): rng.normal(4, 0.5, rows)}
    # what a row loses at more keys goes on from what it loses at fewer, and is skewed, as losses
    # are
    steps = {name: np.cumsum(rng.gamma(2, 0.05, (len(ks), rows)) - 0.1, 0) for name in arms}
    for place, k in enumerate(ks):
        for name in arms:
            losses[k, name] = (
                losses[0, "none"] + steps[name][place] + (effect * 0.07 * k if name == "top" else 0)
            )
    return SimpleNamespace(path=folder, rows=curve_rows(losses))


@pytest.mark.slow
def test_a_page_of_curves_says_something_false_on_one_page_in_ten_at_most(monkeypatch):
    """Two curves, seven verdicts each, in worlds without any effect; and with one, which is to be
    found. Without the correction a third of the pages say something false.
    """
    rng = np.random.default_rng(0)
    monkeypatch.setattr(verdicts, "finished", lambda run, _: run.rows)

    def page(effect):
        curves = []
        for name in "ab":
            info = SimpleNamespace(kind="curve", model={"family": "diffusion"}, settings={})
            one = made_up_curve(Path(name), rng, effect)
            one.info, one.tables = info, ()
            curves.append(Reader(one, name, name))
        return verdicts.cost_verdicts(curves).set_index("measure")["verdict"]

    none = [page(0.0) for _ in range(24)]
    assert {len(one) for one in none} == {14}
    told = np.mean([(one != "inconclusive").any() for one in none])
    effects = [page(0.5) for _ in range(8)]
    keys = "cost of the 20 most attended keys"
    against = f"{keys} against as many random ones"
    found = np.mean(
        [{*one[keys]} == {"costs"} and {*one[against]} == {"costs more"} for one in effects]
    )
    # 5 %, and two standard errors of 24 worlds; the least that 8 worlds tell from 80 %
    assert told <= 0.14, f"false on {told:.3f} of pages"
    assert found >= 0.5, f"an effect found on {found:.3f} of pages"
