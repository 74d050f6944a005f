"""Fixtures and words for tests of the explorer in a real browser."""

from collections.abc import Iterator

import pytest
from chromium import PROGRAM, Page
from simulated import simulate, uneven

from pictures import page_with
from sinklab.lab.reports import report

MAP, HEADS = ".map canvas", ".heads .grid"
CELLS = "[...document.querySelectorAll('.grid i')].map((i) => getComputedStyle(i).backgroundColor)"


@pytest.fixture(scope="session")
def browser(tmp_path_factory) -> Iterator[Page]:
    if PROGRAM is None:
        pytest.skip("no chromium at hand: the page is not rendered")
    with Page(tmp_path_factory.mktemp("browser")) as page:
        yield page


@pytest.fixture
def page(browser) -> Iterator[Page]:
    """A tab at 1280 × 800 that must not have asked for anything, nor complained."""
    browser.requests.clear()
    browser.complaints.clear()
    browser.size(1280, 800)
    yield browser
    assert browser.complaints == []
    assert browser.requests and all(
        address.startswith(("file://", "data:", "about:")) for address in browser.requests
    )
    assert (
        len(
            {
                address.partition("#")[0]
                for address in browser.requests
                if address.startswith("file://")
            }
        )
        == 1
    )


@pytest.fixture(scope="session")
def one(tmp_path_factory) -> str:
    """A run of two samples with one added sink."""
    folder = tmp_path_factory.mktemp("one")
    sizes = {"steps": 16, "layers": 3, "heads": 4}
    run = simulate(folder / "run", added=1, share=0.2, change=uneven, **sizes)
    return report(run, folder / "out", tables=False).as_uri()


@pytest.fixture(scope="session")
def two(tmp_path_factory) -> str:
    """A denoiser next to an autoregressive decoder with other sizes."""
    folder = tmp_path_factory.mktemp("two")
    sizes = {
        "denoiser": {"steps": 16, "layers": 4, "heads": 4},
        "decoder": {"steps": 31, "heads": 6, "family": "autoregressive"},
    }
    runs = [
        simulate(folder / name, name, change=uneven, words=["It", " was"], **size)
        for name, size in sizes.items()
    ]
    return page_with(of=runs, out=folder / "out").as_uri()


def shown(page: Page) -> dict[str, str]:
    return {MAP: page.pixels(MAP), HEADS: page.run(CELLS)}


def step(page: Page) -> str:
    return page.run("document.querySelector('.step-name').textContent")


def choice(page: Page, name: str) -> str:
    return page.run(f"document.querySelector('.choose-{name}').selectedOptions[0].text")


def readout(page: Page) -> str:
    return page.run("document.querySelector('.readout').innerText")


def choose(page: Page, selector: str, value: object) -> None:
    page.run(
        f"(() => {{ const box = document.querySelector('{selector}'); box.value = '{value}';"
        "for (const kind of ['input', 'change']) box.dispatchEvent(new Event(kind, { bubbles: "
        "true })); })()"
    )
    page.settle()
