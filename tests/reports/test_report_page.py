import errno
import os
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
from matplotlib.backend_bases import FigureCanvasBase

from sinklab.records import RunWriter, open_run
from sinklab.reports import report

VOID = {"meta", "link", "img", "source", "br"}


class Page(HTMLParser):
    """Text, tags and addresses of a page; fails on tags that are not closed in order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.content = ""
        self._open: list[str] = []
        self.feed(html)
        assert not self._open, self._open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.addresses += [
            value for name, value in attrs if name in ("src", "srcset", "href", "data", "action", "poster")
        ]
        assert not [name for name, _ in attrs if name.startswith("on")]
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        if self._open and self._open[-1] != "style":
            self.content += data


def read(path: Path) -> Page:
    page = Page(path.read_text("utf-8"))
    page.content = page.content.replace("\u00a0", " ")
    return page


@pytest.fixture
def undrawn(monkeypatch):
    """Figures are made but not rasterised, which takes most of the time; drawn_report shows them all."""
    monkeypatch.setattr(FigureCanvasBase, "print_figure", lambda self, file, **_: file.write(b"png"))


def test_the_page_prints_the_numbers_of_the_runs(drawn_report):
    content = read(drawn_report).content
    assert "In sink, the added sink receives 50.0 % of the attention on average" in content
    assert "the greatest text position of a head receives 30.0 % of the attention" in content
    assert "receives less with the added sink than without: 10.0 % against 30.0 %" in content
    assert "value vectors of the added sink are 0.250 long on average, those of text 2.00" in content
    assert "In plain, the main sink of a head changes place at 100.0 % of steps." in content
    assert (
        "In sink, the main sink of a head changes place at 0.0 % of steps; the added sink is that main sink in 100.0 %"
        in (content)
    )
    assert "Among text positions alone, the greatest changes place at 100.0 % of steps" in content
    assert "changes the loss of plain by +0.500 ± 0.0040 nats; hiding as many random columns, by +0.0200" in content
    assert "sinks matter more than random columns here" in content
    assert "plain scores 4.00 nats per token on held-out text, 1.50 bits per byte" in content
    for fact in ("low_confidence", "sink_count", "torch", "seed", "5 sinks hidden per head"):
        assert fact in content


def test_other_data_other_sentences(make_study, undrawn, tmp_path):
    runs = [
        make_study("plain", text_share=0.1, sinks=0.0),
        make_study("sink", added=2, share=0.25, text_share=0.4, norm=3.0, sinks=-0.5),
    ]
    content = read(report(runs, tmp_path / "out")).content
    assert "In sink, the 2 added sinks receive 25.0 % of the attention on average" in content
    # The sink token lowers nothing here, and the page says so.
    assert "receives more with the added sink than without: 40.0 % against 10.0 %" in content
    assert "value vectors of the added sink are 3.00 long on average, those of text 2.00" in content
    assert "shorter in 0 of 2 layers" in content
    # 0.1 * 24 = 2.4 is below 1 + 3 * 23/24.
    assert "In plain, no position in any layer, head or step exceeds the sink rule" in content
    assert "No text position of plain is a sink" in content and "plain has no sink events" in content
    assert "changes the loss of sink by −0.500" in content and "sinks matter less than random columns here" in content
    assert "the loss of plain by 0 ± 0.0040 nats" in content


def test_equal_shares_are_called_equal_and_small_differences_no_difference(make_study, undrawn, tmp_path):
    runs = [make_study("plain", sinks=0.03), make_study("sink", added=1, share=0.2)]
    content = read(report(runs, tmp_path / "out")).content
    assert "about as much with the added sink (30.0 %) as without (30.0 %)" in content
    assert "the two do not differ by more than two standard errors" in content


def test_one_file_that_loads_nothing(drawn_report):
    target = drawn_report
    html, page = target.read_text("utf-8"), read(target)
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    assert f'<meta http-equiv="Content-Security-Policy" content="{policy}">' in html
    assert "script" not in page.tags and "iframe" not in page.tags
    assert len(page.addresses) > 20 and all(address.startswith("data:") for address in page.addresses)
    style = html[html.index("<style>") : html.index("</style>")]
    assert "url(" not in style and "@import" not in style and not re.search("https?:", html)
    assert page.tags.count("img") == 10 and "img" in page.tags
    names = {path.name for path in target.parent.iterdir()}
    assert {"report.html", "sink-share.png", "received-1.png", "received-2-dark.png", "heldout.png"} <= names
    assert len(names) == 21 and not [name for name in names if name.startswith(".")]
    assert (target.parent / "heldout.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert all(not isinstance(alt, str) or alt for alt in re.findall(r'alt="([^"]*)"', html))


def test_everything_from_a_run_is_escaped(make_study, undrawn, tmp_path):
    run = make_study(
        "<img src=x onerror=1>",
        folder="evil",
        added=1,
        revision='"><script>alert(2)</script>',
        note={"<b>": "$title ${x}"},
    )
    html = report(run, tmp_path / "out").read_text("utf-8")
    page = Page(html)
    assert "script" not in page.tags and "b" not in page.tags and "i" not in page.tags
    assert "A <script>alert(1)</script> & more" in page.content and "<img src=x onerror=1>" in page.content
    assert "$title ${x}" in page.content and "<b>man</b>" in page.content


def test_names_that_repeat_are_told_apart(make_study, undrawn, tmp_path):
    content = read(report([make_study("same", folder="a"), make_study("same", folder="b")], tmp_path / "out")).content
    assert "same (a)" in content and "same (b)" in content


def test_what_a_run_did_not_write_is_left_out(make_study, undrawn, tmp_path):
    page = read(report(make_study(leave_out=("heldout", "attention")), tmp_path / "no-attention"))
    assert "img" not in page.tags and "stormy night" in page.content and "What hiding sinks costs" not in page.content
    page = read(report(make_study("words", leave_out=("tokens", "generations")), tmp_path / "no-tokens"))
    assert "Which tokens are sinks" not in page.content and "No generated text was kept" in page.content
    assert "How much attention sinks take" in page.content
    mixed = [make_study("half", leave_out=("attention",)), make_study("whole", added=1)]
    assert "In whole, the added sink receives 50.0 %" in read(report(mixed, tmp_path / "mixed")).content


def test_interrupted_run_gives_a_report_that_says_so(tmp_path):
    with (
        pytest.raises(KeyboardInterrupt),
        RunWriter(tmp_path / "run", kind="study", model={"name": "stopped"}, settings={}, seed=0) as run,
    ):
        run.table("generations", {"sample": [0], "prompt": ["Once"], "completion": [" upon a time"]})
        raise KeyboardInterrupt
    content = read(report(open_run(tmp_path / "run"), tmp_path / "out")).content
    assert "The run of stopped was interrupted: KeyboardInterrupt" in content and " upon a time" in content


def test_refusals(make_study, undrawn, tmp_path):
    with pytest.raises(ValueError, match="at least one run"):
        report([], tmp_path / "out")
    with RunWriter(tmp_path / "training", kind="training", model={}, settings={}, seed=0):
        pass
    with pytest.raises(ValueError, match=r"runs of kind 'study': .*training is of kind 'training'"):
        report(open_run(tmp_path / "training"), tmp_path / "out")
    with RunWriter(tmp_path / "odd", kind="study", model={}, settings={}, seed=0) as run:
        run.table("heldout", {"k": [1]})
    with pytest.raises(ValueError, match=r"heldout.parquet is not that of a study: it lacks control, loss, stderr"):
        report(open_run(tmp_path / "odd"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_full_disk_leaves_no_half_page(make_study, tmp_path, monkeypatch):
    run = make_study(leave_out=("attention", "heldout"))

    def half(self, content):
        self.write_text("half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", half)
    with pytest.raises(OSError, match="No space left"):
        report(run, tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.mark.skipif(BROWSER is None, reason="no chromium at hand: the page is not rendered")
@pytest.mark.parametrize(("appearance", "surface"), [("1", (246, 245, 241)), ("0", (18, 19, 23))])
def test_a_browser_renders_it_without_complaint(drawn_report, tmp_path, appearance, surface):
    from PIL import Image

    picture = tmp_path / "page.png"
    flags = "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-sync"
    flags += " --disable-component-update --hide-scrollbars --window-size=1280,1600 --enable-logging=stderr --v=0"
    command = [BROWSER, *flags.split(), f"--user-data-dir={tmp_path / 'profile'}", f"--screenshot={picture}"]
    command += [f"--blink-settings=preferredColorScheme={appearance}", drawn_report.as_uri()]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env=os.environ | {"HOME": str(tmp_path)}
    )
    assert not [line for line in done.stderr.splitlines() if "CONSOLE" in line], done.stderr
    with Image.open(picture) as image:
        assert image.size == (1280, 1600)
        rgb = image.convert("RGB")
        assert rgb.getpixel((3, 3)) == surface
        # Text and figures: far more than the colours of an empty page.
        assert len(rgb.getcolors(maxcolors=1 << 24)) > 500
