"""The folder that a run is to be written into: made, emptied, or taken up where an earlier writer stopped."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .info import read_info
from .storage import ARRAYS_SUFFIX, PART_SUFFIX, RUN_FILE, TABLE_SUFFIX, part_of


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


def names_in(path: Path) -> list[str]:
    """Names of what a folder holds, sorted; none for an absent one.

    The half of a ``run.json`` that a run killed in its first write left does not count: the next write replaces it.
    """
    if not path.is_dir():
        return []
    return sorted({entry.name for entry in path.iterdir()} - {part_of(path / RUN_FILE).name})


def emptied(path: Path, *, overwrite: bool, resume: bool) -> None:
    """Make the folder; with ``overwrite``, remove the run in it. ValueError for one that holds anything else.

    ``resume``: there is no ``run.json`` to go on from, so the folder must hold nothing.
    """
    if path.exists() and not path.is_dir():
        raise ValueError(f"A run is a folder: {path} is a file. Choose another path.")
    path.mkdir(parents=True, exist_ok=True)
    present = names_in(path)
    if not present:
        return
    if RUN_FILE not in present and (overwrite or resume):
        does = "overwrite=True replaces" if overwrite else "resume=True goes on with"
        raise ValueError(
            f"{does} a run and nothing else: {path} holds {', '.join(present[:4])} but no {RUN_FILE}. "
            "Choose another folder or empty this one yourself."
        )
    if not overwrite:
        raise ValueError(
            f"A run folder is written once: {path} already holds {', '.join(present[:4])}"
            f"{', …' if len(present) > 4 else ''}. Choose an empty folder, or pass resume=True to go on with the run, "
            "or overwrite=True to begin anew."
        )
    # The data goes first: should this be cut short, run.json still says what the folder was.
    for name in present:
        if name.endswith((TABLE_SUFFIX, ARRAYS_SUFFIX, PART_SUFFIX)):
            (path / name).unlink()
