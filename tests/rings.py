"""Rings of the tests: the ring of a test file is the outermost one that it imports.

Where a ring's folder was deleted, its tests are left out, and those of the rings inside it run.
A test that needs an outer ring in another way, by a registered name or a command, says so,
``@pytest.mark.ring("lab")``, and a whole file by ``pytestmark = pytest.mark.ring("lab")``.
"""

import ast
from functools import cache
from pathlib import Path

RINGS = ("core", "lab", "extras")
TESTS = Path(__file__).parent
SOURCE = TESTS.parent / "src" / "sinklab"
HELPERS = {path.stem: path for path in TESTS.rglob("*.py") if path.stem != "conftest"}


@cache
def is_missing(ring):
    """Whether the folder of this ring, or of one inside it, was deleted."""
    inner = RINGS[: RINGS.index(ring) + 1]
    return not all((SOURCE / one).is_dir() for one in inner)


@cache
def ring_of(path):
    """The outermost ring that a test file names or imports, itself or through a helper module."""
    tree = ast.parse(path.read_text("utf-8"))
    found = {"core"} | marked(tree)
    for module in imported(tree):
        parts = module.split(".")
        if parts[0] == "sinklab" and parts[1] in RINGS:
            found.add(parts[1])
        elif parts[0] == "conformance":
            found.add(ring_of(TESTS / f"{'/'.join(parts)}.py"))
        elif parts[0] in HELPERS and HELPERS[parts[0]] != path:
            found.add(ring_of(HELPERS[parts[0]]))
    return max(found, key=RINGS.index)


def marked(tree):
    """Rings that a file names in its ``pytestmark``."""
    marks = [
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"
    ]
    constants = [
        part for mark in marks for part in ast.walk(mark) if isinstance(part, ast.Constant)
    ]
    return {part.value for part in constants if part.value in RINGS}


def imported(tree):
    """Modules that a file imports when it is imported; public names by their own modules."""
    found = []
    for node in tree.body:
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name != "sinklab"]
        elif isinstance(node, ast.ImportFrom) and node.module == "sinklab":
            found += [
                public_names().get(alias.name, f"sinklab.{alias.name}") for alias in node.names
            ]
        elif isinstance(node, ast.ImportFrom):
            found.append(str(node.module))
    return found


@cache
def public_names():
    """Public name -> the module that it comes from, as the package's imports for type checkers
    have it.
    """
    names = {}
    for node in ast.walk(ast.parse((SOURCE / "__init__.pyi").read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom):
            module = f"sinklab.{node.module}".replace("sinklab.sinklab", "sinklab")
            names |= {alias.name: module for alias in node.names}
    return names
