"""A run that was killed goes on to the same end, bit for bit; what would not be the same run is
refused.
"""

import dataclasses
import json
from dataclasses import replace
from pathlib import Path

import pytest
from ran import interrupted, losses_of, same_weights

from launched import launch
from refusals import refused
from sinklab.lab.records import RunWriter, open_run
from sinklab.lab.training import settings_of, train
from sinklab.lab.training.checkpoints import whole_checkpoints
from tiny_training import tiny_settings


@pytest.fixture(scope="module")
def settings(corpus):
    often = {"save_every": 4, "monitor_every": 5}
    return tiny_settings(
        corpus,
        micro_batch=2,
        steps=12,
        heldout_rows=8,
        sink_kind="token",
        sink_count=1,
        gate="elementwise",
        causal_start=0.25,
        **often,
    )


KILLED = """
import json, os, signal, sys
import torch
torch.set_num_threads(1)
torch.use_deterministic_algorithms(True)
from transformers import TrainerCallback, TrainerState
from sinklab.lab.training import TrainSettings, run, train, trainer

class Killer(TrainerCallback):
    def __init__(self, step): self.step = step
    def on_step_end(self, args, state, control, **_):
        if state.global_step == self.step: os.kill(os.getpid(), signal.SIGKILL)

def with_killer(step):
    class Killed(trainer.DiffusionTrainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.add_callback(Killer(step))
    run.DiffusionTrainer = Killed

def in_a_checkpoint(step):
    def killed(self, path):
        with open(path, "w") as file:
            file.write('{"epoch": ')
        if self.global_step == step: os.kill(os.getpid(), signal.SIGKILL)
        usual(self, path)
    usual = TrainerState.save_to_json
    TrainerState.save_to_json = killed

def before_a_rename(name):
    replace = os.replace
    def killed(source, target):
        if os.path.basename(target) == name: os.kill(os.getpid(), signal.SIGKILL)
        replace(source, target)
    os.replace = killed

children = []
for kill, settings in json.loads(sys.argv[1]):
    child = os.fork()
    if child == 0:
        eval(kill)
        train(TrainSettings(**settings))
        os._exit(0)
    children.append(child)
codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
print(json.dumps(codes))
"""


KILLS = ("before_a_rename('run.json')", "in_a_checkpoint(2)")
"""How a run is killed before its first checkpoint."""


@pytest.fixture(scope="module")
def killed(settings, tmp_path_factory, python):
    """Runs by how they were killed, a call in the script: each in a fork of one process."""
    room = tmp_path_factory.mktemp("killed")
    some = replace(settings, steps=6, save_every=2, monitor_every=6)
    short = replace(settings, steps=3, save_every=2, monitor_every=3)
    runs = {
        "in_a_checkpoint(4)": replace(some, out=str(room / "memory")),
        "with_killer(3)": replace(some, out=str(room / "stream"), streaming=True),
        **{
            kill: replace(short, out=str(room / f"run-{place}")) for place, kill in enumerate(KILLS)
        },
    }
    given = json.dumps([(kill, dataclasses.asdict(settings)) for kill, settings in runs.items()])
    done = launch(python, "-c", KILLED, given)
    assert done.stdout.strip() == str([-9] * len(runs)), done.stderr[-2000:]
    return runs


def assert_same(one, other):
    assert losses_of(one) == losses_of(other)
    assert same_weights(one, other)
    first, second = open_run(one), open_run(other)
    assert first.table("heldout_rows").equals(second.table("heldout_rows"))
    assert first.table("monitor").equals(second.table("monitor"))


@pytest.mark.slow
def test_runs_killed_in_a_step_and_in_a_checkpoint_end_as_if_they_had_not_been(killed):
    for one in (killed["in_a_checkpoint(4)"], killed["with_killer(3)"]):
        folder = Path(one.out)
        assert open_run(folder).info.status == "running"
        assert [path.name for path in whole_checkpoints(folder / "checkpoints")] == ["checkpoint-2"]
        train(one)
        whole = replace(one, out=f"{folder.name}-whole")
        train(whole)
        assert_same(folder, whole.out)
        kept = sorted(path.name for path in (folder / "checkpoints").iterdir())
        assert kept == ["checkpoint-4", "checkpoint-6"], "nothing half-written stays, two are kept"


@pytest.mark.slow
def test_runs_killed_before_their_first_checkpoint_begin_anew(killed):
    runs = [killed[kill] for kill in KILLS]
    train(replace(killed["in_a_checkpoint(2)"], out="whole"))
    for one in runs:
        folder = Path(one.out)
        assert whole_checkpoints(folder / "checkpoints") == []
        if (folder / "run.json").exists():
            refused(r"lr: 0.01 → 0.02", train, replace(one, lr=0.02))
            said = f"{folder} has no checkpoint yet: the run starts from the beginning"
        else:
            said = "reading"
        told = []
        train(one, progress=told.append)
        assert told[0].startswith(said)
        assert_same(folder, "whole")
        assert open_run(folder).info.status == "complete"
        names = [
            {str(path.relative_to(root)) for path in root.rglob("*")}
            for root in (folder, Path("whole"))
        ]
        assert names[0] == names[1], "nothing half-written stays"


def test_what_is_no_run_to_resume_is_refused_and_left_alone(settings):
    here = replace(settings, steps=3)
    notes = Path("run/notes.txt")
    notes.parent.mkdir()
    notes.write_text("mine")
    Path("run/.run.json.part").write_text("{")
    refused(r"notes.txt and no run.json", train, here)
    assert sorted(path.name for path in notes.parent.iterdir()) == [".run.json.part", "notes.txt"]
    notes.unlink()
    with RunWriter("run", kind="study", model={}, settings={}, seed=0):
        pass
    refused(r"run holds .* kind 'study'", train, here)
    assert open_run("run").info.kind == "study"


@pytest.mark.slow
def test_how_a_run_runs_may_change_on_the_way(settings):
    here = replace(settings, monitor_every=0)
    interrupted(here, 5)
    train(replace(here, micro_batch=4, log_every=2, save_every=3))
    history = open_run("run").table("history")
    steps = history.dropna(subset="loss")["step"].tolist()
    assert steps == [1, 2, 3, 4, 6, 8, 10, 12], (
        "the new interval holds after the checkpoint of step 4"
    )
    names = [path.name for path in whole_checkpoints(Path("run/checkpoints"))]
    assert names == ["checkpoint-9", "checkpoint-12"]


def test_a_stream_that_changed_is_refused(settings):
    corpus = Path("text.jsonl")
    corpus.write_text(Path(settings.corpus).read_text())
    here = replace(settings, corpus=str(corpus), streaming=True, monitor_every=0)
    interrupted(here, 5)
    changed = replace(here, heldout_rows=4, monitor_every=5)
    refused("heldout_rows: 8 → 4, monitor_every: 0", train, changed)
    corpus.write_text('{"text": "one more"}\n' + corpus.read_text())
    refused("keeps its data, but the corpus", train, here)


@pytest.mark.slow
def test_a_run_is_reproduced_from_its_folder_alone(settings):
    here = replace(settings, steps=3)
    train(here)
    found = settings_of("run")
    assert found == here
    train(replace(found, out="again"))
    assert_same("run", "again")
    hashes = [Path(name, "model", "weights.sha256").read_text() for name in ("run", "again")]
    assert hashes[0] == hashes[1]

    path = Path("run/run.json")
    written = json.loads(path.read_text())
    for change, message in (
        ({"batch": "4"}, "batch must be a whole number"),
        ({"batches": 4}, "does not know .*batches"),
    ):
        path.write_text(json.dumps(written | {"settings": written["settings"] | change}))
        refused(message, settings_of, "run")
    path.write_text(json.dumps(written | {"kind": "study"}))
    refused("run of the kind 'study'", settings_of, "run")
