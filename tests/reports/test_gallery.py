"""A site of runs: an index that asks for nothing, a page for each run, and no word of the machine
that made them.
"""

import dataclasses
import re
import socket
from pathlib import Path
from urllib.parse import unquote

import pytest

from refusals import refused
from sinklab.extras.sharing import shareable, without_places, write_gallery
from sinklab.lab.records import Run


def elsewhere(run, **changes):
    """The run with other words in its run.json."""
    return Run(run.path, dataclasses.replace(run.info, **changes))


@pytest.mark.slow
def test_every_run_has_a_card_and_its_page(make_study, tmp_path):
    runs = [
        make_study(),
        make_study("<b>bold</b>", folder="with blank", added=1),
        make_study(folder="x/tiny"),
    ]
    index = write_gallery(runs, tmp_path / "site", title="Sinks & more")
    text = index.read_text("utf-8")
    assert index == tmp_path / "site" / "index.html" and "<title>Sinks &amp; more</title>" in text
    links = dict.fromkeys(unquote(link) for link in re.findall(r'<a href="([^"]+)"', text))
    assert list(links) == ["tiny-1/report.html", "with-blank/report.html", "tiny-3/report.html"]
    for link in links:
        assert "Attention sinks" in (index.parent / link).read_text("utf-8")
    assert text.count("<article") == 3 and text.count("<svg") == 3
    assert "&lt;b&gt;bold&lt;/b&gt; · study" in text and "<b>bold" not in text
    assert "the added sink receives" in text
    # of what a browser would ask for there is only what the page holds
    asked = re.findall(r'(?:src|srcset|href)="([^"]*)"', text)
    assert all(one.startswith(("data:", "#")) or one in links for one in asked)
    assert not re.search(r"https?://", re.sub(r"data:[^\"]+", "", text))


@pytest.mark.slow
@pytest.mark.usefixtures("no_pictures")
def test_no_page_lies_on_another(make_study, tmp_path):
    """Runs of one name are numbered, also where a run is called like a numbered one or like the
    index.
    """
    runs = [
        make_study(folder=folder, samples=1) for folder in ("x/a", "y/a", "z/a-1", "z/index.html")
    ]
    index = write_gallery(runs, tmp_path / "site")
    pages = sorted(path.parent.name for path in index.parent.glob("*/report.html"))
    assert len(pages) == 4 and index.is_file()


def test_a_run_without_attention_has_a_card_without_a_picture(make_study, tmp_path):
    text = write_gallery([make_study(leave_out=("attention",))], tmp_path / "site").read_text(
        "utf-8"
    )
    assert "<article" in text and "<img" not in text


@pytest.mark.parametrize(
    ("said", "sent"),
    [
        ("/home/me/data/x.txt", "x.txt"),
        ("~/models/x/", "x"),
        ("../data/v.jsonl", "v.jsonl"),
        ("C:\\Users\\me\\x", "x"),
        ("//server/share/x", "x"),
        ("file:///home/me/x/y", "y"),
        ("OSError: cannot read /home/me/v.txt: disk full", "OSError: cannot read v.txt: disk full"),
        ("key=/srv/a/b,(/srv/c/d)", "key=b,(d)"),
        ("GSAI-ML/LLaDA-8B", "GSAI-ML/LLaDA-8B"),
        ("https://arxiv.org/abs/2510.15731", "https://arxiv.org/abs/2510.15731"),
        ("</s>", "</s>"),
        ("either/or", "either/or"),
        (
            {"prompts": ["cd /home/me/x"], "corpus": ["/a/b"], "n": 3},
            {"prompts": ["cd /home/me/x"], "corpus": ["b"], "n": 3},
        ),
        (None, None),
    ],
)
def test_of_a_path_the_last_part_stays(said, sent):
    assert without_places(said) == sent


def test_the_home_folder_goes_whatever_is_in_its_name(monkeypatch):
    monkeypatch.setenv("HOME", "/home/a b")
    assert without_places("read from /home/a b/texts/v.txt today") == "read from v.txt today"


@pytest.mark.usefixtures("no_pictures")
def test_what_a_page_says_of_a_run_names_no_place(make_study, tmp_path):
    run, host = make_study(), socket.gethostname()
    model = run.info.model | {"name": "/home/secret/models/mine"}
    error = f"OSError: {host} cannot reach /mnt/secret/x"
    hidden = elsewhere(
        run,
        model=model,
        settings={"corpus": "/home/secret/x.txt"},
        error=error,
        status="interrupted",
    )
    assert shareable(hidden).info.error == "OSError: host cannot reach x"
    site = write_gallery([hidden], tmp_path / "site")
    for page in site.parent.rglob("*.html"):
        assert "secret" not in page.read_text("utf-8") and "mine" in page.read_text("utf-8")


def test_no_run_and_other_runs_are_refused(make_study, tmp_path):
    refused("gallery needs at least one run", write_gallery, [], tmp_path / "site")
    refused(
        "is of kind 'curve'",
        write_gallery,
        [elsewhere(make_study(), kind="curve")],
        tmp_path / "site",
    )
    assert not (tmp_path / "site").exists()


def test_a_browser_shows_the_index_and_asks_for_nothing_else(page, make_study, tmp_path):
    index = write_gallery([make_study(), make_study("sink", added=1)], tmp_path / "site")
    page.call("Page.navigate", url=Path(index).as_uri())
    page.wait("document.querySelectorAll('svg.figure').length === 2")
    tops = "[...document.querySelectorAll('article')].map((one) => one.getBoundingClientRect().top)"
    for width, surface in ((390, "rgb(27, 29, 34)"), (1440, "rgb(255, 255, 255)")):
        page.size(width, 900, dark=width == 390)
        assert page.run("document.documentElement.scrollWidth") <= width
        assert len(set(page.run(tops))) == 1 + (width == 390)
        fill = page.run("getComputedStyle(document.querySelector('svg.figure path')).fill")
        assert fill == surface
