"""Processes that tests start."""

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]
PATIENCE = 900
"""Seconds after which something that a test waits for does not come: more than the busiest machine
needs.
"""


def launch(python, *arguments, **environment):
    """A process that finds the package and the tests: what it printed, and how it ended."""
    paths = os.pathsep.join(str(ROOT / part) for part in ("src", "tests"))
    return subprocess.run(
        [python, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": paths, **environment},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )


def torchrun(python, *program, processes=2):
    """Some processes of a program."""
    started = ("--standalone", f"--nproc_per_node={processes}")
    return launch(python, "-m", "torch.distributed.run", *started, *program)
