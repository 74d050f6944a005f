"""Commands are typed in a folder of their own, on a wide terminal, without bars of transformers."""

import pytest
from transformers.utils import logging

from tiny_diffusion import save_tiny


@pytest.fixture(autouse=True)
def here(monkeypatch, tmp_path):
    """In a fresh process `main` silences transformers by variables; here it was imported long
    ago.
    """
    bars, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "error")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)
    yield
    logging.set_verbosity(level)
    if bars:
        logging.enable_progress_bar()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(save_tiny(tmp_path_factory.mktemp("model"), 1))
