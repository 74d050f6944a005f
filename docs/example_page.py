"""The page to look at without installing anything, docs/example_page.html: eight texts by `tiny`.

python docs/example_page.py        watches `tiny` beside its controls and writes the page; a minute on two cores
"""

import shutil
import tempfile
from pathlib import Path

import sinklab
from sinklab.cli.command import SAMPLING
from sinklab.cli.reports import MORE_PROMPTS
from sinklab.studies.trace.study import PROMPTS

OUT = Path(__file__).with_name("example_page.html")
WRITING = {"new_tokens": 24, "block_length": 24, **SAMPLING}
"""As the tour writes: at a temperature, so that there is something to read."""


def main() -> None:
    """Watch, and write the page."""
    run = sinklab.load("tiny").watch((*PROMPTS, *MORE_PROMPTS), twin=True, progress=print, **WRITING)
    with tempfile.TemporaryDirectory() as folder:
        shutil.copyfile(run.explore(folder).path, OUT)
    print(f"{OUT}: {OUT.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
