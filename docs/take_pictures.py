"""The pictures of pages in docs/, as headless chromium shows them: explorer.png, its two siblings,
live.png; and gallery-figure-1.png, four figures of the packaged diffusion models.

python docs/take_pictures.py           all of them; docs/example_page.py comes first, since two show
                                       that page
python docs/take_pictures.py page      those two alone
python docs/take_pictures.py live      live.png alone: one sink blocked with one click
python docs/take_pictures.py figures   the four figures alone, without chromium
"""

import argparse
import os
import subprocess
import sys
import tempfile
from importlib import resources
from pathlib import Path

from example_page import OUT
from matplotlib.figure import Figure
from PIL import Image

import sinklab
from sinklab.lab.cli.command import SAMPLING
from sinklab.lab.cli.tour import BESIDE, MORE_PROMPTS
from sinklab.lab.records import Run
from sinklab.lab.reports import report
from sinklab.lab.reports.drawing import save
from sinklab.lab.reports.figures import mobility_by_layer, received_map, sink_paths, sink_share
from sinklab.lab.reports.style import themed
from sinklab.lab.studies.trace.study import PROMPTS

DOCS = Path(__file__).parent
TESTS = DOCS.parent / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "reports")]
from chromium import Page  # noqa: E402 (the browser of the tests)

PROMPT, NEW_TOKENS = "It was a dark and stormy night, and", 32
COLOURS = 256


def keep(browser: Page, name: str) -> None:
    """The window as a small file."""
    file = DOCS / f"{name}.png"
    browser.settle()
    browser.picture(file)
    shown = Image.open(file).convert("RGB")
    shown.quantize(COLOURS, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(
        file, optimize=True
    )


def watched(name: str) -> list[Run]:
    """A packaged model that was watched beside its controls, as the tour does, and what of it was
    measured beforehand.
    """
    how = {"new_tokens": 24, "block_length": 8, **SAMPLING}
    run = sinklab.load(name).watch((*PROMPTS, *MORE_PROMPTS), twin=True, progress=print, **how)
    packaged = Path(str(resources.files("sinklab.lab.checkpoints").joinpath("packaged")))
    folders = [packaged / kind / name for kind in BESIDE]
    return [run, *(sinklab.open_run(folder) for folder in folders if folder.is_dir())]


def take_page(browser: Page) -> None:
    """The example page, wide and on a phone."""
    browser.size(1280, 1620)
    browser.open(OUT.as_uri())
    keep(browser, "explorer")
    browser.size(390, 1100, phone=True, dark=True)
    browser.open(OUT.as_uri())
    keep(browser, "explorer-phone")


def take_pair(browser: Page, folder: Path) -> None:
    """The page of the packaged diffusion models, without and with an added sink."""
    pair = report([*watched("tiny"), *watched("tiny-sink")], folder / "pair")
    browser.size(1280, 1760)
    browser.open(pair.as_uri())
    keep(browser, "explorer-pair")


def take_figures(runs: list[Run]) -> None:
    """Four figures on the axes of one: of the model with an added sink, and of both."""
    with themed():
        canvas = Figure(figsize=(9.6, 6.6), layout="constrained")
        axes = canvas.subplots(2, 2)
        received_map(runs[1], axes[0, 0])
        sink_paths(runs, axes[0, 1])
        sink_share(runs, axes[1, 0])
        mobility_by_layer(runs, axes[1, 1])
        save(canvas, "png", DOCS / "gallery-figure-1.png")


def take_live(browser: Page) -> None:
    """The live page after one click: the main sink of one head gone from the middle of the text
    on.
    """
    command = [sys.executable, "-m", "sinklab", "serve", "--model", "tiny", "--port", "0"]
    served = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONUNBUFFERED": "1"}
    )
    try:
        assert served.stdout is not None
        browser.size(1200, 548)
        browser.call("Page.navigate", url=served.stdout.readline().split()[1])
        browser.wait("document.getElementById('write')?.disabled === false")
        browser.run("document.getElementById('prompt').select()")
        browser.call("Input.insertText", text=PROMPT)
        browser.run(f"document.getElementById('tokens').value = {NEW_TOKENS}")
        browser.press("Enter")
        browser.wait(f"document.getElementById('state').textContent === '{NEW_TOKENS} steps'")
        browser.wait("!document.getElementById('block').hidden")
        browser.run("document.getElementById('block-head').click()")
        browser.wait("!document.getElementById('cost').hidden")
        browser.run("window.scrollTo(0, 0)")
        keep(browser, "live")
    finally:
        served.terminate()
        served.wait()


def main() -> None:
    """Take them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    choices = ["all", "page", "live", "figures"]
    parser.add_argument("which", choices=choices, nargs="?", default="all")
    which = parser.parse_args().which
    if which in ("all", "figures"):
        take_figures([watched(name)[0] for name in ("tiny", "tiny-sink")])
    if which == "figures":
        return
    with tempfile.TemporaryDirectory() as folder, Page(Path(folder)) as browser:
        if which != "page":
            take_live(browser)
        if which != "live":
            take_page(browser)
        if which == "all":
            take_pair(browser, Path(folder))


if __name__ == "__main__":
    main()
