"""The inner rings without the outer ones: every module imports, and nothing deleted is named."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from rings import TESTS, ring_of

pytestmark = pytest.mark.ring("extras")

SOURCE = Path(__file__).parents[1] / "src" / "sinklab"
IMPORT_ALL = """
import importlib, pkgutil, sys
# a fork has imported the whole package
for name in [name for name in sys.modules if name.partition(".")[0] == "sinklab"]:
    del sys.modules[name]
import sinklab
from sinklab.core import registry

assert sinklab.__file__.startswith(sys.argv[1]), sinklab.__file__
seen = 0
for ring in sys.argv[2:]:
    package = importlib.import_module(f"sinklab.{ring}")
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        # the model of lm-eval, which is not needed otherwise
        if not module.name.endswith("harness_model"):
            importlib.import_module(module.name)
            seen += 1
homes = {kind.__module__ for known in registry.REGISTRIES.values() for kind in known.values()}
print(seen, *homes)
"""
HELP = """
from sinklab.lab.cli.main import main

main(["--help"])
"""
TRACED = """
import torch
from transformers import LlamaConfig, LlamaModel
import sinklab

sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
model = LlamaModel(LlamaConfig(vocab_size=50, num_attention_heads=4, **sizes))
edit = "block_keys:keys=(positions:positions=0),when=now"
with sinklab.intervene(model, edit), sinklab.trace(model) as recording:
    model(torch.arange(20)[None])
print(*recording.received[0].shape)
"""


def without(folder, *rings):
    """A copy of the package that lacks these rings."""
    left_out = shutil.ignore_patterns("packaged", *rings)
    return Path(shutil.copytree(SOURCE, folder / "sinklab", ignore=left_out)).parent


def ran(python, folder, program, *rings):
    """How many modules these rings have, where registered classes live, and what a program says
    after all was imported.
    """
    command = [python, "-c", IMPORT_ALL + program, str(folder), *rings]
    of_copy = os.environ | {"PYTHONPATH": str(folder)}
    done = subprocess.run(command, env=of_copy, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    found, _, said = done.stdout.partition("\n")
    modules, *homes = found.split()
    return int(modules), homes, said


@pytest.mark.slow
def test_core_and_lab_do_without_the_extras(python, tmp_path):
    modules, homes, said = ran(python, without(tmp_path, "extras"), HELP, "core", "lab")
    assert modules > 150 and homes and not [home for home in homes if ".extras." in home]
    assert "trace" in said
    assert not [name for name in ("serve", "validate") if name in said]


@pytest.mark.slow
def test_the_core_does_without_the_lab(python, tmp_path):
    modules, homes, said = ran(python, without(tmp_path, "extras", "lab"), TRACED, "core")
    assert modules > 40 and homes and all(home.startswith("sinklab.core.") for home in homes)
    assert said.split() == ["1", "2", "4", "20"]


def test_the_ring_of_a_test_file_is_the_outermost_that_it_imports():
    found = {
        name: ring_of(TESTS / name)
        for name in (
            "sinks/test_sink_rules.py",
            "analysis/test_estimates.py",
            "studies/test_study.py",
            "validate/test_validate.py",
            "test_rings.py",
        )
    }
    assert [*found.values()] == ["core", "lab", "lab", "extras", "extras"]


@pytest.mark.slow
def test_no_helper_moves_the_tests_of_a_ring_into_an_outer_one():
    rings = [ring_of(path) for path in TESTS.rglob("test_*.py")]
    assert rings.count("core") >= 36 and rings.count("lab") >= 120
