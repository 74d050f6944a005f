"""Which assertions of the tests of one commit have no counterpart in another: a refactoring may
move and rename them.

    python .ci/assertions.py OLD [NEW] [--of REGEX]

An assertion is an `assert`, a `pytest.raises`, or a call of assert_close, assert_equal, allclose or
approx. It is compared by its shape, its numbers and its operators; names, attributes and texts are
left out, since those may change. A tolerance or an expected number that changed therefore shows.
`--of` picks tests by file and name; by default those against golden data, of resuming and of
equality. Exit status 1 where something is left over.
"""

from __future__ import annotations

import argparse
import ast
import collections
import io
import re
import subprocess
import sys
import tarfile

OF = r"golden|parity|published|resum|reproduc|interrupt|kill|equal|same|exact|twin|bit|identical"
CALLS = {
    "raises",
    "assert_close",
    "assert_equal",
    "allclose",
    "approx",
    "assert_allclose",
    "assert_array_equal",
}


def tests(commit: str) -> dict[str, str]:
    """Path -> text of every test file of a commit."""
    packed = subprocess.run(
        ["git", "archive", commit, "tests"], check=True, stdout=subprocess.PIPE
    ).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        files = [
            member
            for member in archive.getmembers()
            if member.isfile() and member.name.endswith(".py")
        ]
        return {member.name: archive.extractfile(member).read().decode() for member in files}  # type: ignore[union-attr]


class Shape(ast.NodeTransformer):
    """The tree without names and texts."""

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Name("_")

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        return ast.Name("_")

    def visit_keyword(self, node: ast.keyword) -> ast.AST:
        return ast.keyword("_", self.visit(node.value))

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        return ast.Name("_")

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        return ast.Name("_") if isinstance(node.value, str) else node


def shape(node: ast.AST) -> str:
    if isinstance(node, ast.Assert):
        node = node.test  # the message is no part of what is asserted
    return ast.dump(Shape().visit(ast.parse(ast.unparse(node), mode="eval")))


def is_assertion(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        return (
            node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        ) in CALLS
    return isinstance(node, ast.Assert)


def assertions(files: dict[str, str], of: str = "") -> list[tuple[str, str, str]]:
    """(shape, file::function, source) of every assertion in functions whose file or name
    matches.
    """
    found = []
    for path, text in files.items():
        for function in ast.parse(text).body:
            name = f"{path}::{getattr(function, 'name', '')}"
            if re.search(of, name):
                nodes = [node for node in ast.walk(function) if is_assertion(node)]
                found += [(shape(node), name, ast.unparse(node)) for node in nodes]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("old")
    parser.add_argument("new", nargs="?", default="HEAD")
    parser.add_argument("--of", default=OF)
    given = parser.parse_args()
    there = collections.Counter(shape for shape, _, _ in assertions(tests(given.new)))
    before = assertions(tests(given.old), given.of)
    gone = []
    for kind, name, source in before:
        there[kind] -= 1
        if there[kind] < 0:
            gone.append((name, source))
    for name, source in gone:
        print(f"{name}\n    {source}")
    print(
        f"{len(before)} assertions of {given.old}: {len(gone)} without a counterpart in {given.new}"
    )
    return 1 if gone else 0


if __name__ == "__main__":
    sys.exit(main())
