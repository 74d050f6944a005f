"""Write the frozen numbers: what the code of commit 6cebc001 says, as data that the code of the day
is held to.

    python tests/frozen/make.py                    every section
    python tests/frozen/make.py packaged           one section
    python tests/frozen/make.py packaged/compare   the cells of it whose names begin so
    python tests/frozen/make.py --check […]        print what differs, write nothing, and fail

A section's file beside this one says what it holds. Cells are made anew where a change of the code
changes a number on purpose: the commit says why, and its diff shows the lines of these cells alone.
Some cells need data that a clone does not have ($SINKLAB_SHARED, or ../shared); where it is absent,
they stay as they are. The tour takes a minute and more.
"""

import argparse
import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
# As tests are run: no network, one thread.
os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", OMP_NUM_THREADS="1")
sys.path[:0] = [str(HERE), str(HERE.parent)]

import torch  # noqa: E402

from frozen import SECTIONS, cells_of, changes, read, write  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cells", nargs="*", default=SECTIONS, help="sections, or beginnings")
    parser.add_argument("--check", action="store_true", help="write nothing")
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    differ = False
    for one in given.cells:
        name, _, beginning = one.partition("/")
        for group in SECTIONS[name]:
            start = f"{group}/" if group else ""
            if start.startswith(beginning) or beginning.startswith(start):
                longest = max(start, beginning, key=len)
                differ |= remake(name, group, longest, is_kept=given.check)
    raise SystemExit(given.check and differ)


def remake(name: str, group: str, beginning: str, *, is_kept: bool) -> bool:
    """Make the cells of a group whose names begin so anew, and print what differs; if none can be
    made here, they stay. Returns whether any differs. `is_kept`: nothing is written.
    """
    lines = []
    every = cells_of(name, group)
    new = {cell: value for cell, value in every.items() if cell.startswith(beginning)}
    if every:
        lines = list(changes(name, new, beginning))
        for line in lines:
            print(f"{name}/{line}", flush=True)
    print(f"{name}/{beginning}: {len(new)} cells", flush=True)
    if every and not is_kept:
        old = {cell: value for cell, value in read(name).items() if not cell.startswith(beginning)}
        write(name, old | new)
    return bool(lines)


if __name__ == "__main__":
    main()
