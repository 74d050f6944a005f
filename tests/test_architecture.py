"""The house rules: imports run one way, no module in a cycle, small modules, no drawers."""

import ast
import graphlib
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "sinklab"
ROOMS = ["records", "sinks", "diffusion", "attention", "data", "models", "sampling", "probing", "training"]
ROOMS += ["evaluation", "reports", "cli"]
MAY_IMPORT = {room: set[str]() for room in ROOMS} | {
    "sampling": {"diffusion"},
    "models": {"attention", "sampling"},
    "probing": {"attention", "sinks", "records"},
    "training": {"diffusion", "data", "models", "probing", "records"},
    "evaluation": {"diffusion", "data", "models", "sampling", "probing", "records"},
    "reports": {"records", "sinks"},
    "cli": {*ROOMS, "sinklab"},
}
DRAWERS = {"utils", "util", "common", "core", "helpers", "misc"}


def modules(source: Path) -> dict[str, ast.Module]:
    """Dotted name -> syntax tree; a package has the name of its folder."""
    names = {
        path: ".".join(("sinklab", *path.relative_to(source).with_suffix("").parts)) for path in source.rglob("*.py")
    }
    return {name.removesuffix(".__init__"): ast.parse(path.read_text("utf-8")) for path, name in names.items()}


def imports(name: str, trees: dict[str, ast.Module], is_package: bool) -> set[str]:
    """Modules of ours that `name` imports anywhere: in functions, under TYPE_CHECKING, by import_module("…")."""
    found = set()
    for node in ast.walk(trees[name]):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            up = name.split(".")[: len(name.split(".")) - node.level + is_package] if node.level else []
            base = ".".join([*up, *([node.module] if node.module else [])])
            dotted = {alias.name: f"{base}.{alias.name}" for alias in node.names if alias.name != "__version__"}
            found |= {full if full in trees else base for full in dotted.values()}
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            found |= {arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)}
    return {target for target in found if target.split(".")[0] == "sinklab"}


def broken_rules(source: Path) -> list[str]:
    trees = modules(source)
    # The package's own __init__ re-exports the rooms: it is nobody's room and imports what it likes.
    graph = {
        name: imports(name, trees, (source.parent / name.replace(".", "/")).is_dir()) for name in trees if "." in name
    }
    broken = []
    for name, targets in graph.items():
        room = name.split(".")[1]
        if room not in MAY_IMPORT:
            broken.append(f"{name}: no such room in the table")
        if drawers := DRAWERS & set(name.split(".")):
            broken.append(f"{name}: a drawer named {drawers}; a helper lives with its only caller")
        rooms = {".".join(target.split(".")[1:2]) or "sinklab" for target in targets} - {room}
        if wrong := rooms - MAY_IMPORT.get(room, set()):
            broken.append(f"{name}: {room} may not import {sorted(wrong)}")
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        broken.append("import cycle: " + " -> ".join(error.args[1]))
    return broken + oversized(trees)


def oversized(trees: dict[str, ast.Module]) -> list[str]:
    """Modules over 250 lines, and the longest functions where the 90th percentile is over 60 lines."""
    spans = {name: max((node.end_lineno or 0 for node in tree.body), default=0) for name, tree in trees.items()}
    functions = [
        ((node.end_lineno or 0) - node.lineno + 1, f"{name}.{node.name}")
        for name, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    longest = sorted(functions, reverse=True)[: len(functions) // 10 + 1]
    broken = [f"{name}: {lines} lines, at most 250" for name, lines in spans.items() if lines > 250]
    return broken + [f"90th percentile of function length over 60: {longest}"] * (min(longest, default=(0,))[0] > 60)


def test_the_house_rules_hold() -> None:
    assert broken_rules(SOURCE) == []


@pytest.mark.parametrize("room", ROOMS)
def test_every_room_of_the_table_exists(room: str) -> None:
    assert (SOURCE / room / "__init__.py").is_file()


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("sinks/rules.py", "def f():\n    import sinklab.models", "sinks may not import ['models']"),
        ("sinks/rules.py", "from ..models import load", "sinks may not import ['models']"),
        (
            "sinks/rules.py",
            "from importlib import import_module\nimport_module('sinklab.cli')",
            "may not import ['cli']",
        ),
        ("sinks/rules.py", "from sinklab import load", "sinks may not import ['sinklab']"),
        ("sinks/rules.py", "def f():\n    from . import kinds", "import cycle: "),
        ("sinks/utils.py", "", "a drawer named {'utils'}"),
        ("toys/__init__.py", "", "no such room"),
        ("sinks/rules.py", "x = 1\n" * 251, "251 lines, at most 250"),
        ("sinks/rules.py", "def f():\n" + "    x = 1\n" * 60, "(61, 'sinklab.sinks.rules.f')"),
    ],
)
def test_a_broken_rule_is_seen(tmp_path: Path, file: str, text: str, message: str) -> None:
    source = tmp_path / "sinklab"
    tree = {"__init__.py": "__version__ = '0'", "models/__init__.py": "", "sinks/__init__.py": ""}
    tree["sinks/kinds.py"] = "from sinklab import __version__\nfrom sinklab.sinks.rules import f"
    tree["sinks/rules.py"] = "def f(): ..."
    for name, content in [*tree.items(), (file, text)]:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        if (name, content) == (file, text):
            assert broken_rules(source) == []
        (source / name).write_text(content, "utf-8")
    assert message in "\n".join(broken_rules(source))
