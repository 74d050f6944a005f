"""Trainings run in a folder of their own, on a text that is written once a run."""

import pytest

from tiny_training import uneven_documents


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    return uneven_documents(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(autouse=True)
def here(tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        yield
