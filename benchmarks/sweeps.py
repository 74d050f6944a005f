"""Many workers on one run: how much of their time is work, and whether kills and other numbers of workers show.

    python benchmarks/sweeps.py [--units 400] [--workers 8] [--least 0.4] [--seeds 3]

Units of unequal length (the longest ten times the shortest) sleep, so that many workers share few cores. Efficiency is
the time that all units ask for, over that of all workers from the first start to the last end. Then runs of three kinds
are begun by some workers, which are killed, gone on with by others in other numbers, and held to a whole run. Writes a
result file.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

from measure import write_result

import scheduler


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--units", type=int, default=400)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--least", type=float, default=0.4, help="seconds of the shortest unit")
    parser.add_argument("--seeds", type=int, default=3, help="sweeps of each kind that are killed")
    given = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["TQDM_DISABLE"] = "1"
    with tempfile.TemporaryDirectory() as temporary:
        os.environ["SMALL_RUNS"] = str(Path(temporary, "given"))
        place = Path(temporary, "efficiency")
        place.mkdir()
        found = scheduler.efficiency(place, given.units, given.least, given.workers)
        print(f"efficiency {found['efficiency']:.3f}: {found}", flush=True)
        killed = []
        for kind in scheduler.JOBS:
            for seed in range(given.seeds):
                folder = Path(temporary, f"{kind}-{seed}")
                folder.mkdir()
                one = scheduler.sweep(kind, folder, seed)
                killed.append({name: value for name, value in one.items() if name != "log"})
                print(killed[-1], flush=True)
    print(write_result("sweeps", {"efficiency": found, "killed": killed}))


if __name__ == "__main__":
    main()
