"""The sink monitor in the Trainer: when it looks, what it keeps, and that training does not
notice.
"""

import math
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F
from transformers import Trainer, TrainerCallback, TrainingArguments

from sinklab.core.sinks import Gu
from sinklab.lab.analysis.rules import Top
from sinklab.lab.training import recorders
from sinklab.lab.training.recorders import MONITOR_FILE, SinkMonitor
from sinklab.lab.training.snapshots import MEASURES, snapshot
from tiny_diffusion import tiny_model

HELD = torch.randint(3, 280, (6, 16), generator=torch.Generator().manual_seed(1))
ROWS = torch.randint(3, 280, (32, 16), generator=torch.Generator().manual_seed(2))


class Denoising(Trainer):
    """Trains on every third token."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        ids = inputs["input_ids"]
        masked = (torch.arange(16) % 3 == 0).expand(ids.shape)
        logits = model(ids.masked_fill(masked, 1), logits_to_keep=masked).logits
        return F.cross_entropy(logits.float(), ids[masked])

    def _save_checkpoint(self, model, trial):
        super()._save_checkpoint(model, trial)
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, SinkMonitor):
                callback.save(Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}")


class Losses(TrainerCallback):
    def __init__(self):
        self.seen = []

    def on_log(self, args, state, control, logs=None, **_):
        if "loss" in logs:
            self.seen.append(logs["loss"])


def trained(
    folder,
    monitor,
    *,
    compiled=False,
    resume=None,
    **arguments,
):
    model = tiny_model(1).train()
    if compiled:
        model.model.compile(backend="eager", dynamic=False)
    losses = Losses()
    trainer = Denoising(
        model=model,
        args=TrainingArguments(
            str(folder),
            max_steps=5,
            per_device_train_batch_size=4,
            learning_rate=1e-2,
            logging_steps=1,
            save_steps=2,
            use_cpu=True,
            report_to="none",
            disable_tqdm=True,
            **arguments,
        ),
        train_dataset=[{"input_ids": row} for row in ROWS],
        callbacks=[losses, *([monitor] if monitor else [])],
    )
    trainer.train(resume_from_checkpoint=resume)
    return model, losses.seen


# what Dynamo itself sets off while it reads
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("settings", [{}, {"compiled": True, "bf16": True}])
def test_training_is_the_same_to_the_bit(settings):
    plain, losses = trained("plain", None, **settings)
    monitor = SinkMonitor(HELD, every=2)
    watched, same = trained("watched", monitor, **settings)
    assert len(losses) == 5
    assert losses == same
    for name, weight in plain.state_dict().items():
        assert torch.equal(weight, watched.state_dict()[name]), name
    columns = monitor.columns()
    assert list(columns) == list(SinkMonitor.names)
    assert columns["step"] == [step for step in (0, 2, 4, 5) for _ in range(3)]
    assert columns["layer"] == [-1, 0, 1] * 4
    last = snapshot(watched, HELD)
    assert columns["sink_share"][-3:] == [last.overall["sink_share"], *last.layers["sink_share"]]
    assert columns["sink_share"][0] == snapshot(tiny_model(1), HELD).overall["sink_share"]
    assert not any(columns["causal"])


def test_a_resumed_run_has_the_same_rows():
    whole = SinkMonitor(HELD, every=2)
    trained("a", whole)
    checkpoint = Path("a/checkpoint-2")
    resumed = SinkMonitor(HELD, every=2, earlier=checkpoint)
    assert [row["step"] for row in resumed.rows] == [0] * 3 + [2] * 3
    trained("b", resumed, resume=str(checkpoint))
    assert str(resumed.columns()) == str(whole.columns())
    assert (Path("b/checkpoint-4") / MONITOR_FILE).exists()
    assert SinkMonitor(HELD, every=2, earlier=Path()).rows == []


class State:
    def __init__(self, step, first=True):
        self.global_step, self.is_world_process_zero = step, first


def test_a_few_numbers_go_to_the_log():
    said = []
    monitor = SinkMonitor(HELD, every=1, log=said.append)
    monitor.look(tiny_model(1), State(3))
    monitor.look(tiny_model(1), State(3))
    assert len(said) == 1
    assert said[0]["sink/share"] == monitor.rows[0]["sink_share"]
    assert all(math.isfinite(value) for value in said[0].values())


def test_one_process_looks_unless_the_weights_are_spread(monkeypatch):
    monitor, model = SinkMonitor(HELD, every=1), tiny_model(1)
    monitor.look(model, State(3, first=False))
    assert monitor.rows == []
    monkeypatch.setattr(recorders, "DTensor", torch.nn.Parameter)  # as under FSDP2
    monitor.look(model, State(3, first=False))
    assert [row["step"] for row in monitor.rows] == [3] * 3


def test_a_causal_start_is_looked_at_as_causal():
    model = tiny_model(1)
    monitor = SinkMonitor(HELD, every=1, causal_steps=2)
    for step in (0, 2, 3):
        monitor.look(model, State(step))
    overall = [row for row in monitor.rows if row["layer"] == -1]
    assert [row["causal"] for row in overall] == [True, True, False]
    assert overall[0]["sink_share"] == snapshot(model, HELD, causal=True).overall["sink_share"]
    assert overall[2]["sink_share"] == snapshot(model, HELD).overall["sink_share"]


def test_weights_that_are_no_numbers_are_measured_as_none():
    model = tiny_model(1)
    model.model.layers[0].self_attn.q_proj.weight.data.fill_(math.nan)
    monitor = SinkMonitor(HELD, every=1)
    monitor.look(model, State(1))
    assert math.isnan(monitor.rows[0]["sink_share"])


def test_rows_are_spread_over_the_text():
    text = torch.arange(20)[:, None].expand(20, 16)
    assert SinkMonitor(text, every=1, rows=4).ids_RS[:, 0].tolist() == [0, 5, 10, 15]
    assert len(SinkMonitor(HELD, every=1, rows=100).ids_RS) == 6
    assert "text_mobility" in MEASURES


def test_the_rule_says_what_counts_as_a_sink():
    for rule, sinks in ((Top(2), 2), (Gu(0.99), 0)):
        assert snapshot(tiny_model(1), HELD, rule=rule).overall["sinks"] == sinks
