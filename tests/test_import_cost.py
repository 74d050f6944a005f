"""`import sinklab` costs torch and no more, checked in a fresh process."""

import json
import subprocess
import sys

import pytest

import sinklab

pytestmark = pytest.mark.ring("lab")

HEAVY = {
    "transformers",
    "scipy",
    "accelerate",
    "matplotlib",
    "pandas",
    "pyarrow",
    "datasets",
    "lm_eval",
    "tyro",
    "rich",
    "triton",
}


ROOMS = ("core.attention.received", "lab.data.noise", "core.subject.loop")


def packages_after(*statements):
    """Names of the top-level packages that a fresh interpreter holds after each statement."""
    script = "import json, sys\nfound = []\n"
    for statement in statements:
        script += (
            f"{statement}\nfound.append(sorted({{m.partition('.')[0] for m in sys.modules}}))\n"
        )
    done = subprocess.run(
        [sys.executable, "-c", f"{script}print(json.dumps(found))"],
        check=True,
        stdout=subprocess.PIPE,
    )
    return map(set, json.loads(done.stdout))


@pytest.mark.slow
def test_importing_the_package_and_tensor_maths_costs_at_most_torch():
    rooms = ", ".join(f"sinklab.{room}" for room in ROOMS)
    before, package, maths = packages_after("import torch", "import sinklab", f"import {rooms}")
    assert package - before == {"sinklab", "lazy_loader"}
    assert not maths & HEAVY


@pytest.mark.slow
def test_the_help_of_the_command_line_does_not_wait_for_torch():
    (found,) = packages_after("import sinklab.lab.cli.main")
    assert found & {"torch", *HEAVY} <= {"tyro", "rich"}


def test_an_unknown_name_is_refused():
    # Python adds the near one, from dir()
    with pytest.raises(AttributeError, match="tracer"):
        _ = sinklab.tracer
