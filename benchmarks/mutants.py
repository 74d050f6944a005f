"""Tests of the tests: small errors put into the core's code, one at a time, and whether the tests
that run there fail.

    python benchmarks/mutants.py --work FOLDER [--count 200] [--seed 0] [--jobs 1] [--again]

The mutants of `OPERATORS` are drawn by a seed from
src/sinklab/core/{attention,instrument,sampling,subject} and sinks.py, texts of errors, annotations
and decorators apart. Each is put into a copy of the tree and met by the tests that run its line
(those that run its module, where it is evaluated on import): a map that is measured once, and anew
where files of tests have changed, and kept in FOLDER, as is a line for each mutant: a run that was
stopped goes on. ``--again`` tries those once more that no test has killed. Tests, those marked slow
apart, run in forks of a process that has imported everything but the package; the cheapest and most
particular come first, and the first that fails ends it. A mutant that takes far more processor time
than its tests is killed by that. Last, the tests that killed are run without a mutant: all must
pass. Writes a result file; what is said there of mutants that no test can kill comes from
benchmarks/mutants_equivalent.json."""

from __future__ import annotations

import argparse
import ast
import contextlib
import gc
import hashlib
import importlib
import json
import os
import resource
import shutil
import signal
import sys
import threading
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from measure import write_result

ROOT = Path(__file__).resolve().parents[1]
ROOMS = tuple(
    f"src/sinklab/core/{room}"
    for room in ("attention", "instrument", "sampling", "subject", "sinks.py")
)
TESTS = [
    f"tests/{room}"
    for room in ("attention", "instrument", "sampling", "models", "sinks", "diffusion", "scoring")
]
TESTS += [f"tests/test_{name}.py" for name in ("without_fast_paths", "short_road")]
SKIPPED = ("tests/models/test_training_benchmarks.py",)
ARGUMENTS = [
    "-q",
    "-n0",
    "-p",
    "no:cacheprovider",
    "-p",
    "no:benchmark",
    "--no-header",
    "--tb=line",
]
# plugins are imported before a fork
ARGUMENTS += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
FIRST_S, FIRST_FILES = 4.0, 8
"""What is tried first of a mutant: processor time of its tests as they were measured, and files
that they are in.
"""
PASS = ast.Pass()

# --- mutants

COMPARED: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.Gt),
    ast.LtE: (ast.Lt, ast.GtE),
    ast.Gt: (ast.GtE, ast.Lt),
    ast.GtE: (ast.Gt, ast.LtE),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
CALCULATED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Div,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
PAIRS = [
    ("min", "max"),
    ("amin", "amax"),
    ("argmin", "argmax"),
    ("clamp_min", "clamp_max"),
    ("any", "all"),
    ("zeros", "ones"),
    ("zeros_like", "ones_like"),
]
CALLED = dict(PAIRS) | {second: first for first, second in PAIRS}
Replaced = Iterator[tuple[ast.AST, ast.AST]]


def compared(node: ast.AST) -> Replaced:
    """Boundaries and directions of comparisons."""
    if isinstance(node, ast.Compare):
        for at, old in enumerate(node.ops):
            for new in COMPARED[type(old)]:
                yield (
                    node,
                    ast.Compare(
                        node.left, [*node.ops[:at], new(), *node.ops[at + 1 :]], node.comparators
                    ),
                )


def calculated(node: ast.AST) -> Replaced:
    """One arithmetic operator for another; a minus or ~ dropped."""
    if isinstance(node, ast.BinOp) and type(node.op) in CALCULATED:
        yield node, ast.BinOp(node.left, CALCULATED[type(node.op)](), node.right)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.Invert):
        yield node, node.operand


def constant(node: ast.AST) -> Replaced:
    """A number one more or less, -1 as -2 and 0, True as False."""
    negative = isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub)
    inner = node.operand if negative else node
    if not isinstance(inner, ast.Constant) or not isinstance(inner.value, int | float):
        return
    if isinstance(inner.value, bool):
        yield node, ast.Constant(not inner.value)
    else:
        value = -inner.value if negative else inner.value
        for new in (value + 1, value - 1):
            yield node, ast.parse(repr(new), mode="eval").body


def negated(node: ast.AST) -> Replaced:
    """A condition turned around; a `not` dropped."""
    if isinstance(node, ast.If | ast.While | ast.IfExp) and not isinstance(node.test, ast.UnaryOp):
        yield node.test, ast.UnaryOp(ast.Not(), node.test)
    if isinstance(node, ast.comprehension):
        for test in node.ifs:
            yield test, ast.UnaryOp(ast.Not(), test)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node, node.operand


def joined(node: ast.AST) -> Replaced:
    """`and` for `or`."""
    if isinstance(node, ast.BoolOp):
        yield node, ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)


def called(node: ast.AST) -> Replaced:
    """min for max and the like; a keyword argument left out."""
    if not isinstance(node, ast.Call):
        return
    if isinstance(node.func, ast.Name) and node.func.id in CALLED:
        yield node.func, ast.Name(CALLED[node.func.id])
    if isinstance(node.func, ast.Attribute) and node.func.attr in CALLED:
        yield node.func, ast.Attribute(node.func.value, CALLED[node.func.attr])
    for left in node.keywords:
        if left.arg is not None:
            yield (
                node,
                ast.Call(node.func, node.args, [one for one in node.keywords if one is not left]),
            )


def left_out(node: ast.AST) -> Replaced:
    """A statement left out: a call, an assignment to a part of something, `+=`, raise, break,
    continue, del.
    """
    is_call = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    is_part = isinstance(node, ast.Assign) and all(
        isinstance(to, ast.Attribute | ast.Subscript) for to in node.targets
    )
    if (
        is_call
        or is_part
        or isinstance(node, ast.AugAssign | ast.Raise | ast.Break | ast.Continue | ast.Delete)
    ):
        yield node, PASS


OPERATORS: dict[str, Callable[[ast.AST], Replaced]] = {
    one.__name__: one for one in (compared, calculated, constant, negated, joined, called, left_out)
}


@dataclass(frozen=True)
class Mutant:
    """One change of one file."""

    path: str
    where: str
    """The function or class that it is in, dotted."""
    operator: str
    line: int
    old: str
    new: str
    span: tuple[int, int]
    """Lines, one of which a test has run if it can see the change."""
    body: tuple[int, int] | None
    """Lines of the function; None for what is evaluated on import."""
    bytes: tuple[int, int]
    nth: int = 1
    """The same change may be made at several places of a function."""

    @property
    def key(self) -> str:
        """Holds when lines move."""
        times = f" ({self.nth})" if self.nth > 1 else ""
        return f"{self.path} {self.where}: {self.old} -> {self.new}{times}"

    def apply(self, source: bytes) -> bytes:
        """The file with the change in it."""
        return source[: self.bytes[0]] + self.new.encode() + source[self.bytes[1] :]


class Finder(ast.NodeVisitor):
    """All mutants of a file."""

    def __init__(self, path: str, source: bytes) -> None:
        self.path, self.source, self.found = path, source, list[Mutant]()
        self.starts = [0]
        for line in source.split(b"\n"):
            self.starts.append(self.starts[-1] + len(line) + 1)
        self.names: list[str] = []
        self.functions: list[ast.AST] = []
        self.statement: ast.stmt | None = None
        self.visit(ast.parse(source))

    def offsets(self, node: Any) -> tuple[int, int]:
        start = self.starts[node.lineno - 1] + node.col_offset
        return start, self.starts[node.end_lineno - 1] + node.end_col_offset

    def visit(self, node: ast.AST) -> None:
        """Mutants here and below, but for annotations, decorators, errors' texts and what only a
        type checker runs.
        """
        if isinstance(node, ast.JoinedStr | ast.Import | ast.ImportFrom | ast.Assert):
            return
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            return
        before, self.statement = (
            self.statement,
            node if isinstance(node, ast.stmt) else self.statement,
        )
        for operator in OPERATORS.values():
            for old, new in operator(node):
                self.add(operator.__name__, old, new)
        if not isinstance(node, ast.Raise):
            self.below(node)
        self.statement = before

    def below(self, node: ast.AST) -> None:
        left = {"annotation", "returns", "decorator_list"}
        if (
            isinstance(node, ast.UnaryOp)
            and isinstance(node.op, ast.USub)
            and isinstance(node.operand, ast.Constant)
        ):
            return
        named = isinstance(node, ast.ClassDef | ast.FunctionDef)
        for name, value in ast.iter_fields(node):
            inside = name == "body" and isinstance(node, ast.FunctionDef)
            if named and name == "body":
                self.names.append(node.name)
            if inside:
                self.functions.append(node)
            for part in value if isinstance(value, list) else [value]:
                if isinstance(part, ast.AST) and name not in left:
                    self.visit(part)
            if inside:
                self.functions.pop()
            if named and name == "body":
                self.names.pop()

    def add(self, operator: str, old: ast.AST, new: ast.AST) -> None:
        start, end = self.offsets(old)
        text, bare = (
            ast.unparse(new),
            isinstance(new, ast.Pass | ast.Constant | ast.Name | ast.Attribute | ast.Call),
        )
        function: Any = self.functions[-1] if self.functions else None
        stands: Any = self.statement
        # of a statement with statements in it, what is changed; it has no line of its own where it
        # spans several
        stands = (
            old
            if isinstance(stands, ast.If | ast.While | ast.For | ast.With | ast.FunctionDef)
            else stands
        )
        self.found.append(
            Mutant(
                self.path,
                ".".join(self.names),
                operator,
                old.lineno,
                " ".join(self.source[start:end].decode().split()),
                text if bare else f"({text})",
                (stands.lineno, stands.end_lineno),
                None if function is None else (function.body[0].lineno, function.end_lineno),
                (start, end),
            )
        )


def files_of(tree: Path, *folders: str) -> list[Path]:
    """The Python files of these folders, or that these are."""
    found = [file for folder in folders for file in (tree / folder).rglob("*.py")]
    return sorted([*found, *(tree / one for one in folders if (tree / one).is_file())])


def drawn(tree: Path, count: int, seed: int) -> tuple[list[Mutant], int]:
    """So many mutants in the order of the seed, and how many there are. Lists of public names are
    left alone.
    """
    found: list[Mutant] = []
    for file in files_of(tree, *ROOMS):
        if file.name != "__init__.py":
            found += Finder(str(file.relative_to(tree)), file.read_bytes()).found
    times: Counter[str] = Counter()
    for number, mutant in enumerate(found):
        times[mutant.key] += 1
        found[number] = replace(mutant, nth=times[mutant.key])
    # each has its own place, so that a change elsewhere draws no others
    found.sort(key=lambda mutant: hashlib.sha256(f"{seed} {mutant.key}".encode()).digest())
    return found[:count], len(found)


# --- tests


class Measured:
    """A plugin of pytest: the lines of the rooms that each test runs, with its fixtures, and its
    processor time.
    """

    def __init__(self, tree: Path) -> None:
        self.files = {str(file): str(file.relative_to(tree)) for file in files_of(tree, *ROOMS)}
        self.seen: set[tuple[str, int]] = set()
        self.shared: dict[str, set[tuple[str, int]]] = defaultdict(set)
        self.tests: dict[str, dict[str, Any]] = {}
        self.passed: set[str] = set()

    def trace(self, frame: Any, event: str, arg: Any) -> Any:
        if (path := self.files.get(frame.f_code.co_filename)) is None:
            return None
        seen = self.seen

        def local(frame: Any, event: str, arg: Any) -> Any:
            if event == "line":
                seen.add((path, frame.f_lineno))
            return local

        return local

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any, request: Any) -> Any:
        """What a shared fixture runs counts for every test that asks for it."""
        if fixturedef.scope == "function":
            return (yield)
        before, self.seen = self.seen, self.shared[fixturedef.argname]
        try:
            return (yield)
        finally:
            self.seen = before

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: Any) -> Any:
        self.seen, began = set(), time.process_time()
        sys.settrace(self.trace)
        threading.settrace(self.trace)
        try:
            return (yield)
        finally:
            sys.settrace(None)
            threading.settrace(None)
            lines: dict[str, list[int]] = defaultdict(list)
            for path, line in sorted(
                self.seen.union(*(self.shared[one] for one in item.fixturenames))
            ):
                lines[path].append(line)
            self.tests[item.nodeid] = {
                "cpu_s": round(time.process_time() - began, 3),
                "lines": lines,
            }

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" and report.passed:
            self.passed.add(report.nodeid)


class Chosen:
    """A plugin of pytest: these tests, in this order; remembers the first that fails."""

    def __init__(self, tests: list[str]) -> None:
        self.order = {test: number for number, test in enumerate(tests)}
        self.failed: str | None = None

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items[:] = sorted(
            (one for one in items if one.nodeid in self.order),
            key=lambda one: self.order[one.nodeid],
        )

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.failed = self.failed or report.nodeid


def in_fork(act: Callable[[], Any], tree: Path, log: Path, cpu_s: int, wall_s: float) -> Any:
    """What `act` gives in a fork that works in `tree`; the name of the signal that ended it,
    else.
    """
    answer = log.with_suffix(".answer")
    answer.unlink(missing_ok=True)
    if not (child := os.fork()):
        try:
            os.setpgid(0, 0)
            with log.open("wb") as stream:
                os.dup2(stream.fileno(), 1)
                os.dup2(stream.fileno(), 2)
            resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 5))
            os.chdir(tree)
            sys.path.insert(0, str(tree / "src"))
            os.environ["PYTHONPATH"] = str(tree / "src")
            answer.write_text(json.dumps(act()))
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(0)
    until = time.monotonic() + wall_s
    while not (ended := os.waitpid(child, os.WNOHANG))[0]:
        if time.monotonic() > until:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return "out of time"
        time.sleep(0.02)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    if answer.exists():
        return json.loads(answer.read_text())
    assert os.WIFSIGNALED(ended[1]), log.read_text()[-4000:]
    return signal.Signals(os.WTERMSIG(ended[1])).name


def hashes(tree: Path, *folders: str) -> dict[str, str]:
    """The Python files of these folders and what they hold."""
    return {
        str(file.relative_to(tree)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in files_of(tree, *folders)
    }


def known_map(tree: Path, work: Path) -> dict[str, Any]:
    """The map of this tree: what was measured before, of files of tests that are still the same,
    and the others anew.

    Of a module that has changed since, all tests that ran any of it are taken to run each line.
    """
    file = work / "map.json"
    known = (
        json.loads(file.read_text())
        if file.exists()
        else {"tests": {}, "imported": [], "files": {}, "sources": {}}
    )
    files, sources = (
        hashes(tree, *TESTS),
        hashes(tree, *ROOMS),
    )
    fresh = [
        name
        for name, held in files.items()
        if known["files"].get(name) != held and Path(name).stem[:5] == "test_"
    ]
    if fresh := [name for name in fresh if name not in SKIPPED]:
        found = measured_map(tree, work, TESTS if len(fresh) > 60 else fresh)
        assert isinstance(found, dict), found
        kept = {
            name: test for name, test in known["tests"].items() if name.split("::")[0] not in fresh
        }
        imported = sorted({*known["imported"], *found["imported"]})
        known |= {"tests": kept | found["tests"], "imported": imported, "files": files}
        known["sources"] = sources | known["sources"]
        file.write_text(json.dumps(known))
    known["moved"] = {name for name, held in sources.items() if known["sources"][name] != held}
    return known


def measured_map(tree: Path, work: Path, files: list[str]) -> dict[str, Any]:
    """Tests that pass, with the lines that each runs, and what they import beside the package."""

    def act() -> dict[str, Any]:
        plugin = Measured(tree)
        skipped = [f"--ignore={path}" for path in SKIPPED]
        code = pytest.main([*files, *ARGUMENTS, *skipped, "-m", "not slow"], plugins=[plugin])
        assert code in (0, 1), f"pytest ends with {code}"
        imported = {
            name
            for name, module in list(sys.modules.items())
            if "site-packages" in (getattr(module, "__file__", None) or "")
            and not name.startswith("_")
        }
        tests = {name: test for name, test in plugin.tests.items() if name in plugin.passed}
        return {"tests": tests, "imported": sorted(imported)}

    return in_fork(act, tree, work / "map.log", 7200, 4 * 3600)


def covering(mutant: Mutant, known: dict[str, Any]) -> list[str]:
    """Tests that run the mutant's lines: the cheapest and most particular come first."""

    def runs(lines: list[int], span: tuple[int, int] | None) -> bool:
        return any(span is None or span[0] <= line <= span[1] for line in lines)

    span = mutant.span if mutant.body and mutant.path not in known["moved"] else None
    own = {
        name: test
        for name, test in known["tests"].items()
        if runs(test["lines"].get(mutant.path, []), span)
    }
    return sorted(
        own,
        key=lambda name: (own[name]["cpu_s"] + 0.01) * sum(map(len, own[name]["lines"].values())),
    )


def in_portions(names: list[str], tests: dict[str, Any], most_s: float) -> Iterator[list[str]]:
    """A few tests of a few files, then the others up to so much processor time."""
    first, files, spent = [], set[str](), 0.0
    for name in names:
        spent += tests[name]["cpu_s"]
        files.add(name.split("::")[0])
        if spent > FIRST_S or len(files) > FIRST_FILES:
            break
        first.append(name)
    yield first
    rest, spent = [], 0.0
    for name in names[len(first) :]:
        spent += tests[name]["cpu_s"]
        if spent <= most_s:
            rest.append(name)
    yield rest


def run_tests(tree: Path, chosen: list[str], tests: dict[str, Any], log: Path) -> str | None:
    """The first of these tests that fails in this tree, or what else ended them; None where all
    pass.
    """

    def act() -> dict[str, Any]:
        plugin = Chosen(chosen)
        files = sorted({name.split("::")[0] for name in chosen})
        code = pytest.main([*files, *ARGUMENTS, "-x"], plugins=[plugin])
        package = sys.modules.get("sinklab")
        assert package is None or str(package.__file__).startswith(str(tree)), package.__file__
        return {"code": int(code), "failed": plugin.failed}

    usual = sum(tests[name]["cpu_s"] for name in chosen)
    found = in_fork(act, tree, log, int(60 + 10 * usual), 600 + 40 * usual)
    if isinstance(found, str):
        return found
    return None if found["code"] == 0 else found["failed"] or f"pytest ends with {found['code']}"


def try_mutant(
    mutant: Mutant, number: int, tree: Path, known: dict[str, Any], most_s: float
) -> dict[str, Any]:
    """Put it in, run its tests, take it out."""
    tests, file, began, done, killed = known["tests"], tree / mutant.path, time.time(), 0, None
    names = covering(mutant, known)
    source = file.read_bytes()
    stamp = file.stat()
    try:
        file.write_bytes(mutant.apply(source))
        # a compiled file is known by the second and the size of its source
        os.utime(file, (stamp.st_mtime, int(stamp.st_mtime) - 1 - number))
        for portion in in_portions(names, tests, most_s):
            if portion and killed is None:
                done += len(portion)
                killed = run_tests(tree, portion, tests, tree.with_suffix(".log"))
    finally:
        file.write_bytes(source)
        os.utime(file, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    return {
        "key": mutant.key,
        "operator": mutant.operator,
        "line": mutant.line,
        "killed_by": killed,
        "covering": len(names),
        "tried": done,
        "seconds": round(time.time() - began, 1),
    }


# --- the run


def copied(source: Path, tree: Path) -> Path:
    """A copy of a tree as it is now."""
    left = shutil.ignore_patterns("__pycache__", ".git", "runs", "results", "*.pyc", ".*_cache")
    shutil.copytree(source, tree, ignore=left)
    return tree


def warm(imported: list[str]) -> None:
    """Import what tests import, but for the package, tests, and what starts processes of its
    own.
    """
    for name in imported:
        if not name.startswith(
            ("sinklab", "torch._inductor", "torch._dynamo", "triton", "pytest", "lm_eval")
        ):
            with contextlib.suppress(Exception):
                importlib.import_module(name)
    gc.collect()
    gc.freeze()


def work_off(
    mutants: list[Mutant], part: int, given: argparse.Namespace, known: dict[str, Any]
) -> None:
    """One worker: every so-manieth mutant that has no line yet."""
    shutil.rmtree(given.work / f"tree{part}", ignore_errors=True)
    tree = copied(given.work / "whole", given.work / f"tree{part}")
    for number, mutant in list(enumerate(mutants))[part :: given.jobs]:
        found = try_mutant(mutant, number, tree, known, given.most)
        with (given.work / "mutants.jsonl").open("a") as lines:
            lines.write(json.dumps(found) + "\n")
        print(
            f"{found['seconds']:6.1f} s  {mutant.key}: {found['killed_by'] or 'SURVIVES'}",
            flush=True,
        )


def told(work: Path) -> dict[str, dict[str, Any]]:
    """The last line about each mutant."""
    lines = work / "mutants.jsonl"
    found = map(json.loads, lines.read_text().splitlines()) if lines.exists() else []
    return {one["key"]: one for one in found}


def argued_equivalents() -> dict[str, str]:
    """Mutants that no test can kill, with the reason; they are not run."""
    found: dict[str, str] = json.loads(
        (Path(__file__).parent / "mutants_equivalent.json").read_text()
    )
    return found


def result(
    mutants: list[Mutant], of: int, given: argparse.Namespace, control: list[str]
) -> dict[str, Any]:
    """What was found: the share that was killed of those that a test could kill, and all
    survivors.
    """
    tree, known, argued = given.work / "whole", told(given.work), argued_equivalents()
    known = {key: {"killed_by": None, "tried": 0} for key in argued} | known
    run = [mutant for mutant in mutants if mutant.key in known]
    killed = [mutant for mutant in run if known[mutant.key]["killed_by"]]
    alive = [mutant for mutant in run if mutant not in killed]
    equivalent = [mutant for mutant in alive if mutant.key in argued]
    survivors = [mutant for mutant in alive if mutant.key not in argued]
    return {
        "seed": given.seed,
        "rooms": ROOMS,
        "all_mutants": of,
        "run": sum(known[mutant.key]["tried"] > 0 for mutant in run),
        "killed": len(killed),
        "equivalent": len(equivalent),
        "equivalent_by_argument_alone": sum(
            not known[mutant.key]["tried"] for mutant in equivalent
        ),
        "survived": len(survivors),
        "killed_of_those_not_equivalent": round(
            len(killed) / max(1, len(killed) + len(survivors)), 4
        ),
        "fail_without_a_mutant": control,
        "by_operator": {
            name: {"run": count, "killed": sum(one.operator == name for one in killed)}
            for name, count in Counter(
                one.operator for one in run if known[one.key]["tried"]
            ).items()
        },
        "survivors": [as_diff(tree, mutant) for mutant in survivors],
        "equivalents": [
            {**as_diff(tree, mutant), "because": argued[mutant.key]} for mutant in equivalent
        ],
        "each": [asdict(mutant) | known[mutant.key] for mutant in run],
    }


def as_diff(tree: Path, mutant: Mutant) -> dict[str, Any]:
    """Where it is, and the lines without and with it."""
    source = (tree / mutant.path).read_bytes()
    end = source.count(b"\n", 0, mutant.bytes[1])
    changed = mutant.apply(source)
    after = end + changed.count(b"\n") - source.count(b"\n")
    without, with_it = (
        text.decode().splitlines()[mutant.line - 1 : last + 1]
        for text, last in ((source, end), (changed, after))
    )
    diff = [*(f"- {line.strip()}" for line in without), *(f"+ {line.strip()}" for line in with_it)]
    return {"key": mutant.key, "line": mutant.line, "diff": diff}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--work", type=Path, required=True, help="copies of the tree, the map and a line per mutant"
    )
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument(
        "--most",
        type=float,
        default=40.0,
        help="processor time of the tests of one mutant, seconds",
    )
    parser.add_argument("--again", action="store_true", help="try those that survived once more")
    parser.add_argument(
        "--result", action="store_true", help="only write the result file from what was run"
    )
    given = parser.parse_args()
    given.work = given.work.resolve()
    given.work.mkdir(exist_ok=True)
    torch.set_num_threads(1)
    # what is edited meanwhile does not count, nor what the tree had once
    shutil.rmtree(given.work / "whole", ignore_errors=True)
    whole = copied(ROOT, given.work / "whole")
    mutants, of = drawn(whole, given.count, given.seed)
    known: dict[str, Any] = {
        "tests": {str(one["killed_by"]): {"cpu_s": 10.0} for one in told(given.work).values()}
    }
    known = known if given.result else known_map(whole, given.work)
    print(f"{len(mutants)} of {of} mutants, {len(known['tests'])} tests", flush=True)
    done = told(given.work)
    open_ = [
        one
        for one in mutants
        if one.key not in done or (given.again and not done[one.key]["killed_by"])
    ]
    open_ = [one for one in open_ if one.key not in argued_equivalents()]
    if not given.result:
        warm(known["imported"])
    workers = []
    for part in range(0 if given.result else given.jobs):
        if not (child := os.fork()):
            try:
                work_off(open_, part, given, known)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(0)
        workers.append(child)
    for child in workers:
        os.waitpid(child, 0)
    killing = sorted(
        {one["killed_by"] for one in told(given.work).values()} & known["tests"].keys()
    )
    control, left = [], killing
    while left and (failed := run_tests(whole, left, known["tests"], given.work / "control.log")):
        control.append(failed)
        left = [name for name in left if name != failed]
    found = result(mutants, of, given, control)
    path = write_result(f"mutants_seed_{given.seed}" if given.seed else "mutants", found)
    print(
        {name: found[name] for name in ("run", "killed", "equivalent", "survived")}, control, path
    )


if __name__ == "__main__":
    main()
