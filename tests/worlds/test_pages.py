"""Run folders of worlds with a known answer, through the reader and the sentences of a report."""

# T steps, L layers, H heads, K keys

from pathlib import Path

import numpy as np
import planted
import pytest

from sinklab.records import RunWriter, open_run
from sinklab.reports import sentences
from sinklab.reports.runs import as_studies
from sinklab.reports.study import Study

TEXTS = {"words": " house", "punctuation": ",", "newline": "\n", "digits": "7"}
HEADS = 2


def study_of(path: Path, received_NTS: np.ndarray, classes_NTS: np.ndarray) -> Study:
    """A run folder in which all heads receive what a world of tokens says."""
    _, steps, length = received_NTS.shape
    model = {"name": "world", "family": "diffusion", "layers": 1, "heads": HEADS, "sink_count": 0}
    model |= {"recorded_layers": [0], "recorded_heads": [*range(HEADS)]}
    dims = {"received": ("step", "layer", "head", "key"), "visible": ("step", "key"), "positions": ("step",)}
    with RunWriter(path, kind="study", model=model, settings={"steps": steps}, seed=0) as run:
        for sample, (received_TS, classes_TS) in enumerate(zip(received_NTS, classes_NTS, strict=True)):
            share_TS = received_TS / received_TS.sum(-1, keepdims=True) * length
            arrays = {
                "received": np.repeat(share_TS[:, None, None], HEADS, 2).astype(np.float32),
                "visible": np.full((steps, length), length, np.float32),
                "positions": np.full(steps, length, np.float32),
                "step_number": np.arange(steps, dtype=np.int32),
            }
            run.arrays("attention", arrays, dims | {"step_number": ("step",)}, part=sample)
            step, position = (index.ravel() for index in np.indices((steps, length)))
            tokens = {"sample": np.full(len(step), sample), "step": step, "position": position}
            tokens |= {"token_id": np.ones(len(step), int), "text": [TEXTS[name] for name in classes_TS.ravel()]}
            tokens |= {"state": np.ones(len(step), int), "special": [""] * len(step), "template": [False] * len(step)}
            run.table("tokens", tokens, part=sample)
    return as_studies(open_run(path))[0]


def told(study: Study, statement: str) -> str:
    return " ".join(sentences.told(statement, study)).replace("\u00a0", " ")


@pytest.mark.parametrize("seed", range(4))
def test_a_page_of_a_world_without_effect_finds_none(tmp_path: Path, seed: int) -> None:
    study = study_of(tmp_path / "run", *planted.tokens(np.random.default_rng(seed), 8, steps=8))
    assert told(study, "explained").endswith("it cannot be told which of the two counts more (8 samples).")
    assert "no drift to the left or right" in told(study, "motion")
    # one sink in twelve is at the start; nothing was hidden
    assert [verdict.holds for verdict in study.verdicts[:3]] == [False, None, None]


@pytest.mark.parametrize(("where", "word"), [("at_place", "positional"), ("on_class", "semantic")])
def test_a_page_finds_what_was_planted(tmp_path: Path, where: str, word: str) -> None:
    study = study_of(tmp_path / "run", *planted.tokens(np.random.default_rng(1), 12, steps=8, **{where: 0.95}))
    assert told(study, "explained").endswith(f"sinks are rather {word} (12 samples).")


def test_a_page_of_three_samples_says_so(tmp_path: Path) -> None:
    study = study_of(tmp_path / "run", *planted.tokens(np.random.default_rng(1), 3, steps=8, at_place=0.95))
    assert "cannot be told from so few samples" in told(study, "explained")
    assert "3 samples, too few for a verdict" in told(study, "motion")
    assert [verdict.holds for verdict in study.verdicts] == [None] * 4
