"""Many shards of one run: whether kills and other numbers of them show.

    python benchmarks/sweeps.py [--seeds 3] [--slurm]

Runs of three kinds are begun by some workers, which are killed, gone on with
by others in other numbers, and held to a whole run. Writes a result file. `--slurm`: in their
place, where Slurm is (its nodes have GPUs, be it by name), launch/shards.slurm as an array of four
tasks, of which one is killed and one is told to end, then as one of two.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

import scheduler
from measure import write_result

from small_runs import contents

ROOT = Path(__file__).resolve().parents[1]
TRACE = "trace --prompts {}/prompts.txt --model tiny --new-tokens 48 --out {}/{}"


def said(*command: str) -> str:
    return subprocess.run(
        command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True
    ).stdout.strip()


def by_slurm(folder: Path) -> dict[str, Any]:
    """A run that Slurm's tasks share, kills and another number of tasks included, beside one by a
    single process.
    """
    (folder / "prompts.txt").write_text(
        "".join(f"The sea number {number} was\n" for number in range(12))
    )
    said(sys.executable, "-m", "sinklab", *TRACE.format(folder, folder, "whole").split())
    found: dict[str, Any] = {"slurm": said("sbatch", "--version"), "arrays": []}
    for array, ends in (("0-3", {1: "KILL", 2: "TERM"}), ("0-1", {})):
        how = (
            "--parsable",
            "--array",
            array,
            f"--output={folder}/%A_%a.log",
            "launch/shards.slurm",
        )
        job = said("sbatch", *how, *TRACE.format(folder, folder, "run").split())
        while ends and not list(folder.glob("run/tokens-*")):
            time.sleep(0.2)
        for task, signal in ends.items():
            said("scancel", f"--signal={signal}", "--full", f"{job}_{task}")
        while said("squeue", "--noheader", f"--jobs={job}"):
            time.sleep(1)
        there = len(list(folder.glob("run/generations-*")))
        found["arrays"].append({"array": array, "signals": ends, "samples done behind it": there})
    whole, run = (scheduler._by_key(contents(folder / name)) for name in ("whole", "run"))
    return found | {
        "apart": sorted(name for name in {*whole, *run} if whole.get(name) != run.get(name))
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3, help="sweeps of each kind that are killed")
    parser.add_argument("--slurm", action="store_true", help="by Slurm, where there is one")
    given = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["TQDM_DISABLE"] = "1"
    with tempfile.TemporaryDirectory() as temporary:
        os.environ["SMALL_RUNS"] = str(Path(temporary, "given"))
        if given.slurm:
            print(write_result("slurm", by_slurm(Path(temporary))))
            return
        killed = []
        for kind in scheduler.JOBS:
            for seed in range(given.seeds):
                folder = Path(temporary, f"{kind}-{seed}")
                folder.mkdir()
                one = scheduler.sweep(kind, folder, seed)
                killed.append({name: value for name, value in one.items() if name != "log"})
                print(killed[-1], flush=True)
    print(write_result("sweeps", {"killed": killed}))


if __name__ == "__main__":
    main()
