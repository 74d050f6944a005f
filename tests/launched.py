"""Processes that tests start, and scripts that they import."""

import importlib.util
import os
import subprocess
import sys
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


def script(name):
    """A script of the repository as a module, by its path without .py; it may import others that
    were asked for before.
    """
    path = ROOT / f"{name}.py"
    if path.stem not in sys.modules:
        spec = importlib.util.spec_from_file_location(path.stem, path)
        sys.modules[path.stem] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[path.stem])
    return sys.modules[path.stem]
