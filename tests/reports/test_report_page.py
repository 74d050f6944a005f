import base64
import errno
import hashlib
import itertools
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from refusals import refused
from sinklab.lab.records import RunWriter, open_run
from sinklab.lab.reports import report

# what a test needs drawn is in `drawn_report`
pytestmark = pytest.mark.usefixtures("no_pictures")

VOID = {"meta", "link", "img", "source", "br", "input"}
RAW = {"style", "script"}


class Page(HTMLParser):
    """Text, tags and addresses of a page; fails on tags that are not closed in order."""

    def __init__(self, html):
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.content = ""
        self._open: list[str] = []
        self.feed(html)
        assert not self._open, self._open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.addresses += [
            value
            for name, value in attrs
            if name in ("src", "srcset", "href", "data", "action", "poster")
        ]
        assert not [name for name, _ in attrs if name.startswith("on")]
        if tag == "script":
            self.scripts.append((dict(attrs), ""))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        if self._open and self._open[-1] == "script":
            attributes, text = self.scripts[-1]
            self.scripts[-1] = (attributes, text + data)
        elif self._open and self._open[-1] not in RAW:
            self.content += data


def read(path):
    page = Page(path.read_text("utf-8"))
    page.content = page.content.replace("\u00a0", " ")
    return page


@pytest.fixture
def shown(tmp_path):
    """The page of runs, without tables."""
    numbers = itertools.count()

    def show(runs, **how):
        return read(report(runs, tmp_path / f"page-{next(numbers)}", tables=False, **how))

    return show


@pytest.mark.slow
def test_the_page_has_its_parts_and_the_facts_of_the_runs(drawn_report):
    content = read(drawn_report).content
    for fact in ("low_confidence", "sink_count", "torch", "seed"):
        assert fact in content
    for heading in (
        "Side by side",
        "What other rules call a sink",
        "Which tokens are sinks",
        "In numbers",
    ):
        assert heading in content
    assert "96 % filtered (above 96 %)" in content and "excess, sum, 3" in content
    assert "2 of 2 samples, every recorded step, every key of every recorded head" in content


@pytest.mark.slow
def test_one_file_that_loads_nothing_and_runs_one_script(drawn_report):
    html, page = drawn_report.read_text("utf-8"), read(drawn_report)
    (data, content), (plain, script) = page.scripts
    assert data == {"type": "application/json", "id": "payload"} and plain == {}
    assert len(json.loads(content)["runs"]) == 2
    allowed = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'sha256-{allowed}'; style-src 'unsafe-inline'; img-src "
        "data:; base-uri 'none'; form-action 'none'"
    )
    assert f'<meta http-equiv="Content-Security-Policy" content="{policy}">' in html
    # links stay on the page: to views of the explorer, and to the card of what hiding costs
    addresses = [
        "data:,",
        "#run=0,1&layer=0,0&head=0,0",
        "#run=0,1&layer=0,0&head=2,2",
        "#heldout_loss",
    ]
    assert page.addresses == addresses and not {"iframe", "object", "img"} & set(page.tags)
    # the maps of statistics are the only images
    images = re.findall(r'<image[^>]* xlink:href="([^"]*)"', html)
    assert images and all(address.startswith("data:image/png;base64,") for address in images)
    style = html[html.index("<style>") : html.index("</style>")]
    assert "url(" not in style and "@import" not in style
    assert "http" not in html.replace("http-equiv", "")
    for word in (
        "eval(",
        "Function(",
        "fetch(",
        "XMLHttpRequest",
        "import(",
        "innerHTML",
        "insertAdjacentHTML",
    ):
        assert word not in script, word


@pytest.mark.slow
def test_tables_lie_beside_if_they_are_asked_for(drawn_report, make_study, shown, tmp_path):
    folder = drawn_report.parent
    assert {path.name for path in folder.iterdir()} == {"report.html", "tables"}
    tables = {path.name for path in (folder / "tables").iterdir()}
    assert {"layers.csv", "sink_tokens.csv"} <= tables
    content = read(drawn_report).content
    assert f"Beside this page lie {len(tables)} files of tables in tables/" in content
    assert "Beside this page" not in shown(make_study()).content
    assert [path.name for path in (tmp_path / "page-0").iterdir()] == ["report.html"]


@pytest.mark.slow
def test_everything_from_a_run_is_escaped(make_study, shown):
    run = make_study(
        "<img src=x onerror=1>",
        folder="evil",
        added=1,
        revision='"><script>alert(2)</script>',
        note={"<b>": "$title ${x}"},
    )
    page = shown(run)
    assert len(page.scripts) == 2 and "<" not in page.scripts[0][1]
    assert "img" not in page.tags
    assert (
        "A <script>alert(1)</script> & more" in page.content
        and "<img src=x onerror=1>" in page.content
    )
    assert "$title ${x}" in page.content
    content = json.loads(page.scripts[0][1])["runs"][0]
    assert content["label"] == "<img src=x onerror=1>"
    assert " <b>man</b>" in {token[1] for token in content["vocabulary"]}


@pytest.mark.slow
def test_the_size_of_the_page_can_be_chosen(make_study, tmp_path, shown):
    run = make_study()
    pages = [shown(run, megabytes=size) for size in (3, 0.002)]
    contents = [json.loads(page.scripts[0][1])["runs"][0]["samples"] for page in pages]
    assert [len(samples) for samples in contents] == [2, 1]
    refused("megabytes says how large", report, run, tmp_path / "out", megabytes=0)


@pytest.mark.slow
def test_what_a_run_did_not_write_is_left_out(make_study, shown):
    page = shown(make_study(leave_out=("attention",)))
    assert "canvas" not in page.tags and "stormy night" in page.content
    assert "What blocking sinks costs" not in page.content
    assert "What was measured" not in page.content
    page = shown(make_study("words", leave_out=("tokens", "generations")))
    assert (
        "Which tokens are sinks" not in page.content
        and "No generated text was kept" in page.content
    )
    assert "How much attention sinks take" in page.content and "canvas" in page.tags
    page = shown(make_study("bare", leave_out=("value_norm", "key_norm")))
    assert "Value norms of sinks" not in page.content
    mixed = [make_study("half", leave_out=("attention",)), make_study("whole", added=1)]
    assert "the added sink receives 50.0 %" in shown(mixed).content


@pytest.mark.slow
def test_many_samples_stand_behind_a_line_and_edits_that_never_acted_are_named(make_study, shown):
    many = {
        "sample": list(range(20)),
        "prompt": ["p"] * 20,
        "completion": [f" text {i}." for i in range(20)],
        "idle": [""] * 19 + ["block_keys"],
    }
    run = make_study(leave_out=("generations",), whole={"generations": many})
    content = shown(run).content
    assert "8 more samples" in content and " text 19." in content
    assert content.count("no opportunity to act: block_keys") == 1


def test_refusals(tmp_path):
    refused("at least one run", report, [], tmp_path / "out")
    for kind in ("notes", "benchmark"):
        with RunWriter(tmp_path / kind, kind=kind, model={}, settings={}, seed=0):
            pass
        refused(f"is of kind '{kind}'", report, open_run(tmp_path / kind), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_full_disk_leaves_no_half_page(make_study, tmp_path, monkeypatch):
    run = make_study(leave_out=("attention",))

    def half(self, content, **how):
        self.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", half)
    with pytest.raises(OSError, match="No space left"):
        report(run, tmp_path / "out", tables=False)
    assert list((tmp_path / "out").iterdir()) == []


def test_what_was_not_measured_is_a_card_with_the_command_that_measures_it(make_study, tmp_path):
    bare = make_study("<b>/bare", folder="bare", leave_out=("attention",))
    html = report(bare, tmp_path / "out", tables=False).read_text("utf-8")
    assert (
        html.count("Not measured") == 3
        and "<code>sinklab curve --model &#39;&lt;b&gt;/bare&#39;</code>" in html
    )
    assert "`" not in html[html.index('class="story"') : html.index("</section>")]
