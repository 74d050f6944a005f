"""Ctrl-C, and SIGTERM of a scheduler or of `timeout`, are ordinary ends: the step is finished and
saved, and nothing is lost.
"""

import os
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest
from ran import same_weights
from two_processes import train_in_two

from launched import PATIENCE
from sinklab.lab.records import open_run
from sinklab.lab.training import train
from sinklab.lab.training.checkpoints import whole_checkpoints
from sinklab.lab.training.recorders import Recorder
from tiny_training import tiny_settings


@pytest.fixture(scope="module")
def settings(corpus):
    often = {
        "save_every": 100,
        "monitor_every": 4,
        "log_every": 2,
    }
    return tiny_settings(corpus, steps=8, heldout_rows=8, **often)


def terminated_in(step, monkeypatch, *numbers):
    """These signals come while this step is in work."""
    usual = Recorder.on_step_end

    def ended(self, args, state, control, **more):
        if state.global_step == step:
            for number in numbers:
                os.kill(os.getpid(), number)
        usual(self, args, state, control, **more)

    monkeypatch.setattr(Recorder, "on_step_end", ended)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("step", "number", "ending"),
    [
        (3, signal.SIGTERM, "Terminated: 143"),
        (5, signal.SIGINT, "KeyboardInterrupt"),
    ],
)
def test_a_signal_ends_a_run_behind_its_step_and_it_goes_on_to_the_same_end(
    settings, step, number, ending, monkeypatch
):
    said = []
    handlers = [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)]
    with monkeypatch.context() as patch:
        terminated_in(step, patch, number)
        with pytest.raises((SystemExit, KeyboardInterrupt)) as end:
            train(settings, progress=said.append)
    assert getattr(end.value, "code", 130) == {signal.SIGINT: 130, signal.SIGTERM: 143}[number]
    assert [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)] == handlers
    left = open_run("run")
    assert (left.info.status, left.info.error) == ("interrupted", ending)
    assert "the step in work is finished and saved; a second Ctrl-C ends at once" in said
    assert said[-1].startswith("saved: ") and f"checkpoint-{step};" in said[-1]
    assert [path.name for path in whole_checkpoints(Path("run/checkpoints"))] == [
        f"checkpoint-{step}"
    ]
    assert left.table("history")["step"].max() == step
    if number == signal.SIGINT:
        # it goes on as after the other signal
        return
    train(settings)
    train(replace(settings, out="whole"))
    ended, whole = (open_run(name) for name in ("run", "whole"))
    assert same_weights(ended.path, whole.path)
    assert ended.info.status == "complete"
    for table in ("monitor", "heldout_rows"):
        assert ended.table(table).equals(whole.table(table))
    rows, expected = (
        one.table("history").dropna(subset="loss").set_index("step")["loss"]
        for one in (ended, whole)
    )
    # what was logged early and what was left of that interval have the mean of the whole interval
    assert (rows[step] + rows[step + 1]) / 2 == pytest.approx(expected[step + 1], rel=1e-5)
    assert rows.drop([step, step + 1]).equals(expected.drop(step + 1))


@pytest.mark.slow
def test_a_second_ctrl_c_ends_at_once_and_says_that_nothing_is_saved(settings, monkeypatch):
    said = []
    terminated_in(2, monkeypatch, signal.SIGINT, signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        train(settings, progress=said.append)
    assert not whole_checkpoints(Path("run/checkpoints"))
    assert said[-1].endswith("has no checkpoint yet: the same command begins anew")


def test_the_history_is_on_the_disk_while_a_run_goes_on(settings, monkeypatch):
    seen = {}
    usual = Recorder.on_step_end

    def looked(self, args, state, control, **more):
        usual(self, args, state, control, **more)
        if state.global_step in (3, 5):
            running = open_run("run")
            assert running.info.status == "running"
            seen[state.global_step] = running.table("history"), running.table("monitor")

    monkeypatch.setattr(Recorder, "on_step_end", looked)
    train(replace(settings, steps=6, monitor_every=2))
    ended = open_run("run")
    for step, (history, monitor) in seen.items():
        assert history["step"].max() == monitor["step"].max() == step - 1
        assert history.equals(ended.table("history")[: len(history)])
        assert monitor.equals(ended.table("monitor")[: len(monitor)])


STOPPED = """
from sinklab.lab.training import recorders
usual = recorders.Recorder.on_step_end
def stopped(self, args, state, control, **more):
    if state.global_step == 3 and os.environ["RANK"] == "1":
        os.kill(os.getpid(), 15)
    usual(self, args, state, control, **more)
recorders.Recorder.on_step_end = stopped
"""


@pytest.mark.slow
def test_a_signal_to_one_of_two_processes_ends_both_behind_the_same_step(settings, python):
    here = replace(settings, micro_batch=1, steps=5)
    train_in_two(python, [here], before=STOPPED, ends=143)
    assert [path.name for path in whole_checkpoints(Path("run/checkpoints"))] == ["checkpoint-3"]
    left = open_run("run")
    assert (left.info.status, left.info.error) == ("interrupted", "Terminated: 143")
    assert left.table("history")["step"].tolist() == [2, 3]


@pytest.mark.slow
def test_a_signal_to_the_command_and_the_reader_of_its_stream_ends_it_in_order(settings, python):
    given = replace(settings, streaming=True, steps=100_000)
    flags = [
        f"--{name.replace('_', '-')}={value}"
        for name, value in vars(given).items()
        if type(value) in (str, int)
    ]
    command = [python, "-m", "sinklab", "train", *flags, "--no-bf16", "--streaming"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    history = Path("run/history.parquet")
    while not history.exists() and process.poll() is None:
        time.sleep(0.1)
    # as Slurm does it: to every process of the step
    os.killpg(process.pid, signal.SIGTERM)
    said = process.communicate(timeout=PATIENCE)[1]
    assert process.returncode == 143, said
    assert said.splitlines()[-1] == "sinklab: interrupted; a run folder that was begun is kept"
    (saved,) = whole_checkpoints(Path("run/checkpoints"))
    left = open_run("run")
    assert left.info.status == "interrupted"
    assert saved.name == f"checkpoint-{left.table('history')['step'].max()}"
