"""How often verdicts are wrong, how often they are found and how often intervals cover, in worlds
with a known answer.

    python benchmarks/calibration.py [--worlds 500] [--only masking static] [--write]

Prints the tables of docs/statistics.md, a line per verdict and number of samples; ``--write`` puts
them there, and with ``--only`` leaves the other lines as they are. The worlds and the trials are
those of tests/worlds, whose tests run a part of this.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tests" / "worlds"))

from trials import PAGES, VERDICTS, Row  # noqa: E402 - the path comes first

PAGE = ROOT / "docs" / "statistics.md"
END = "<!-- end -->"
HEAD = """\
| verdict | where nothing is due; where it is | false alarms | found | covered, nothing \
| covered, effect |
|---|---|---|---|---|---|
"""
SAMPLES = (8, 12, 30)


def line(row: Row, worlds: int) -> str:
    """A row of the table: percentages for 8, 12 and 30 samples."""
    wrong = [row.null(worlds, samples) for samples in SAMPLES]
    found = [row.effect(worlds, samples) for samples in SAMPLES]
    cells = [
        row.verdict,
        row.world,
        *(
            " / ".join(f"{rate:.1f}" for rate in rates)
            for rates in (
                [row.alarms(one) for one in wrong],
                [row.right(one) for one in found],
                [one.covered for one in wrong],
                [one.covered for one in found],
            )
        ),
    ]
    return "| " + " | ".join(cells).replace("nan / nan / nan", "–") + " |"


def written(page: str, mark: str, rows: tuple[Row, ...], lines: dict[str, str]) -> str:
    """The page with these lines in the table behind the mark; rows that have none stay as they are,
    or out.
    """
    before, _, rest = page.partition(mark)
    old, _, after = rest.partition(END)
    known = {line.split(" | ")[0].removeprefix("| "): line for line in old.splitlines()} | lines
    return (
        before
        + mark
        + HEAD
        + "".join(known[row.verdict] + "\n" for row in rows if row.verdict in known)
        + END
        + after
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--worlds", type=int, default=500)
    parser.add_argument(
        "--only",
        nargs="*",
        default=[""],
        help="verdicts that have one of these words in their name",
    )
    parser.add_argument(
        "--write", action="store_true", help="put the tables into docs/statistics.md"
    )
    given = parser.parse_args()
    began, page = time.perf_counter(), PAGE.read_text("utf-8")
    for mark, rows in (("<!-- calibration -->\n", VERDICTS), ("<!-- pages -->\n", PAGES)):
        lines = {}
        for row in rows:
            if any(word in row.verdict for word in given.only):
                lines[row.verdict] = line(row, given.worlds)
                print(lines[row.verdict], f"{time.perf_counter() - began:.0f} s", flush=True)
        page = written(page, mark, rows, lines)
    if given.write:
        PAGE.write_text(page, "utf-8")


if __name__ == "__main__":
    main()
