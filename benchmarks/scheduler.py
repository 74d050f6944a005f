"""What a scheduler does: it starts workers on one run, kills some, and starts others, in other
numbers.

`main` of FOLDER SEED KIND… does so until a run of each kind is whole, and prints
how that went.
"""

import json
import os
import random
import shutil
import signal
import time
from pathlib import Path
from unittest.mock import patch

from small_runs import Sleeping, contents, launched
from tiny_diffusion import tiny_loaded
from tiny_tasks import toy_tasks


def sleeping(out, shard):
    Sleeping()(None, out, Sleeping.Settings(units=24, least=0.005), shard=shard)


def traced(out, shard):
    from sinklab.lab.studies.trace import run
    from sinklab.lab.studies.trace.study import StudySettings, study

    how = {
        "new_tokens": 6,
        "block_length": None,
        "twin": True,
    }
    prompts = tuple(f"The sea {number}" for number in range(8))
    settings = StudySettings(prompts=prompts, temperature=1.0, **how)
    # few samples make a part, so that there are parts to share
    with patch.object(run, "SAMPLES", 1):
        study(tiny_loaded(1), out, settings, shard=shard)


def evaluated(out, shard):
    from sinklab.lab.studies.benchmarks import harness_model
    from sinklab.lab.studies.benchmarks.study import EvalSettings, Evaluation

    harness_model.PART = 2
    settings = EvalSettings(
        block_length=None, mc_samples=2, limit=6, batch=2, mask_sinks=1, record_sinks=1
    )
    Evaluation(toy_tasks())(tiny_loaded(1), out, settings, shard=shard)


JOBS = {"sleeping": sleeping, "trace": traced, "eval": evaluated}


def together(job, out, count, kills, log):
    """How so many workers ended; after each of these pauses one of them is killed."""

    def work(rank):
        return lambda: job(out, f"{rank}/{count}")

    running = [launched(work(rank), log) for rank in range(count)]
    for pause, child in zip(kills, running, strict=False):
        time.sleep(pause)
        os.kill(child, signal.SIGKILL)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in running]


def sweep(kind, folder, seed):
    """A run by 1 to 4 workers, of which all are killed, then by another number, and so on until it
    is whole.
    """
    dice, log, out = random.Random(f"{seed} {kind}"), folder / "log.txt", folder / "run"
    began = time.perf_counter()
    assert together(JOBS[kind], out, 2, [], log) == [0, 0], log.read_text()
    seconds, whole = time.perf_counter() - began, contents(out)
    shutil.rmtree(out)
    ends = []
    counts = dice.sample([1, 2, 3, 4], 3)
    for number, count in enumerate(counts):
        last = number == len(counts) - 1
        kills = [] if last else [dice.uniform(0.0, seconds / count) for _ in range(count)]
        ends.append(together(JOBS[kind], out, count, kills, log))
    found = contents(out)
    apart = sorted(name for name in {*found, *whole} if found.get(name) != whole.get(name))
    return {
        "kind": kind,
        "workers": counts,
        "ends": ends,
        "apart": apart,
        "log": log.read_text()[-2000:],
    }


def main(folder, seed, *kinds):
    os.environ.setdefault("TQDM_DISABLE", "1")
    place = Path(folder)
    os.environ["SMALL_RUNS"] = str(place / "given")
    found = []
    for kind in kinds:
        (place / kind).mkdir(parents=True)
        found.append(sweep(kind, place / kind, int(seed)))
    print(json.dumps(found))
