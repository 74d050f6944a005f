"""Documents from files, or from the documentation that comes with every CPython."""

from __future__ import annotations

import ast
import gzip
import json
import sysconfig
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path

PYTHON_DOCS = "python-docs"
_NO_DOCS = {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"}
_SUFFIXES = tuple(kind + zipped for zipped in ("", ".gz") for kind in (".txt", ".md", ".jsonl"))


def read_corpus(source: str | Path, *, text_field: str = "text") -> Iterator[str]:
    """Yield the documents of a corpus, in a fixed order.

    Args:
        source: a folder or a file (.txt, .md, .jsonl, each also .gz), or ``"python-docs"``: Python's own documentation
            topics and the docstrings of the standard library, present on every machine.
        text_field: the field that holds the text in JSON lines.

    Raises:
        ValueError: if the source does not exist, holds no readable file or no text, or a JSON line has no such field.
    """
    documents = _python_docs() if str(source) == PYTHON_DOCS else _from_files(Path(source), text_field)
    empty = True
    for text in documents:
        if text.strip():
            empty = False
            yield text
    if empty:
        raise ValueError(f"the corpus {source} holds no text; training needs at least one document that is not blank")


def _from_files(source: Path, text_field: str) -> Iterator[str]:
    if not source.exists():
        raise ValueError(f"the corpus {source} does not exist; name a folder, a file or {PYTHON_DOCS!r}")
    found = sorted(source.rglob("*")) if source.is_dir() else [source]
    files = [path for path in found if path.is_file() and path.name.endswith(_SUFFIXES)]
    if not files:
        raise ValueError(f"the corpus {source} holds no file of a known kind ({', '.join(_SUFFIXES)})")
    for path in files:
        yield from _from_file(path, text_field)


def _from_file(path: Path, text_field: str) -> Iterator[str]:
    opener = gzip.open if path.name.endswith(".gz") else open
    try:
        # utf-8-sig: a byte-order mark is no text
        with opener(path, "rt", encoding="utf-8-sig") as lines:
            if ".jsonl" not in path.name:
                yield lines.read()
                return
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield _from_line(line, text_field, f"{path}, line {number}")
    except (OSError, UnicodeDecodeError, EOFError, zlib.error) as error:
        raise ValueError(f"{path} cannot be read as UTF-8 text: {error}") from error


def _from_line(line: str, text_field: str, where: str) -> str:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: each line must be one JSON object, but this one is no JSON: {error.msg}") from error
    if not isinstance(row, dict):
        raise ValueError(f"{where}: each line must be one JSON object, but this one is a {type(row).__name__}")
    if text_field not in row:
        raise ValueError(
            f"{where}: no field {text_field!r} (it has {', '.join(row)}); name the field that holds the text"
        )
    if not isinstance(row[text_field], str):
        raise ValueError(f"{where}: field {text_field!r} must be text, but is a {type(row[text_field]).__name__}")
    return row[text_field]


def _python_docs() -> Iterator[str]:
    from pydoc_data.topics import topics

    yield from (topics[name] for name in sorted(topics))
    library = Path(sysconfig.get_path("stdlib"))
    for path in sorted(library.rglob("*.py")):
        if _NO_DOCS & set(path.relative_to(library).parts):
            continue
        try:
            with warnings.catch_warnings():
                # odd escapes in somebody's source are not the caller's concern
                warnings.simplefilter("ignore")
                tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, ValueError):
            continue
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        texts = [ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds)]
        yield "\n\n".join(text for text in texts if text)
