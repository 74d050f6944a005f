"""Names in the core keep to docs/glossary.md as its prose does (`test_words`): functions, classes,
arguments, attributes and variables that it defines, taken apart at underscores and capitals.

A name that torch or transformers gave, and the core only uses, is not read.
"""

import ast
import re

import pytest

from launched import ROOT

CORE = ROOT / "src" / "sinklab" / "core"
WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
BLOCKED = "a key is blocked"
ELIGIBLE = "a key that may be chosen is eligible"
EXCLUDED = "a key never chosen is excluded, a query that an edit passes over is exempt"
UPPER = "an upper limit is max_…"
INSTEAD = {
    **dict.fromkeys(("gone", "taken", "hidden", "hide", "hides", "hiding", "hid"), BLOCKED),
    **dict.fromkeys(("lost", "lose", "loses", "dropped", "drops"), f"{BLOCKED}, mass is removed"),
    "free": ELIGIBLE,
    **dict.fromkeys(("spared", "spare", "immune"), EXCLUDED),
    **dict.fromkeys(("most", "longest", "limit", "ceiling"), UPPER),
    **dict.fromkeys(("told", "tells"), "reported, shown"),
    **dict.fromkeys(("asked", "asks"), "wanted, required"),
    "held": "contained, or the noun: ids, columns",
    "behind": "after; of layers and places, what they are",
    "beside": "with, extra",
    "twin": "a control is a control",
}
"""Word -> what a name says instead."""
FIELD = re.compile("hidden_(?:states?|size|layers)")
"""The field's words for what is between layers."""
ALLOWED = {
    "Dose.held": "a column of logs and run folders: attention that chosen keys held",
    "RemovalRecord.held_BLH": "the same",
    "held_BH": "the same, before it is logged",
}
"""Names as they are, or with the class or function around them, and why they stay."""
LEFT = 16
"""Names in the core that still have another word; each one that is mended lowers this."""

STEMS = {"seed", "need", "speed", "feed", "embed", "exceed", "proceed"}
"""Words in -ed that are no participles."""
IRREGULAR = {
    *("begun", "built", "chosen", "drawn", "found", "given", "gone", "held", "hidden"),
    *("kept", "known", "left", "lost", "made", "seen", "sent", "shown", "spent", "split", "taken"),
    *("told", "written"),
}
VERBS = {"check", "mark", "pad", "set"}
"""First words of a name that does something to what the last word says."""
AFTER = {"at", "before", "by", "for", "from", "in", "of"}
"""Words that a participle may stand before at the head of a name: seen_by."""
STATED = {
    "limited": "says of a field in a class what it is",
    "registered": "the same",
    "_split": "a verb: it splits",
}
"""Functions that may be named so, and why."""
PARTICIPLES = 25
"""Functions in the core that are named by a participle still; each one that is mended lowers
this."""


def defined(tree):
    """(line, the scope around it, name) of every name that a module defines."""

    def visit(node, scope):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, scope, node.name
            scope = node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, scope, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, scope, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, scope, node.attr
        for child in ast.iter_child_nodes(node):
            yield from visit(child, scope)

    return visit(tree, "")


def other_names(text):
    """ "line: name: what to say instead", each name once a scope."""
    found = {}
    for line, scope, name in defined(ast.parse(text)):
        if name in ALLOWED or f"{scope}.{name}" in ALLOWED:
            continue
        for word in WORD.findall(FIELD.sub("", name)):
            if word.lower() in INSTEAD:
                found.setdefault((scope, name), f"{line}: {name}: {INSTEAD[word.lower()]}")
    return list(found.values())


def is_participle(name):
    """Whether a function's name says what was done, and not what it does or gives."""
    *_, last = words = name.strip("_").split("_")
    if words[0] in ("is", "has", *VERBS):
        return False
    if last in AFTER:
        last = words[0]
    one = len(words) == 1 and last.endswith("ing")
    return one or last in IRREGULAR or (last.endswith("ed") and last not in STEMS)


def is_adjective(node):
    """Whether a function is a property or a context manager: these are what something is, or how
    things are inside a block.
    """
    marks = [ast.unparse(mark) for mark in node.decorator_list]
    returned = ast.unparse(node.returns) if node.returns else ""
    return "AbstractContextManager" in returned or any(
        mark.endswith(("property", "contextmanager", ".setter")) for mark in marks
    )


def participles(text):
    """ "line: name" of every function that a participle names."""
    return [
        f"{node.lineno}: {node.name}"
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and is_participle(node.name)
        and not (node.name in STATED or is_adjective(node))
    ]


@pytest.mark.parametrize(("read", "left"), [(other_names, LEFT), (participles, PARTICIPLES)])
def test_names_of_the_core_keep_to_the_glossary(read, left):
    found = [
        f"{path.relative_to(ROOT)}:{one}"
        for path in sorted(CORE.rglob("*.py"))
        for one in read(path.read_text("utf-8"))
    ]
    assert len(found) <= left, "\n".join(found)
