"""The README, the pages of docs/ and examples/ are run as they stand.

Of a page, every ```python block runs, in order and in one namespace, and every ```bash block below
`<!-- run -->`. A python block below `<!-- not run: why -->` is only compiled; what one below
`<!-- printed -->` prints stands in the block behind it. `.ci/run` runs those below
`<!-- install -->` and `<!-- test -->`.

What the README says runs in processes of its own. On Linux, commands of the other pages and the
examples are forks of a process that has imported the package: the imports of fifty processes took
longer than all that they did. Their pages are without pictures, which tests/reports draws.
"""

import ast
import inspect
import json
import os
import re
import runpy
import subprocess
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

from launched import script
from pictures import no_pictures as no_pictures
from sinklab.core import registry
from sinklab.core.registry import caches, interventions, rules, sinks, statistics, unmasking_rules
from sinklab.lab.registry import families, studies

pytestmark = pytest.mark.ring("extras")

ALL = (caches, families, interventions, rules, sinks, statistics, studies, unmasking_rules)
ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(
    r"(?:^<!-- *(?P<marker>[^\n]*?) *-->\n+)?^```(?P<language>\w+)\n(?P<code>.*?)^```$", re.M | re.S
)

PRINTED = re.compile(r"\n+```text\n(?P<text>.*?)^```$", re.M | re.S)
NUMBER = re.compile(r"[-+−]?\d+\.\d+")


def shell(command, folder, python):
    """Run in `folder`, the commands beside `python` first; a failure shows the output."""
    path = os.pathsep.join([str(Path(python).parent), os.environ["PATH"]])
    done = subprocess.run(
        command, cwd=folder, env=os.environ | {"PATH": path}, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"


def same_answer(printed, said):
    """The same words and whole numbers; other numbers, which another processor rounds, within
    0.02.
    """
    assert NUMBER.sub("…", printed) == NUMBER.sub("…", said)
    assert numbers(printed) == pytest.approx(numbers(said), abs=0.02)


def numbers(text):
    return [float(number.replace("−", "-")) for number in NUMBER.findall(text)]


def run_page(page, folder, python=sys.executable):
    """Run the blocks of a page in `folder`; returns how many ran."""
    text, namespace, ran = page.read_text("utf-8"), {"__name__": page.stem}, 0
    for block in BLOCK.finditer(text):
        marker, language, code = block["marker"] or "", block["language"], block["code"]
        if language == "python":
            # Empty lines put the page's own line numbers into tracebacks.
            compiled = compile(
                "\n" * text.count("\n", 0, block.start("code")) + code, str(page), "exec"
            )
            if marker == "printed":
                said = PRINTED.match(text, block.end())
                assert said, (
                    f"{page.name}: behind the block below <!-- printed --> stands no ```text block"
                )
                with redirect_stdout(StringIO()) as written:
                    exec(compiled, namespace)
                same_answer(written.getvalue(), said["text"])
            elif not marker.startswith("not run: "):
                exec(compiled, namespace)
            ran += not marker.startswith("not run: ")
        elif language == "bash" and marker == "run":
            shell(["bash", "-euo", "pipefail", "-c", code], folder, python)
            ran += 1
    return ran


@pytest.mark.slow
@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_snippets_of_a_page_run(page, tmp_path, monkeypatch, python):
    monkeypatch.chdir(tmp_path)
    ran = run_page(page, tmp_path, sys.executable if page.name == "README.md" else python)
    assert ran > 0 or page.name != "README.md"


@pytest.mark.slow
@pytest.mark.parametrize(
    "example", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.name
)
def test_an_example_runs(example, tmp_path, python):
    shell([python, str(example)], tmp_path, python)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="commands are forked on Linux alone")
@pytest.mark.parametrize(
    ("code", "status", "said"),
    [("raise KeyError(3)", 1, "KeyError: 3"), ("exit(3)", 3, ""), ("exit('no')", 1, "no")],
)
def test_a_fork_ends_as_a_process_would(tmp_path, python, code, status, said):
    (tmp_path / "script.py").write_text(f"print(open('here').read(), __name__)\n{code}", "utf-8")
    (tmp_path / "here").write_text("text", "utf-8")
    done = subprocess.run([python, "script.py"], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout, said in done.stderr) == (status, "text __main__\n", True)
    with pytest.raises(AssertionError, match="must be one of"):
        shell(["sinklab", "list", "nothing"], tmp_path, python)


ASKED = "run.mobility().loc[2].idxmax()"


@pytest.mark.parametrize(
    ("page", "place", "asks", "lines"),
    [("README.md", 1, "lm.compare(arms)", 7), ("docs/guide.md", 0, ASKED, 6)],
)
def test_the_short_road_is_short(page, place, asks, lines):
    blocks = [
        block
        for block in BLOCK.finditer((ROOT / page).read_text("utf-8"))
        if block["language"] == "python"
    ]
    code = blocks[place]["code"]
    assert asks in code and len([line for line in code.splitlines() if line.strip()]) <= lines
    assert blocks[place]["marker"] == "printed"


def test_the_readme_is_short_and_shows_a_strong_effect_on_its_first_screen():
    text = PAGES[0].read_text("utf-8")
    assert len(text.splitlines()) <= 110
    for name, most in (
        ("canvas.gif", 400_000),
        ("live.png", 150_000),
        ("example_page.html", 3_000_000),
    ):
        assert (ROOT / "docs" / name).stat().st_size <= most and f"(docs/{name})" in text
    first = text.partition("## Install")[0]
    without, alone = re.findall(r"receives (\d+) %", first)
    assert int(alone) > 5 * int(without)
    sink, other, _ = PRINTED.findall(first)[1].strip().splitlines()
    assert numbers(sink)[1] > 1 and numbers(other)[2] < 0.05


def test_the_page_to_look_at_asks_nothing_of_others_and_names_no_folder():
    page = (ROOT / "docs" / "example_page.html").read_text("utf-8")
    assert not re.findall(r"<(?:script|img|link|iframe)\b[^>]*(?:src|href)=\"?(?:https?:)?//", page)
    assert not re.findall(r"/(?:root|home|tmp|work)/|\\\\Users", page)
    assert "smollm2-diffusion" in page and "<!doctype html>" in page[:200].lower()


METHODS = (
    "statistics",
    "rules",
    "interventions",
    "sinks",
    "unmasking_rules",
    "schedules",
    "caches",
)


@pytest.mark.parametrize("kind", METHODS)
def test_every_method_has_its_line_with_the_file_that_defines_it(kind):
    text = (ROOT / "docs" / "methods.md").read_text("utf-8")
    section = next(part for part in text.split("\n## ") if f"`registry.{kind}`" in part)
    usual = re.search(r"defined in \[[\w.]+\]\(\.\./src/sinklab/(.+?)\)", section)
    assert usual is not None, f"docs/methods.md: {kind}"
    lines = re.findall(
        r"^\| \[?`(\w+)`(?:\]\(\.\./src/sinklab/(.+?)\))? \| ([^|]+) \| [^|]+ \|$",
        section,
        re.M,
    )
    # scripts of studies, which other tests import, bring plug-ins of their own
    known = {
        name: value
        for name, value in registry.REGISTRIES[kind].items()
        if getattr(value, "__module__", "sinklab").startswith("sinklab")
    }
    assert sorted(name for name, *_ in lines) == sorted(known), f"docs/methods.md: {kind}"
    for name, file, about in lines:
        value = known[name]
        defined = inspect.getsourcefile(value if isinstance(value, type) else type(value))
        assert Path(str(defined)).as_posix().endswith(f"/sinklab/{file or usual[1]}"), name
        assert about.strip() != ""


def test_every_selector_and_removal_is_explained():
    text = (ROOT / "docs" / "methods.md").read_text("utf-8")
    assert all(f"`{name}`" in text for name in (*registry.selectors, *registry.removals))


CHECKED_PAGES = [*PAGES, *sorted((ROOT / "studies").glob("*.md"))]
BEHIND = re.compile(r"([+−]?\d+(?:\.\d+)?)<!-- as in (\S+) -->")
EXPLAINS = re.compile(r"explains? \d+(?:\.\d+)?(?!\d|\.\d|<!-- findings)")


@pytest.fixture(scope="module")
def findings():
    return script("studies/findings")


@pytest.mark.parametrize("page", CHECKED_PAGES, ids=lambda path: path.name)
def test_numbers_of_the_packaged_models_come_from_one_file(page, findings):
    text, measured = page.read_text("utf-8"), json.loads(findings.RESULTS.read_text("utf-8"))
    assert findings.filled(text, measured) == text
    assert text.count("<!-- findings: ") == len(findings.MARK.findall(text)) + text.count(
        findings.BEGIN
    )
    for number, other in BEHIND.findall(text):
        assert re.search(
            rf"(?<![\d.]){re.escape(number)}(?!\d|\.\d)", (ROOT / other).read_text("utf-8")
        ), (
            number,
            other,
        )
    # a study is of its day, and its numbers are those of that day
    if page in PAGES and page.name not in ("decisions.md", "benchmarks.md"):
        assert unmarked(text, findings, measured) == []


def unmarked(text, findings, measured):
    """Numbers beside the name of a packaged model that are in the findings, or said of what is,
    without a mark.
    """
    table = text.partition(findings.BEGIN)[2].partition(findings.END)[0]
    shown = {
        f"{value:.3g}"
        for row in measured["measures"].values()
        for value in row.values()
        if value is not None
    }
    distinct = {number for number in shown if len(number.replace(".", "")) >= 3 and number != "100"}
    wrong = []
    for paragraph in re.split(r"\n\n|\n(?=[|-] )", BLOCK.sub("", text).replace(table, "")):
        if not re.search(r"`tiny(?:-sink|-causal)?`", paragraph):
            continue
        plain = re.findall(r"(?<![\d.,−+-])\d+\.\d+(?!\d|\.\d|<!--)", paragraph)
        wrong += [f"{number}: {paragraph}" for number in plain if number in distinct]
        wrong += [f"{found[0]}: {paragraph}" for found in EXPLAINS.finditer(paragraph)]
    return wrong


ADDED = (
    "rule",
    "statistic",
    "intervention",
    "selector",
    "sink",
    "unmasking_rule",
    "cache",
    "family",
    "figure",
    "study",
)
# what ARCHITECTURE.md and the guides offer to inherit from; none of them is registered itself
BASES = {"Statistic", "Edit", "Selector", "Sink", "Cache", "Family", "Study"}
BASES |= {"Checked", "UnmaskingRule"}


def test_there_is_an_example_of_every_kind_that_can_be_added():
    assert {path.name for path in (ROOT / "examples").glob("add_a_*.py")} == {
        f"add_a_{kind}.py" for kind in ADDED
    }


@pytest.mark.parametrize("kind", ADDED)
def test_a_kind_is_added_in_one_short_file_without_a_sibling(kind):
    text = (ROOT / "examples" / f"add_a_{kind}.py").read_text("utf-8")
    assert len(text.splitlines()) <= 60
    bases = {
        ast.unparse(base)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ClassDef)
        for base in node.bases
    }
    assert bases <= BASES
    siblings = {one.__name__ for known in ALL for one in known.values() if isinstance(one, type)}
    assert not bases & siblings


@pytest.mark.parametrize("marker", ["install", "test"])
def test_the_readme_has_one_command_for_each_marker_of_ci(marker):
    blocks = [
        block for block in BLOCK.finditer(PAGES[0].read_text("utf-8")) if block["marker"] == marker
    ]
    assert [block["language"] for block in blocks] == ["bash"]


PAGE = """# Page

```python
x = 1
```

```python
assert x == 1
{python}
```

<!-- run -->

```bash
{bash}
```
"""


@pytest.mark.parametrize(
    ("code", "bash"), [("assert x == 2", "true"), ("y = x", "false | true"), ("y = x", "exit 3")]
)
def test_a_failing_block_fails_its_page(tmp_path, code, bash):
    page = tmp_path / "page.md"
    page.write_text(PAGE.format(python=code, bash=bash), "utf-8")
    with pytest.raises(AssertionError):
        run_page(page, tmp_path)


def test_the_findings_are_those_that_were_measured(findings):
    measured = json.loads(findings.RESULTS.read_text("utf-8"))
    shown = (
        (ROOT / "docs" / "findings.md")
        .read_text("utf-8")
        .partition(findings.BEGIN)[2]
        .partition(findings.END)[0]
    )
    assert (
        shown.strip() == findings.as_markdown(measured) and "| sinks per head and step |" in shown
    )


@pytest.mark.parametrize(
    "script", sorted((ROOT / "studies").glob("*.py")), ids=lambda path: path.stem
)
def test_a_script_of_a_study_finds_what_it_imports(script, scratch, monkeypatch):
    # as where Python is given the script; some bring plug-ins
    monkeypatch.syspath_prepend(script.parent)
    scratch(*ALL, registry.removals, registry.selectors)
    runpy.run_path(str(script), run_name="imported")
