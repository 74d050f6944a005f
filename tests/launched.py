"""Programs that torchrun starts, some processes of each."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PATIENCE = 900
"""Seconds after which something that a test waits for does not come: more than the busiest machine
needs.
"""


def torchrun(*program, processes=2):
    """A program of some processes that find the package and the tests; what they printed, and how
    it ended.
    """
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc_per_node={processes}",
    ]
    paths = os.pathsep.join(str(ROOT / part) for part in ("src", "tests"))
    return subprocess.run(
        [*command, *map(str, program)],
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
