"""How often verdicts are wrong, how often they are found and how often intervals cover, in worlds with a known answer.

    python benchmarks/calibration.py [--worlds 500] [--write]

Prints the table of docs/statistics.md, a line per verdict and number of samples; ``--write`` puts it there. The worlds
and the trials are those of tests/worlds, whose tests run a part of this.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tests" / "worlds"))

from trials import VERDICTS, Row  # noqa: E402 - the path comes first

PAGE = ROOT / "docs" / "statistics.md"
MARKS = ("<!-- calibration -->\n", "<!-- end -->")
SAMPLES = (6, 12, 30)


def line(row: Row, worlds: int) -> str:
    """A row of the table: percentages for 6, 12 and 30 samples."""
    wrong = [row.null(worlds, samples) for samples in SAMPLES]
    found = [row.effect(worlds, samples) for samples in SAMPLES]
    cells = [row.verdict, row.world, *(" / ".join(f"{rate:.1f}" for rate in rates) for rates in (
        [row.alarms(one) for one in wrong],
        [row.right(one) for one in found],
        [one.covered for one in wrong],
        [one.covered for one in found],
    ))]  # fmt: skip
    return "| " + " | ".join(cells).replace("nan / nan / nan", "–") + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, default=500)
    parser.add_argument("--write", action="store_true", help="put the table into docs/statistics.md")
    given = parser.parse_args()
    lines = [
        "| verdict | where nothing is due; where it is | false alarms | found | covered, nothing | covered, effect |",
        "|---|---|---|---|---|---|",
    ]
    began = time.perf_counter()
    for row in VERDICTS:
        lines.append(line(row, given.worlds))
        print(lines[-1], f"{time.perf_counter() - began:.0f} s", flush=True)
    if given.write:
        before, _, rest = PAGE.read_text("utf-8").partition(MARKS[0])
        PAGE.write_text(before + MARKS[0] + "\n".join(lines) + "\n" + MARKS[1] + rest.partition(MARKS[1])[2], "utf-8")


if __name__ == "__main__":
    main()
