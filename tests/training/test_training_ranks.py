"""Two processes learn what one learns: same rows, same noise by row, same losses."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from two_processes import given, train_in_two

from refusals import refused
from sinklab.lab.records import open_run
from sinklab.lab.training import TrainSettings, train
from sinklab.lab.training.checks import micro_batches
from tiny_training import tiny_settings


@pytest.fixture(scope="module")
def settings(corpus):
    variant = {
        "sink_kind": "token",
        "sink_count": 1,
        "gate": "elementwise",
        "monitor_every": 3,
    }
    often = {"save_every": 3, "heldout_rows": 7}
    return tiny_settings(corpus, batch=8, micro_batch=2, steps=4, lr=2e-3, **often, **variant)


@pytest.mark.slow
def test_two_processes_have_the_noise_losses_and_weights_of_one(settings, python):
    sums = (f"{n} and {n}?||{'<<1+1=2>> ' * (n % 4)} #### {2 * n}" for n in range(24))
    Path("pairs.txt").write_text("\n".join(sums))
    runs = {
        "stream": replace(settings, streaming=True),
        # rows with unequal numbers of tokens in the loss: the mean is over the step, not over a
        # rank
        "pairs": replace(
            settings,
            corpus="pairs.txt",
            pairs="corrected",
            length=64,
            causal_start=0.5,
            monitor_every=0,
        ),
    }
    runs = {name: replace(one, out=name) for name, one in runs.items()}
    train_in_two(python, list(runs.values()))
    for name, one in runs.items():
        alone = replace(one, out=f"{name}-alone")
        train(alone)
        both, single = open_run(one.out), open_run(alone.out)
        assert both.info.status == "complete"
        assert both.info.model["data_sha256"] == single.info.model["data_sha256"]
        for column in ("loss", "heldout_loss", "lr", "tokens", "grad_norm"):
            ours, theirs = both.table("history")[column], single.table("history")[column]
            assert np.allclose(ours, theirs, rtol=1e-4, equal_nan=True), (name, column)
        assert np.allclose(
            both.table("heldout_rows")["loss"], single.table("heldout_rows")["loss"], rtol=1e-4
        )
        ours, theirs = (
            load_file(Path(folder) / "model" / "model.safetensors")
            for folder in (one.out, alone.out)
        )
        assert ours.keys() == theirs.keys()
        for key in ours:
            assert torch.allclose(ours[key], theirs[key], atol=1e-5), (name, key)

        ranks = given(one)
        assert not ranks[0].keys() & ranks[1].keys(), "each process has rows of its own"
        rows = {**ranks[0], **ranks[1]}
        assert sorted(rows) == list(range(32))
        assert all(step == row // 8 for row, (step, _, _) in rows.items())
        assert {len(part) for part in ranks.values()} == {16}
    masks = [tuple(mask) for part in given(runs["stream"]).values() for _, _, mask in part.values()]
    assert len(set(masks)) > 24, "noise differs from row to row and rank to rank"


def test_weights_that_are_spread_over_processes_are_refused(settings, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    refused("every process trains a whole model", train, settings)
    assert not Path(settings.out).exists()


def test_the_batch_must_divide_over_processes_and_micro_batches():
    settings = TrainSettings(batch=12)
    assert micro_batches(settings, 1) == (12, 1)
    assert micro_batches(settings, 2) == (6, 1)
    assert micro_batches(replace(settings, micro_batch=2), 3) == (2, 2)
    refused("12 is no multiple of 4 × 2", micro_batches, replace(settings, micro_batch=4), 2)
    refused("12 is no multiple of 2 × 5", micro_batches, settings, 5)
