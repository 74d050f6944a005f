"""The page to look at without installing anything, docs/example_page.html: eight texts by `tiny`.

python docs/example_page.py        watches `tiny` beside its controls and writes the page; a minute on two cores

What masking costs is the packaged curve, as in the tour (`python studies/findings.py` measures it).
"""

import shutil
import tempfile
from importlib import resources
from pathlib import Path

import sinklab
from sinklab.cli.command import SAMPLING
from sinklab.cli.tour import MORE_PROMPTS
from sinklab.records import Run
from sinklab.reports import report
from sinklab.studies.trace.study import PROMPTS

OUT = Path(__file__).with_name("example_page.html")
WRITING = {"new_tokens": 24, "block_length": 24, **SAMPLING}
"""As the tour writes: at a temperature, so that there is something to read."""


def watched(name: str) -> list[Run]:
    """A packaged model that was watched beside its controls, and its packaged curve."""
    run = sinklab.load(name).watch((*PROMPTS, *MORE_PROMPTS), twin=True, progress=print, **WRITING)
    curve = resources.files("sinklab.checkpoints").joinpath("packaged", "curves", name)
    return [run, sinklab.open_run(str(curve))]


def main() -> None:
    """Watch, and write the page."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copyfile(report(watched("tiny"), folder), OUT)
    print(f"{OUT}: {OUT.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
