"""The README, the pages of docs/ and examples/ are run as they stand.

Of a page, every ```python block runs, in order and in one namespace, and every ```bash block below `<!-- run -->`.
A python block below `<!-- not run: why -->` is only compiled; what one below `<!-- printed -->` prints stands in the
block behind it. `.ci/run` runs those below `<!-- install -->` and `<!-- test -->`.

What the README says runs in processes of its own. On Linux, commands of the other pages and the examples are forks of a
process that has imported the package: the imports of fifty processes took longer than all that they did.
"""

import ast
import importlib.util
import json
import os
import re
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

from forked import Forks
from sinklab.registry import caches, families, interventions, rules, sinks, statistics, studies, unmasking_rules

ALL = (caches, families, interventions, rules, sinks, statistics, studies, unmasking_rules)
ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"(?:^<!-- *(?P<marker>[^\n]*?) *-->\n+)?^```(?P<language>\w+)\n(?P<code>.*?)^```$", re.M | re.S)

PRINTED = re.compile(r"\n+```text\n(?P<text>.*?)^```$", re.M | re.S)
NUMBER = re.compile(r"[-+]?\d+\.\d+")


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks | None]:
    if sys.platform != "linux":
        yield None
        return
    with tempfile.TemporaryDirectory() as folder, Forks(Path(folder)) as forks:
        yield forks


def shell(command: list[str], folder: Path, forks: Forks | None = None) -> None:
    """Run in `folder`, first on the path `sinklab` as a fork or else this interpreter's; a failure shows the output."""
    scripts = [*([forks.folder] if forks else []), Path(sys.executable).parent]
    path = os.pathsep.join([*map(str, scripts), os.environ["PATH"]])
    done = subprocess.run(command, cwd=folder, env=os.environ | {"PATH": path}, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"


def same_answer(printed: str, said: str) -> None:
    """The same words and whole numbers; other numbers, which another processor rounds, within 0.02."""
    assert NUMBER.sub("…", printed) == NUMBER.sub("…", said)
    assert [*map(float, NUMBER.findall(printed))] == pytest.approx([*map(float, NUMBER.findall(said))], abs=0.02)


def run_page(page: Path, folder: Path, forks: Forks | None = None) -> int:
    """Run the blocks of a page in `folder`; returns how many ran."""
    text, namespace, ran = page.read_text("utf-8"), {"__name__": page.stem}, 0
    for block in BLOCK.finditer(text):
        marker, language, code = block["marker"] or "", block["language"], block["code"]
        if language == "python":
            # Empty lines put the page's own line numbers into tracebacks.
            compiled = compile("\n" * text.count("\n", 0, block.start("code")) + code, str(page), "exec")
            if marker == "printed":
                said = PRINTED.match(text, block.end())
                assert said, f"{page.name}: behind the block below <!-- printed --> stands no ```text block"
                with redirect_stdout(StringIO()) as written:
                    exec(compiled, namespace)
                same_answer(written.getvalue(), said["text"])
            elif not marker.startswith("not run: "):
                exec(compiled, namespace)
            ran += not marker.startswith("not run: ")
        elif language == "bash" and marker == "run":
            shell(["bash", "-euo", "pipefail", "-c", code], folder, forks)
            ran += 1
    return ran


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_snippets_of_a_page_run(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forks: Forks | None
) -> None:
    monkeypatch.chdir(tmp_path)
    ran = run_page(page, tmp_path, None if page.name == "README.md" else forks)
    assert ran > 0 or page.name != "README.md"


@pytest.mark.slow
@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.name)
def test_an_example_runs(example: Path, tmp_path: Path, forks: Forks | None) -> None:
    shell([str(forks.command) if forks else sys.executable, str(example)], tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="commands are forked on Linux alone")
@pytest.mark.parametrize(
    ("code", "status", "said"), [("raise KeyError(3)", 1, "KeyError: 3"), ("exit(3)", 3, ""), ("exit('no')", 1, "no")]
)
def test_a_fork_ends_as_a_process_would(tmp_path: Path, forks: Forks, code: str, status: int, said: str) -> None:
    (tmp_path / "script.py").write_text(f"print(open('here').read(), __name__)\n{code}", "utf-8")
    (tmp_path / "here").write_text("text", "utf-8")
    done = subprocess.run([forks.command, "script.py"], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout, said in done.stderr) == (status, "text __main__\n", True)
    with pytest.raises(AssertionError, match="unknown"):
        shell(["sinklab", "list", "nothing"], tmp_path, forks)


ASKED = "run.mobility().loc[2].idxmax()"


@pytest.mark.parametrize(
    ("page", "place", "asks", "lines"),
    [("README.md", 0, ".watch(", 3), ("README.md", 1, ASKED, 6), ("docs/guide.md", 0, ASKED, 6)],
)
def test_the_short_road_is_short(page: str, place: int, asks: str, lines: int) -> None:
    blocks = [block for block in BLOCK.finditer((ROOT / page).read_text("utf-8")) if block["language"] == "python"]
    code = blocks[place]["code"]
    assert asks in code and len([line for line in code.splitlines() if line.strip()]) <= lines
    assert (blocks[place]["marker"] == "printed") == (asks == ASKED)


def test_the_readme_is_short() -> None:
    assert len(PAGES[0].read_text("utf-8").splitlines()) <= 110
    assert (ROOT / "docs" / "canvas.gif").stat().st_size <= 400_000


ADDED = ("rule", "statistic", "intervention", "sink", "unmasking_rule", "cache", "family", "figure", "study")
# what ARCHITECTURE.md and the guides offer to inherit from; none of them is registered itself
BASES = {"Statistic", "KeyIntervention", "Sink", "ChoosingCache", "Family", "Study", "Checked"}


def test_there_is_an_example_of_every_kind_that_can_be_added() -> None:
    assert {path.name for path in (ROOT / "examples").glob("add_a_*.py")} == {f"add_a_{kind}.py" for kind in ADDED}


@pytest.mark.parametrize("kind", ADDED)
def test_a_kind_is_added_in_forty_lines_without_a_sibling(kind: str) -> None:
    text = (ROOT / "examples" / f"add_a_{kind}.py").read_text("utf-8")
    assert len(text.splitlines()) <= 40
    bases = {
        ast.unparse(base) for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef) for base in node.bases
    }
    assert bases <= BASES
    siblings = {one.__name__ for known in ALL for one in known.values() if isinstance(one, type)}
    assert not bases & siblings


@pytest.mark.parametrize("marker", ["install", "test"])
def test_the_readme_has_one_command_for_each_marker_of_ci(marker: str) -> None:
    blocks = [block for block in BLOCK.finditer(PAGES[0].read_text("utf-8")) if block["marker"] == marker]
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


def test_unmarked_commands_and_blocks_that_say_why_do_not_run(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "```bash\nexit 1\n```\n\n<!-- not run: needs a download -->\n```python\nraise SystemExit\n```\n", "utf-8"
    )
    assert run_page(page, tmp_path) == 0


def test_blocks_share_a_namespace_and_a_folder(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE.format(python="y = x", bash="touch here"), "utf-8")
    assert run_page(page, tmp_path) == 3
    assert (tmp_path / "here").exists()


@pytest.mark.parametrize("said", ["3 of 4, 0.60", "2 of 4, 0.51", "2 of 4"])
def test_an_answer_that_is_not_printed_fails_its_page(tmp_path: Path, said: str) -> None:
    page = tmp_path / "page.md"
    written = "<!-- printed -->\n```python\nprint('2 of 4, 0.60')\n```\n\n```text\n{}\n```\n"
    page.write_text(written.format("2 of 4, 0.61"), "utf-8")
    assert run_page(page, tmp_path) == 1
    page.write_text(written.format(said), "utf-8")
    with pytest.raises(AssertionError):
        run_page(page, tmp_path)


@pytest.mark.parametrize(
    ("python", "bash"), [("assert x == 2", "true"), ("y = x", "false | true"), ("y = x", "exit 3")]
)
def test_a_failing_block_fails_its_page(tmp_path: Path, python: str, bash: str) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE.format(python=python, bash=bash), "utf-8")
    with pytest.raises(AssertionError):
        run_page(page, tmp_path)


def test_the_findings_are_those_that_were_measured() -> None:
    path = ROOT / "studies" / "findings.py"
    spec = importlib.util.spec_from_file_location("findings", path)
    assert spec is not None and spec.loader is not None
    findings = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(findings)
    measured = json.loads(findings.RESULTS.read_text("utf-8"))
    shown = (ROOT / "docs" / "findings.md").read_text("utf-8").partition(findings.BEGIN)[2].partition(findings.END)[0]
    assert shown.strip() == findings.as_markdown(measured) and "| sinks per head and step |" in shown


@pytest.mark.parametrize("script", sorted((ROOT / "studies").glob("*.py")), ids=lambda path: path.stem)
def test_a_script_of_a_study_finds_what_it_imports(script: Path) -> None:
    runpy.run_path(str(script), run_name="imported")
