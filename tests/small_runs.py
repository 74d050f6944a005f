"""A run of seconds of every kind, killed where one likes, and gone on with: what is left must equal
a whole one.

`main` of FOLDER KIND=KILLS,FAILS … kills and fails runs at these shares of their write steps, and
prints what went wrong.
"""

import contextlib
import errno
import gc
import io
import itertools
import json
import os
import random
import re
import shutil
import signal
import sys
import threading
import time
import traceback
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from unittest.mock import patch

import pandas as pd
import torch

from sinklab.core.errors import Checked, limited
from sinklab.lab.records import Contents, open_run
from sinklab.lab.records.info import read_info
from sinklab.lab.records.reading import lost_files
from sinklab.lab.registry import studies
from sinklab.lab.studies.base import Study
from tiny_diffusion import TEXT, tiny_loaded
from tiny_tasks import toy_tasks
from tiny_training import tiny_settings, uneven_documents

# how long something took, when and where it was,
# among its settings
TIMED = (
    r"^host$|^began$|^took$|second|time|date|per_s|_ms$|ms_per|^ratio$|created|versions|"
    r"files|others"
)


@cache
def given_text():
    """Text of which all runs take theirs."""
    folder = Path(os.environ["SMALL_RUNS"])
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "held.txt").exists():
        (folder / "held.txt").write_text(TEXT * 20)
        uneven_documents(folder)
    return folder


@studies.register("sleeping")
class Sleeping(Study):
    """Units that sleep, so that many shards share few cores."""

    @dataclass(frozen=True)
    class Settings(Checked):
        units: int = limited(400, at_least=1)
        """Units of work that sleep."""
        least: float = limited(0.1, at_least=0.0)
        """Seconds that the shortest unit takes; the longest takes ten times as long."""

    model = ""
    shards = True

    def prepare(self, loaded, settings):
        dice = random.Random(0)
        return [settings.least * dice.uniform(1.0, 10.0) for _ in range(settings.units)]

    def samples(self, plan):
        return len(plan)

    def about(self, loaded, plan):
        return {"name": "sleeping"}

    def make(self, work, samples):
        for unit in samples:
            time.sleep(work.plan[unit])
        return {unit: Contents({"slept": [{"unit": unit}]}) for unit in samples}

    def finish(self, work):
        units = open_run(work.run.path).table("slept")["unit"]
        work.run.table("all", {"units": [len(units)], "different": [units.nunique()]})


def traced(loaded, folder, settings, **how):
    """The run folder of a trace."""
    from sinklab.lab.studies.trace.study import study

    return open_run(study(loaded, folder, settings, **how))


def units(place):
    """What every study in parts does, and nothing else."""
    Sleeping()(None, place, Sleeping.Settings(units=2, least=0.0))


def trace(place, twin=True):
    from sinklab.lab.studies.trace.study import StudySettings, study

    texts = {
        "prompts": ("The sea", "The old man"),
        "new_tokens": 3,
        "block_length": None,
    }
    study(tiny_loaded(1), place, StudySettings(**texts, twin=twin))


def curve(place):
    from sinklab.lab.studies.curve.study import CurveSettings, masking_curve

    text = {"heldout": str(given_text() / "held.txt"), "rows": 2, "length": 16}
    masking_curve(tiny_loaded(), place, CurveSettings(ks=(0, 1), controls=("random",), **text))


def evaluated(place):
    from sinklab.lab.studies.benchmarks.study import EvalSettings, Evaluation

    settings = EvalSettings(
        block_length=None, mc_samples=2, limit=2, batch=1, mask_sinks=1, record_sinks=1
    )
    Evaluation(toy_tasks())(tiny_loaded(1), place, settings)


def train(place):
    from sinklab.lab.training import train

    often = {"save_every": 2, "monitor_every": 2}
    settings = tiny_settings(given_text() / "text.jsonl", steps=5, heldout_rows=4, **often)
    train(replace(settings, sink_kind="token", sink_count=1, out=str(place)))


def report(place):
    """A page without its pictures, which are no files of their own."""
    from pictures import undrawn
    from sinklab.lab.reports import report

    if not (given_text() / "traced" / "run.json").exists():
        trace(given_text() / "made", twin=False)
        (given_text() / "made").rename(given_text() / "traced")
    with patch("sinklab.lab.reports.build.svg_of", undrawn):
        report([open_run(given_text() / "traced")], place)


KINDS = {each.__name__: each for each in (units, trace, curve, train, report)} | {"eval": evaluated}


def contents(place):
    """What a run left, by path, without what it took in time and memory."""
    found = {}
    for path in sorted(place.rglob("*")):
        name = re.sub(r"_\d{4}-\d\d-\d\dT.*(?=\.json)", "", str(path.relative_to(place)))
        # where nobody had to go on with a run, the locks of one that was killed may lie there
        if (
            not path.is_file()
            or path.name.endswith(".lock")
            or path.name in ("training_args.bin", "trainer_state.json")
        ):
            continue
        if path.suffix == ".parquet":
            table = pd.read_parquet(path)
            timed = [column for column in table.columns if re.search(TIMED, str(column))]
            found[name] = table.drop(columns=timed).to_json()
        elif path.suffix == ".json":
            found[name] = _untimed(json.loads(path.read_text()))
        elif path.suffix == ".jsonl":
            found[name] = sorted(path.read_text().splitlines())
        elif path.suffix in (".pt", ".bin", ".pth"):
            found[name] = repr(torch.load(io.BytesIO(path.read_bytes()), weights_only=False))
        else:
            found[name] = path.read_bytes()
    return found


def _untimed(value):
    if isinstance(value, dict):
        return {key: _untimed(one) for key, one in value.items() if not re.search(TIMED, key)}
    return [_untimed(one) for one in value] if isinstance(value, list) else value


def difference(place, whole):
    """In which files a run differs from a whole one, or from its own checksums; empty where it does
    not.
    """
    found = contents(place)
    apart = {name for name in {*found, *whole} if found.get(name) != whole.get(name)}
    for path in place.rglob("run.json"):
        apart |= lost_files(path.parent, read_info(path))
    return ", ".join(sorted(apart))


def launched(work, log=None):
    """The number of a fork that does some work, and ends with status 1 if that fails; what it says
    goes to a file.
    """
    if child := os.fork():
        return child
    status = 1
    try:
        with open(log or os.devnull, "a") as streams:
            os.dup2(streams.fileno(), 1)
            os.dup2(streams.fileno(), 2)
            try:
                work()
                status = 0
            except BaseException:
                traceback.print_exc(file=streams)
            streams.flush()
    finally:
        os._exit(status)


def forked(work, seconds=None, log=None):
    """The exit status of some work in a fork; below zero where a signal ended it, as it does after
    `seconds`.
    """
    child = launched(work, log)
    if seconds is not None:
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


WRITES = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.chmod", "os.truncate"}


@contextlib.contextmanager
def watched(place, at_step):
    """Tell each step that writes below `place`, by number."""
    count, is_over = itertools.count(), threading.Event()

    def hear(event, args):
        # a hook cannot be taken away
        if is_over.is_set():
            return
        if event == "open":
            path, _, flags = args
            if not isinstance(flags, int) or not flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                return
        elif event in WRITES:
            path = args[0]
        else:
            return
        if isinstance(path, str | os.PathLike) and os.fspath(path).startswith(str(place)):
            at_step(next(count), f"{event} {os.fspath(path)}")

    sys.addaudithook(hear)
    yield
    is_over.set()


def is_drawn(share, *what):
    """Whether this one belongs to the share that is tried: the same ones in every run of the
    tests.
    """
    return share >= 1 or random.Random(" ".join(map(str, what))).random() < share


def steps_of(kind, folder, share):
    """Every write step of a run in folder/run, in order; before a share of them, a copy in
    folder/left.

    A copy is what a kill at that step leaves, without doing the run once more: what is not written
    yet is lost. None is kept that equals the one before it.
    """
    place, steps, before = folder / "run", [], [{}]

    def at_step(number, step):
        steps.append(step)
        if is_drawn(share, kind, number, "killed"):
            found = {}
            # other threads write and rename meanwhile
            for path in place.rglob("*"):
                with contextlib.suppress(OSError):
                    held = path.read_bytes() if path.is_file() else None
                    found[str(path.relative_to(place))] = held
            if found != before[0]:
                keep(folder / "left" / str(number), found)
            before[0] = found

    with watched(place, at_step):
        KINDS[kind](place)
    # forks need not look again at what is there
    gc.collect()
    gc.freeze()
    return steps


def keep(folder, found):
    """Write files, and folders, which hold nothing."""
    folder.mkdir(parents=True)
    for name, held in found.items():
        path = folder / name
        (path if held is None else path.parent).mkdir(parents=True, exist_ok=True)
        if held is not None:
            path.write_bytes(held)


def failing_at(kind, place, number):
    """A run that fails at this write step."""

    def at_step(count, step):
        if count == number:
            raise OSError(errno.EIO, f"made to fail: {step}")

    with watched(place, at_step):
        KINDS[kind](place)


def resumed(kind, place, whole):
    """Go on with a run; what is wrong with it then, empty for nothing."""
    try:
        KINDS[kind](place)
    except Exception:
        return f"cannot be gone on with: {traceback.format_exc()[-1500:]}"
    if apart := difference(place, whole):
        return f"differs from a whole run in {apart}"
    return ""


def every_write(kind, folder, share=1.0, fails=1.0):
    """How often a run was killed or made to fail, and what did not go on to the same end.

    Args:
        kind: of run.
        folder: to work in.
        share: of its write steps at which it is killed, a draw that is always the same.
        fails: of its write steps at which it is made to fail.
    """
    place, wrong, tried = folder / "run", [], 0
    steps, whole = steps_of(kind, folder, share), contents(place)
    for number, step in enumerate(steps):
        left = folder / "left" / str(number)
        for how, is_tried in (
            ("killed", left.is_dir()),
            ("failed", is_drawn(fails, kind, number, "failed")),
        ):
            if not is_tried:
                continue
            shutil.rmtree(place, ignore_errors=True)
            if how == "killed":
                left.rename(place)
            else:
                forked(lambda number=number: failing_at(kind, place, number))
            if why := resumed(kind, place, whole):
                wrong.append(f"{how} at step {number} of {len(steps)}, {step}: {why}")
            tried += 1
    shutil.rmtree(place, ignore_errors=True)
    return tried, wrong


def main(folder, *kinds):
    os.environ.setdefault("TQDM_DISABLE", "1")
    here = Path(folder)
    os.environ["SMALL_RUNS"] = str(here / "given")
    told = {}
    for kind, _, shares in (argument.partition("=") for argument in kinds):
        (here / kind).mkdir(parents=True)
        count, said = every_write(kind, here / kind, *map(float, shares.split(",")))
        told[kind] = {"tried": count, "wrong": said}
    print(json.dumps(told))
