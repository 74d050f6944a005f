"""Studies that are one script each: of the package they import public names alone, and they are
short.
"""

import ast
import importlib
from pathlib import Path

import pytest

from launched import ROOT

pytestmark = pytest.mark.ring("lab")

SCRIPTS = ("backcopy", "reasoning_battery", "sink_caches", "sink_contents", "strength")
LINES = 450
MODULES = ("sinklab.lab.data.noise", "sinklab.core.registry", "sinklab.core.sinks")
"""public modules that are no packages with a list of names, as in docs/site_pages.py"""


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_takes_public_names_and_is_short(name):
    text = (ROOT / "studies" / f"{name}.py").read_text("utf-8")
    assert len(text.splitlines()) <= LINES
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            inner = [one.name for one in node.names if one.name.startswith("sinklab.")]
            assert not inner, f"import names of {inner}, not the module"
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sinklab"):
            module = importlib.import_module(node.module)
            public = getattr(module, "__all__", ())
            if node.module in MODULES:
                public = [one for one in vars(module) if not one.startswith("_")]
            inside = Path(str(module.__file__)).parent
            packages = {one.parent.name for one in inside.glob("*/__init__.py")}
            assert {one.name for one in node.names} <= {*public} | packages, node.module
