"""One word a concept, as docs/glossary.md has it: other words are refused on the pages,
and grow no more in docstrings, help and printed sentences.
"""

import ast
import re
from functools import cache
from pathlib import Path
from pydoc import locate

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "studies").glob("*.md")),
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "ARCHITECTURE.md")),
    ROOT / "CONTRIBUTING.md",
]
SOURCES = [
    path
    for path in (ROOT / "src" / "sinklab").rglob("*")
    if path.suffix in (".py", ".jinja", ".toml", ".js")
]
NAME = re.compile(r"\bsinklab(?:\.\w+)+\b")
KEYS = r"(?:keys?|sinks?|columns?)"
SYNONYMS = {
    "blocked": rf"\b(?:hidden|taken|gone|lost) {KEYS}\b|\bhid(?:e|es|ing) (?:\w+ ){{0,4}}{KEYS}\b"
    rf"|\b{KEYS} (?:is|are|was|were|stays?) (?:hidden|taken|gone|lost)\b",
    "inconclusive": r"\bcannot (?:tell|be told)\b",
    "control": r"\buntrained (?:twins?|models? beside)\b",
    "distinguishable": r"\btold from\b",
}
"""Word of the glossary -> other words for it."""
LEFT = 8
"""Places in the package that still have another word; each one that is mended lowers this."""
GENERATED = re.compile(r"<!-- findings: `.*?<!-- end -->", re.S)
CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.S | re.M)


def other_words(text):
    """Every synonym of a word of the glossary, with the word."""
    flat = " ".join(CODE.sub("", text).split())
    return [
        f"{found[0]!r}: {word}"
        for word, pattern in SYNONYMS.items()
        for found in re.finditer(pattern, flat, re.IGNORECASE)
    ]


@cache
def texts_of(path):
    """Docstrings and other texts of a module; the whole of a template."""
    text = path.read_text("utf-8")
    if path.suffix != ".py":
        return [text]
    constants = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant)]
    return [node.value for node in constants if isinstance(node.value, str)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_has_one_word_a_concept(page):
    assert other_words(GENERATED.sub("", page.read_text("utf-8"))) == []


@pytest.mark.slow
def test_the_package_takes_no_new_words_for_a_concept():
    found = [
        f"{path.relative_to(ROOT)}: {one}"
        for path in SOURCES
        for text in texts_of(path)
        for one in other_words(text)
    ]
    assert len(found) <= LEFT, "\n".join(found)


@pytest.mark.ring("extras")
@pytest.mark.slow
def test_what_is_named_in_full_is_there():
    today = [path for path in PAGES if path.stem not in ("CHANGELOG", "LOG")]
    files = [*today, *SOURCES, *(ROOT / "examples").glob("*.py")]
    names = {name for path in files for text in texts_of(path) for name in NAME.findall(text)}
    # a group of entry points, and the beginning of a name
    assert {name for name in names if locate(name) is None} == {
        "sinklab.plugins",
    }
