"""Runs of every kind, killed at random moments or at each step that writes, gone on with, and held
to a whole run.

    python benchmarks/kills.py [--kills 15] [--seed 0] [--only trace train] [--every-write]

A kill is SIGKILL to a fork that does a small run (those of tests/small_runs.py); one in four runs
is killed again while it goes on. What came out must equal a whole run, file by file, but for times
and dates. ``--every-write`` goes on with the folder as it stood at every step that opens a file to
write, renames, removes or makes one, and makes each such step fail. Writes a result file.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

from measure import write_result

from small_runs import KINDS, contents, every_write, forked, resumed


def random_kills(kind: str, folder: Path, kills: int, dice: random.Random) -> dict[str, Any]:
    """Kill so many runs of a kind; those that were over before do not count."""
    place, log = folder / "run", folder / "log.txt"
    began = time.perf_counter()
    assert forked(lambda: KINDS[kind](place), log=log) == 0, log.read_text()
    whole, seconds = contents(place), time.perf_counter() - began
    done: list[dict[str, Any]] = []
    while len(done) < kills:
        shutil.rmtree(place, ignore_errors=True)
        after = [dice.uniform(0.0, seconds)]
        if forked(lambda: KINDS[kind](place), after[0], log) >= 0:
            continue
        files = sum(path.is_file() for path in place.rglob("*"))
        if dice.random() < 0.25:
            after.append(dice.uniform(0.0, seconds))
            forked(lambda: KINDS[kind](place), after[1], log)
        why = resumed(kind, place, whole)
        done.append(
            {"seconds": [round(one, 3) for one in after], "files_left": files, "wrong": why}
        )
        print(
            f"{kind}: killed after {after[0]:.2f} of {seconds:.2f} s, {files} files left: "
            f"{why or 'equal'}",
            flush=True,
        )
    shutil.rmtree(place)
    wrong = [one for one in done if one["wrong"]]
    return {
        "kills": len(done),
        "equal": len(done) - len(wrong),
        "whole_run_s": round(seconds, 2),
        "each": done,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=15, help="runs of each kind that are killed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--only", nargs="*", default=[*KINDS], choices=[*KINDS], help="kinds of run"
    )
    parser.add_argument(
        "--every-write", action="store_true", help="at each step that writes, in place of at random"
    )
    given = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["TQDM_DISABLE"] = "1"
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary:
        os.environ["SMALL_RUNS"] = str(Path(temporary, "given"))
        for kind in given.only:
            folder = Path(temporary, kind)
            folder.mkdir()
            if given.every_write:
                tried, wrong = every_write(kind, folder)
                found[kind] = {"broken": tried, "equal": tried - len(wrong), "wrong": wrong}
                print(f"{kind}: broken {tried} times, equal {tried - len(wrong)}", flush=True)
            else:
                found[kind] = random_kills(
                    kind, folder, given.kills, random.Random(f"{given.seed} {kind}")
                )
    name = "broken" if given.every_write else "kills"
    total = {
        name: sum(one[name] for one in found.values()),
        "equal": sum(one["equal"] for one in found.values()),
    }
    path = write_result(
        "every_write" if given.every_write else "kills",
        {"seed": given.seed, **total, "kinds": found},
    )
    print(f"{total['equal']} of {total[name]} went on to the same end; {path}")


if __name__ == "__main__":
    main()
