"""The text that trainings of this folder read, written once a run."""

import pytest

from tiny_training import uneven_documents


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    return uneven_documents(tmp_path_factory.mktemp("corpus"))
