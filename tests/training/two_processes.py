"""Run the same training in two gloo processes, as a launcher would, and note what each of them
saw.
"""

import dataclasses
import json
from pathlib import Path

import torch

from launched import launch

SCRIPT = """
import dataclasses, json, os, sys
import torch
from accelerate.state import PartialState
torch.set_num_threads(1)
torch.use_deterministic_algorithms(True)
from sinklab.lab.training import TrainSettings, run, train, trainer

# what both need is imported once
children = []
for rank in ("0", "1"):
    child = os.fork()
    if child == 0:
        os.environ |= {{"RANK": rank, "LOCAL_RANK": rank}}
        break
    children.append(child)
else:
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    print("", codes, sep="\\n")
    sys.exit()

exec({before!r})
seen = []
targets = trainer.Objective.targets

def noted(self, batch, step, tokens):
    masked = batch["masked"].long().tolist() if "masked" in batch else None
    # not what is held out
    if step < trainer.NEVER - 1:
        seen.append([step, batch["row"].tolist(), batch["input_ids"].tolist(), masked])
    return targets(self, batch, step, tokens)

trainer.Objective.targets = noted
made, everyone = run.arguments, PartialState.wait_for_everyone
store = torch.distributed.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
is_first = os.environ["RANK"] == "0"
number = 0

def first_has_come_far():
    if is_first:
        store.set(f"far-{{number}}", "")

def wait_for_everyone(self):
    first_has_come_far()
    everyone(self)

def arguments(*given):
    PartialState.wait_for_everyone = everyone
    args = made(*given)
    # the first process comes as far as it can, and must not take the folder while the other one
    # still looks at it
    PartialState.wait_for_everyone = wait_for_everyone
    if not is_first:
        store.wait([f"far-{{number}}"])
    return args

run.arguments = arguments
for number, settings in enumerate(json.loads({settings!r})):
    try:
        train(TrainSettings(**settings))
    finally:
        first_has_come_far()
    with open(settings["out"] + ".rank" + os.environ["RANK"], "w") as file:
        json.dump(seen, file)
    seen.clear()
torch.distributed.destroy_process_group()
"""


def train_in_two(python, runs, before="", ends=0):
    """Train each run in two processes, with some code run before all of them in each process; both
    processes must end with this status. Beside the folder of a run stand files ``.rank0`` and
    ``.rank1`` with what each rank was given: step, rows, ids, masks.
    """
    given = json.dumps([dataclasses.asdict(one) for one in runs])
    script = SCRIPT.format(settings=given, before=before)
    # both are clients of this store, whose port nobody can take before them
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    done = launch(python, "-c", script, **shared)
    assert done.stdout.splitlines()[-1] == str([ends, ends]), (done.stdout, done.stderr)


def given(settings):
    """Rank to row of the run to (step, ids, masks) that this rank was given."""
    found = {}
    for rank in (0, 1):
        batches = json.loads(Path(f"{settings.out}.rank{rank}").read_text())
        found[rank] = {
            row: (step, ids, None if masks is None else masks[place])
            for step, rows, many, masks in batches
            for place, (row, ids) in enumerate(zip(rows, many, strict=True))
        }
    return found
