"""The folder that a run is to be written into: made, emptied, or taken up where an earlier writer stopped."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .info import read_info
from .storage import ARRAYS_SUFFIX, PART_SUFFIX, RUN_FILE, TABLE_SUFFIX


def begun_before(path: Path, given: Mapping[str, Any]) -> dict[str, Any]:
    """What an unfinished run in ``path`` has already; ValueError naming the first thing in which it is another run."""
    before = read_info(path / RUN_FILE)
    for field in ("kind", "seed", "model", "settings"):
        old, new = getattr(before, field), given[field]
        if old == new:
            continue
        if isinstance(old, dict):
            key = next(key for key in sorted({*old, *new}) if key not in old or key not in new or old[key] != new[key])
            field, old, new = f"{field}[{key!r}]", old.get(key, "absent"), new.get(key, "absent")
        if isinstance(old, list) and isinstance(new, list):
            # of many prompts the first that is another one
            place = next((place for place, pair in enumerate(zip(old, new, strict=False)) if pair[0] != pair[1]), None)
            if place is None:
                field, old, new = f"len({field})", len(old), len(new)
            else:
                field, old, new = f"{field}[{place}]", old[place], new[place]
        raise ValueError(
            f"{path} can be continued only as it was begun: its {field} is {old!r}, and now it is {new!r}. "
            "Give the same settings, or write into another folder."
        )
    remove_leftovers(path)
    return {name: getattr(before, name) for name in ("created", "tables", "arrays", "parts")}


def remove_leftovers(path: Path) -> None:
    """Remove half-written files that an interrupted writer left beside their places."""
    for leftover in path.glob(f".*{PART_SUFFIX}"):
        leftover.unlink()


def emptied(path: Path, *, overwrite: bool) -> None:
    """Make the folder; with ``overwrite``, remove the run in it. ValueError for one that holds anything else."""
    if path.exists() and not path.is_dir():
        raise ValueError(f"A run is a folder: {path} is a file. Choose another path.")
    path.mkdir(parents=True, exist_ok=True)
    present = sorted(entry.name for entry in path.iterdir())
    if not present:
        return
    if not overwrite:
        raise ValueError(
            f"A run folder is written once: {path} already holds {', '.join(present[:4])}"
            f"{', …' if len(present) > 4 else ''}. Choose an empty folder, or pass resume=True to go on with the run, "
            "or overwrite=True to begin anew."
        )
    if RUN_FILE not in present:
        raise ValueError(
            f"overwrite=True replaces a run and nothing else: {path} holds {', '.join(present[:4])} but no {RUN_FILE}. "
            "Choose another folder or empty this one yourself."
        )
    # The data goes first: should this be cut short, run.json still says what the folder was.
    for name in present:
        if name.endswith((TABLE_SUFFIX, ARRAYS_SUFFIX, PART_SUFFIX)):
            (path / name).unlink()
