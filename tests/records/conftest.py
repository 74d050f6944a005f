"""Runs are written in a folder of their own."""

import pytest


@pytest.fixture(autouse=True)
def here(tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        yield
