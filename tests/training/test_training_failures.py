"""A run that goes wrong says where, and leaves what can be gone on from."""

from dataclasses import replace
from pathlib import Path

import pytest

from refusals import refused
from sinklab.lab.records import open_run
from sinklab.lab.training import train, trainer
from tiny_training import repeated_text, tiny_settings


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    corpus = repeated_text(tmp_path_factory.mktemp("corpus"))
    sizes = {"hidden_size": 16, "layers": 1, "mlp_size": 16}
    return tiny_settings(corpus, steps=6, lr=1e-3, save_every=2, **sizes)


def spoiled(monkeypatch, first, factor):
    """Losses are multiplied by this factor from the given step on."""
    targets = trainer.Objective.targets

    def weighted(self, batch, step, tokens):
        made = targets(self, batch, step, tokens)
        return made | {
            "label_weights": made["label_weights"]
            * (factor if first <= step < trainer.NEVER - 1 else 1.0)
        }

    monkeypatch.setattr(trainer.Objective, "targets", weighted)


def test_a_loss_that_is_no_number_stops_the_run(settings, monkeypatch):
    spoiled(monkeypatch, 2, float("nan"))
    refused(r"nan at step 3; .*checkpoint-2", train, settings)
    record = open_run("run")
    assert record.info.status == "interrupted"
    assert "nan at step 3" in record.info.error
    assert record.table("history")["step"].tolist() == [1, 2, 2]
    monkeypatch.undo()
    train(settings)
    assert open_run("run").info.status == "complete"


def test_weights_that_are_no_numbers_are_never_saved(settings, monkeypatch):
    spoiled(monkeypatch, 3, float("inf"))
    # the checkpoint of step 4 comes before the loss of steps 1 … 5 is looked at
    refused("eval_loss is nan at step 4", train, replace(settings, log_every=5))
    assert [path.name for path in Path("run/checkpoints").iterdir()] == ["checkpoint-2"]
