"""Golden data and texts that lie beside the repository, in the folder of ``SINKLAB_SHARED``."""

import os
from pathlib import Path

import pytest


def shared(path):
    """A file or folder of the shared data; skips the calling test where it is not at hand."""
    root = os.environ.get("SINKLAB_SHARED") or Path(__file__).resolve().parents[2] / "shared"
    found = Path(root) / path
    if not found.exists():
        pytest.skip(f"nothing at {found}; set SINKLAB_SHARED")
    return found
