"""Studies run in a folder of their own, without bars of transformers."""

from pathlib import Path

import pytest

from tiny_diffusion import TEXT


@pytest.fixture(autouse=True)
def here(tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        patch.chdir(tmp_path)
        yield


@pytest.fixture
def heldout():
    Path("held.txt").write_text(TEXT * 20)
