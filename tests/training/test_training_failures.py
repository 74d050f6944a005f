"""A run that goes wrong says where, and leaves what can be gone on from."""

import errno
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from refusals import refused, refusing
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
    call = trainer.Objective.call

    def weighted(self, batch, step, tokens):
        made = call(self, batch, step, tokens)
        return made | {"label_weights": made["label_weights"] * (factor if step >= first else 1.0)}

    monkeypatch.setattr(trainer.Objective, "call", weighted)


def test_a_loss_that_is_no_number_stops_the_run(settings, monkeypatch):
    spoiled(monkeypatch, 2, float("nan"))
    refused(r"nan at step 3; .*checkpoint-2", train, settings)
    record = open_run("run")
    assert record.info.status == "interrupted"
    assert "nan at step 3" in record.info.error
    assert record.table("history")["step"].tolist() == [1, 2, 2]
    monkeypatch.undo()
    train(replace(settings, resume=True))
    assert open_run("run").info.status == "complete"


def test_weights_that_are_no_numbers_are_never_saved(settings, monkeypatch):
    spoiled(monkeypatch, 3, float("inf"))
    # the checkpoint of step 4 comes before the loss of steps 1 … 5 is looked at
    refused("eval_loss is nan at step 4", train, replace(settings, log_every=5))
    assert [path.name for path in Path("run/checkpoints").iterdir()] == ["checkpoint-2"]


@pytest.mark.parametrize("place", ["compute_loss", "_move_model_to_device", "heldout_losses"])
def test_too_little_memory_names_the_settings_that_save_some(settings, monkeypatch, place):
    def full(self, *args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has …")

    monkeypatch.setattr(trainer.DiffusionTrainer, place, full)
    message = (
        r"lower --micro-batch \(now 2; it changes no result\), or turn on "
        r"--gradient-checkpointing \(off now\), and continue with --resume: CUDA out "
        r"of memory. .* GiB.$"
    )
    refused(message, train, replace(settings, micro_batch=2))


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        pytest.param(
            SafetensorError(
                "Error while serializing: I/O error: No space left on device (os error 28)"
            ),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            RuntimeError(
                "[enforce fail at inline_container.cc:672] . unexpected pos 59008 vs 58896"
            ),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["OSError", "safetensors", "torch.save"],
)
def test_a_full_disk_costs_the_new_checkpoint_and_no_other(settings, monkeypatch, error):
    save = trainer.DiffusionTrainer._save_optimizer_and_scheduler

    def full(self, output_dir):
        if self.state.global_step == 4:
            raise error
        save(self, output_dir)

    monkeypatch.setattr(trainer.DiffusionTrainer, "_save_optimizer_and_scheduler", full)
    message = (
        r"it is full: checkpoint 4 in .* \(.*\). The newest whole one is .*checkpoint-2: "
        r"free some space, and continue"
    )
    refused(message, train, settings)
    assert [path.name for path in Path("run/checkpoints").iterdir()] == ["checkpoint-2"]
    assert open_run("run").table("history")["step"].tolist() == [1, 2, 2, 3, 4, 4]
    monkeypatch.undo()
    train(replace(settings, resume=True))
    assert open_run("run").info.status == "complete"


def test_a_disk_that_is_full_at_the_end_leaves_the_last_checkpoint(settings, monkeypatch):
    from transformers import PreTrainedTokenizerBase

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(PreTrainedTokenizerBase, "save_pretrained", full)
    refused(r"it is full: .*checkpoint-6", train, settings)
    assert not Path("run/model").exists()
    monkeypatch.undo()
    train(replace(settings, resume=True))
    assert Path("run/model/model.safetensors").exists()


def test_a_disk_that_stays_full_does_not_hide_why_the_run_ended(settings, monkeypatch):
    from sinklab.lab.records import RunWriter

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(trainer.DiffusionTrainer, "_save_optimizer_and_scheduler", full)
    monkeypatch.setattr(RunWriter, "table", full)
    with refusing(r"\(no checkpoint is whole yet\)") as caught:
        train(settings)
    assert any("history could not be written either" in note for note in caught.value.__notes__)
