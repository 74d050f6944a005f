"""Published checkpoints by name: what is known of them before anything is fetched.

The weights' own config always has the last word; a row fills in what it leaves out, and only where the sizes of the
vocabulary agree.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from sinklab.checkpoints.families import Published, known_families

PUBLISHED: dict[str, Published] = {}
"""Name on the Hub -> what is known of the checkpoint: what the families say, those of plug-ins when they are loaded."""


def known() -> dict[str, Published]:
    """:data:`PUBLISHED` with the rows of every family that is registered by now."""
    for family in known_families().values():
        for name, row in family.published.items():
            PUBLISHED.setdefault(name, row)
    return PUBLISHED


known()


def find(*names: str | None, vocabulary: int | None = None) -> Published | None:
    """The row for the first of these names that has one, if its vocabulary is of this size.

    Args:
        names: Hub names, e.g. the name given and the ``_name_or_path`` of its config.
        vocabulary: rows of the embedding; None does not compare.
    """
    rows = known()
    row = next((rows[name] for name in names if name in rows), None)
    if row is not None and vocabulary is not None and row.vocabulary not in (None, vocabulary):
        return None
    return row


def of_checkpoint(
    name: str, said: object, folder: Path | None, family: str, vocabulary: int
) -> tuple[Published | None, tuple[str, ...]]:
    """The row for a checkpoint, and notes on how it was found.

    Args:
        name: the name it was loaded by.
        said: the ``_name_or_path`` of its config.
        folder: its path, if it was loaded from a folder or file; None for a Hub name. One that is called like a
            checkpoint (``…/LLaDA-8B-Instruct``, ``…/models--GSAI-ML--LLaDA-8B-Instruct/snapshots/<commit>``) is taken
            for it if family and vocabulary are its too, and a note says so.
        family: of the checkpoint.
        vocabulary: rows of the embedding.
    """
    row = find(name, said if isinstance(said, str) else None, vocabulary=vocabulary)
    if row is not None or folder is None:
        return row, ()
    # not resolved: the name that a link has is the one that was chosen
    parts = Path(os.path.abspath(folder)).parts
    cached = re.fullmatch(r"models--([^/]+?)--(.+)", parts[-3]) if parts[-2:-1] == ("snapshots",) else None
    if cached:
        meant = [one for one in PUBLISHED if one == "/".join(cached.groups())]
    else:
        meant = [one for one in PUBLISHED if one.partition("/")[2] == parts[-1]]
    if len(meant) != 1 or (PUBLISHED[meant[0]].family, PUBLISHED[meant[0]].vocabulary) != (family, vocabulary):
        return None, ()
    return PUBLISHED[meant[0]], (f"taken for {meant[0]}: matched by folder name, family and vocabulary",)
