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


def packages_after(statement):
    """Names of the top-level packages that a fresh interpreter holds after `statement`."""
    script = (
        f"import json, sys\n{statement}\nprint(json.dumps(sorted({{m.partition('.')[0] for "
        f"m in sys.modules}})))"
    )
    return set(
        json.loads(
            subprocess.run(
                [sys.executable, "-c", script], check=True, stdout=subprocess.PIPE
            ).stdout
        )
    )


@pytest.mark.slow
def test_importing_the_package_costs_at_most_torch():
    more = packages_after("import sinklab") - packages_after("import torch")
    assert more == {"sinklab", "lazy_loader"}


@pytest.mark.slow
def test_the_rooms_of_tensor_maths_cost_torch():
    rooms = ("core.attention.received", "lab.data.noise", "core.subject.loop")
    loaded = packages_after("import " + ", ".join(f"sinklab.{room}" for room in rooms))
    assert "torch" in loaded
    assert not loaded & HEAVY


@pytest.mark.slow
def test_the_help_of_the_command_line_does_not_wait_for_torch():
    assert packages_after("import sinklab.lab.cli.main") & {"torch", *HEAVY} <= {"tyro", "rich"}


@pytest.mark.parametrize("name", sinklab.__all__)
def test_every_public_name_resolves(name):
    assert getattr(sinklab, name) is not None
    assert name in dir(sinklab)


def test_an_unknown_name_is_refused():
    # Python adds the near one, from dir()
    with pytest.raises(AttributeError, match="tracer"):
        _ = sinklab.tracer
