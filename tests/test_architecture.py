"""The house rules: three rings, imports that run one way, no drawers."""

import ast
import functools
import graphlib
import importlib
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.ring("extras")

SOURCE = Path(__file__).parents[1] / "src" / "sinklab"
RINGS = ("core", "lab", "extras")
EVERYWHERE = {"core.errors", "core.registry"}
CORE = {
    *(f"core.{room}" for room in ("attention", "sinks", "subject", "instrument", "compat")),
} | EVERYWHERE
MAY_IMPORT = {
    # the core: what is read to understand the lab and to extend it
    "core": set(),
    "core.errors": set(),
    "core.registry": {"core.errors"},
    "core.compat": set(),
    "core.attention": EVERYWHERE | {"core.compat"},
    "core.sinks": EVERYWHERE,
    "core.subject": EVERYWHERE | {"core.attention", "core.compat"},
    "core.instrument": EVERYWHERE | {"core.attention", "core.sinks", "core.compat"},
    # the lab: what is run
    "lab": set(),
    "lab.files": {"core.errors"},
    "lab.records": EVERYWHERE | {"lab.files"},
    "lab.checkpoints": EVERYWHERE | {"core.attention", "core.subject", "core.compat", "lab.files"},
    "lab.caching": CORE,
    "lab.eager": EVERYWHERE | {"core.compat", "core.instrument"},
    "lab.added_sinks": EVERYWHERE | {"core.subject", "lab.sink_logits"},
    "lab.sink_logits": {"core.compat", "core.subject"},
    "lab.samplers": EVERYWHERE | {"core.attention", "core.subject"},
    "lab.analysis": EVERYWHERE | {"core.sinks", "lab.records"},
    "lab.data": CORE | {"lab.files"},
    "lab.training": CORE
    | {"lab.checkpoints", "lab.records", "lab.analysis", "lab.data", "lab.files"},
    "lab.scoring": CORE
    | {"lab.analysis", "lab.checkpoints", "lab.records", "lab.data", "lab.files"},
    "lab.measures": EVERYWHERE
    | {"core.attention", "core.instrument", "core.sinks"}
    | {"lab.checkpoints", "lab.files", "lab.scoring"},
    "lab.reports": EVERYWHERE | {"lab.files", "lab.records", "lab.analysis", "core.sinks"},
}
MAY_IMPORT["lab.registry"] = {"core.registry"}
for _room in MAY_IMPORT:
    if _room.startswith("lab.") and _room != "lab.registry":
        MAY_IMPORT[_room] = MAY_IMPORT[_room] | {"lab.registry"}
MAY_IMPORT["lab.studies"] = {*MAY_IMPORT}
MAY_IMPORT["lab.checks"] = {*MAY_IMPORT}
MAY_IMPORT["lab.short_road"] = {*MAY_IMPORT}
LAB = {*MAY_IMPORT}
MAY_IMPORT["lab.cli"] = {*LAB, "sinklab"}
# beyond the papers: each knows the inner rings, and none another
for _extra in (
    "fast",
    "live",
    "validate",
    "ray",
    "sandbox",
    "zoo",
):
    MAY_IMPORT[f"extras.{_extra}"] = LAB | {"lab.cli", "sinklab"}
MAY_IMPORT["extras"] = set()
MAY_IMPORT["__main__"] = {"lab.cli"}
MAY_IMPORT["lm_eval"] = {"lab.studies"}
SHARED_BY_STUDIES = {"about", "base", "progress", "controls", "settings"}
DRAWERS = {"utils", "util", "common", "helpers", "misc"}


def files(source):
    """Path -> dotted name."""
    return {
        path: ".".join(("sinklab", *path.relative_to(source).with_suffix("").parts))
        for path in source.rglob("*.py")
    }


def modules(source):
    """Dotted name -> syntax tree; a package has the name of its folder."""
    return {
        name.removesuffix(".__init__"): parsed(path.read_text("utf-8"))
        for path, name in files(source).items()
    }


parsed = functools.cache(ast.parse)
walked = functools.cache(lambda tree: [*ast.walk(tree)])


def imports(name, trees, is_package):
    """Modules of ours that `name` imports anywhere: in functions, under TYPE_CHECKING, by
    import_module("…").
    """
    found = set()
    for node in walked(trees[name]):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            up = (
                name.split(".")[: len(name.split(".")) - node.level + is_package]
                if node.level
                else []
            )
            base = ".".join([*up, *([node.module] if node.module else [])])
            dotted = {
                alias.name: f"{base}.{alias.name}"
                for alias in node.names
                if alias.name != "__version__"
            }
            found |= {full if full in trees else base for full in dotted.values()}
        elif isinstance(node, ast.Call) and called(node) in ("import_module", "__import__"):
            found |= {
                arg.value
                for arg in node.args
                if isinstance(arg, ast.Constant) and isinstance(arg.value, str)
            }
    return {target for target in found if target.split(".")[0] == "sinklab"}


def called(node):
    """Last part of the name of what a call calls."""
    return getattr(node.func, "attr", getattr(node.func, "id", ""))


def import_graph(source):
    trees = modules(source)
    # The package's own __init__ re-exports the rooms: it is nobody's room and imports what it
    # likes.
    return {
        name: imports(name, trees, (source.parent / name.replace(".", "/")).is_dir())
        for name in trees
        if "." in name
    }


def room_of(name):
    parts = name.split(".")[1:]
    depth = 2 if parts[:1] and parts[0] in RINGS else 1
    return ".".join(parts[:depth]) or "sinklab"


def study_of(name):
    return ".".join(name.split(".")[3:4])


def work_of(name):
    """Modules that do a study's work, which its `study` module imports when it is called."""
    folder, _, last = name.rpartition(".")
    if last != "study":
        return set()
    return {other for other in modules(SOURCE) if other.startswith(f"{folder}.")}


def broken_rules(source):
    graph = import_graph(source)
    broken = []
    for name, targets in graph.items():
        room = room_of(name)
        if room not in MAY_IMPORT:
            broken.append(f"{name}: no such room in the table")
        if drawers := DRAWERS & set(name.split(".")):
            broken.append(f"{name}: a drawer named {drawers}; a helper lives with its only caller")
        if wrong := {room_of(target) for target in targets} - {room} - MAY_IMPORT.get(room, set()):
            broken.append(f"{name}: {room} may not import {sorted(wrong)}")
        if room == "lab.studies":
            others = {study_of(target) for target in targets if room_of(target) == "lab.studies"}
            if wrong := others - {study_of(name), "", *SHARED_BY_STUDIES}:
                broken.append(
                    f"{name}: no study imports another, but this one imports {sorted(wrong)}"
                )
    try:
        graphlib.TopologicalSorter({name: graph[name] - work_of(name) for name in graph}).prepare()
    except graphlib.CycleError as error:
        broken.append("import cycle: " + " -> ".join(error.args[1]))
    return broken


@pytest.mark.slow
def test_the_house_rules_hold():
    assert broken_rules(SOURCE) == []


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_every_room_of_the_table_exists(room):
    path = SOURCE / room.replace(".", "/")
    assert (path / "__init__.py").is_file() or path.with_suffix(".py").is_file()


def test_the_files_that_the_page_names_exist():
    root = SOURCE.parents[1]
    page = (root / "ARCHITECTURE.md").read_text("utf-8")
    named = [
        path for words in re.findall(r"`([\w/{},.]+/[\w{},.]*)`", page) for path in spelt_out(words)
    ]
    assert len(named) > 40
    assert [
        path for path in named if not (SOURCE / path).exists() and not (root / path).exists()
    ] == []


def spelt_out(path):
    """``a/{b,c}.py`` as a/b.py and a/c.py."""
    if (braces := re.search(r"{([^}]*)}", path)) is None:
        return [path]
    before, after = path[: braces.start()], path[braces.end() :]
    return [one for part in braces[1].split(",") for one in spelt_out(before + part + after)]


@pytest.mark.parametrize("room", sorted({*MAY_IMPORT} - {"lab.cli", "__main__"}))
def test_no_public_name_is_hidden_by_a_module_of_its_package(room):
    """Importing a module sets it as an attribute of its package, over the function of the same
    name.
    """
    names = getattr(importlib.import_module(f"sinklab.{room}"), "__all__", [])
    assert not {path.stem for path in (SOURCE / room.replace(".", "/")).glob("*.py")} & set(names)


STUBS = {
    ".".join(("sinklab", *path.relative_to(SOURCE).parent.parts)): path
    for path in sorted(SOURCE.rglob("__init__.pyi"))
}


@pytest.mark.parametrize("package", STUBS)
def test_public_names_are_defined_where_their_stub_says(package):
    """Editors read the stub, and lazy_loader loads by it."""
    for node in ast.parse(STUBS[package].read_text("utf-8")).body:
        if not isinstance(node, ast.ImportFrom):
            continue
        home = STUBS[package].parent / f"{node.module.replace('.', '/')}.py"
        if package == "sinklab" and not home.is_file():
            continue  # of a ring that was deleted
        module = importlib.import_module(f"{package}.{node.module}")
        for alias in node.names:
            value = getattr(importlib.import_module(package), alias.name)
            assert value is getattr(module, alias.name)


@pytest.mark.slow
def test_scripts_import_what_there_is():
    """Nothing runs the benchmarks here."""
    root = SOURCE.parents[1]
    missing = []
    for path in (
        path for name in ("benchmarks", "studies", "docs") for path in (root / name).rglob("*.py")
    ):
        for node in walked(parsed(path.read_text("utf-8"))):
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith(
                "sinklab"
            ):
                continue
            for alias in node.names:
                try:
                    module = importlib.import_module(node.module)
                    if not hasattr(module, alias.name):
                        importlib.import_module(f"{node.module}.{alias.name}")
                except ModuleNotFoundError:
                    missing.append(f"{path.name}: {node.module}.{alias.name}")
    assert not missing
