"""The site is built as it is published, and the notebooks run from their beginning; it takes
`.[docs]`.
"""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from launched import script

# they are not imported to be asked for: that takes half a second of every run
IS_READY = all(map(importlib.util.find_spec, ("mkdocs", "nbclient", "griffe")))
pytestmark = [
    pytest.mark.ring("extras"),
    pytest.mark.slow,
    pytest.mark.skipif(not IS_READY, reason="the site takes .[docs]"),
]

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
HOST = re.compile(
    r"<(?:script|img|iframe|source|video|audio|embed|link(?![^>]*canonical))\b[^>]*?\b(?:src|href|data)=\"?((?:https?:)?//[^\s\">]+)"
)


def run(*command, **environment):
    """What a command says; a failure shows it."""
    how = {"env": os.environ | environment, "capture_output": True, "text": True}
    done = subprocess.run(command, cwd=ROOT, **how)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def pages():
    return script("docs/site_pages")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Every page, built without a warning."""
    folder = tmp_path_factory.mktemp("site")
    command = f"-m mkdocs build --strict --quiet --site-dir {folder}".split()
    # without ruff's start for every signature, and an index of all words
    plain = {"SINKLAB_SEPARATE_SIGNATURES": "false", "SINKLAB_SEARCH": "false"}
    run(sys.executable, *command, NO_MKDOCS_2_WARNING="1", **plain)
    return folder


def test_the_names_of_the_reference_are_those_of_the_packages(pages):
    found = pages.public_names()
    for room, names in found.items():
        if room.removeprefix("sinklab.") not in pages.MODULES:
            assert sorted(names) == sorted(
                {*importlib.import_module(room).__all__} - {"__version__"}
            ), room
    rooms = {
        "sinklab",
        *(
            f"sinklab.{name}"
            for name in ("core.instrument", "core.subject", "lab.reports", "lab.studies.curve")
        ),
    }
    assert rooms <= set(found)


def test_every_public_name_has_a_docstring(pages):
    import griffe

    extensions = griffe.Extensions(pages.Docstrings())
    package = griffe.load("sinklab", search_paths=[str(ROOT / "src")], extensions=extensions)
    paths = {
        path.removeprefix("sinklab.")
        for names in pages.public_names().values()
        for path in names.values()
    }
    assert (
        len(paths) > 285 and [path for path in sorted(paths) if not package[path].docstring] == []
    )


def test_every_public_name_has_its_place(pages, site):
    for room, names in pages.public_names().items():
        file = "index" if room == "sinklab" else room.removeprefix("sinklab.")
        ids = set(
            re.findall(r'\bid="([^"]+)"', (site / "reference" / f"{file}.html").read_text("utf-8"))
        )
        assert {f"{room}.{name}" for name in names} <= ids, room
        assert room == "sinklab" or set(names.values()) <= ids, room


def test_roles_of_docstrings_became_links(site):
    shown = "".join(path.read_text("utf-8") for path in (site / "reference").glob("*.html"))
    assert not re.findall(r":(?:class|func|meth|data|mod):", shown)
    assert re.search(
        r'<a class="autorefs[^>]*href="lab.checkpoints.html#'
        r'sinklab.lab.checkpoints.loading.Loaded"',
        shown,
    )


def test_nothing_is_asked_of_another_host(site):
    for path in [*site.rglob("*.html"), *site.rglob("*.css")]:
        text = path.read_text("utf-8")
        assert HOST.findall(text) == [], path.name
        assert not re.findall(r"(?:@import|url\()\s*[\"']?(?:https?:)?//", text), path.name
    assert HOST.findall('<script async src="https://else.where/x.js">') == [
        "https://else.where/x.js"
    ]


def test_examples_stand_on_the_site_as_they_are(site):
    for path in (ROOT / "examples").glob("*.py"):
        page = (site / "examples" / f"{path.stem}.html").read_text("utf-8")
        shown = re.sub(r"<[^>]+>", "", page)
        for line in path.read_text("utf-8").splitlines():
            assert line.replace("&", "&amp;").replace("<", "&lt;").replace(
                ">", "&gt;"
            ) in shown.replace("&quot;", '"')


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_kept_with_small_outputs(path):
    cells = [
        cell for cell in json.loads(path.read_text("utf-8"))["cells"] if cell["cell_type"] == "code"
    ]
    assert path.stat().st_size <= 150_000 and "%pip install" in "".join(cells[0]["source"])
    assert (
        all(cell["execution_count"] for cell in cells)
        and sum(bool(cell["outputs"]) for cell in cells) > len(cells) / 2
    )
    outputs = json.dumps([cell["outputs"] for cell in cells])
    assert (
        not re.findall(r"(?:/home/|/root/|/tmp/|/work|\\\\Users)", outputs)
        and '"error"' not in outputs
    )


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path, python):
    # the kernel imports the package that is tested
    where = str(Path(importlib.import_module("sinklab").__file__ or "").parents[1])
    script = "docs/notebooks/execute.py"
    said = run(python, script, "--check", path.stem, PYTHONPATH=where)
    assert "cells ran" in said
