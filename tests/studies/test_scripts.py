"""Scripts under studies/ that stand on the public names of the package alone."""

import ast

import pytest

from launched import ROOT

SCRIPTS = ("sink_caches", "strength")
LONGEST = 450


def public(package):
    """Names that a package shows: those of its __init__.pyi, and the packages inside it; of
    `core.registry`, which is a module, all without an underscore.
    """
    folder = ROOT / "src" / package.replace(".", "/")
    if package == "sinklab.core.registry":
        tree = ast.parse(folder.with_suffix(".py").read_text("utf-8"))
        targets = [node.targets[0] for node in tree.body if isinstance(node, ast.Assign)]
        return {one.id for one in targets if isinstance(one, ast.Name)}
    names = {one.parent.name for one in folder.glob("*/__init__.py")}
    stub = folder / "__init__.pyi"
    if stub.is_file():
        for node in ast.parse(stub.read_text("utf-8")).body:
            if isinstance(node, ast.ImportFrom):
                names |= {str(alias.asname) for alias in node.names}
    return names


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_is_short_and_imports_public_names_alone(name):
    text = (ROOT / "studies" / f"{name}.py").read_text("utf-8")
    assert len(text.splitlines()) <= LONGEST
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            assert {alias.name for alias in node.names if "sinklab" in alias.name} <= {"sinklab"}
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("sinklab"):
            assert {alias.name for alias in node.names} <= public(node.module), node.module
