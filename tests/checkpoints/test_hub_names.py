"""Names on the Hub: found in the cache without a network, and refused in silence when there is
none.
"""

import huggingface_hub
import pytest

import published_toys as toys
from refusals import refused
from sinklab.lab.checkpoints import describe, load
from sinklab.lab.checkpoints.published import resolve

# port 9 discards: nothing listens
NOBODY = "http://127.0.0.1:9"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize("offline", [True, False], ids=["offline", "nobody answers"])
def test_a_cached_repository_loads_without_a_network_and_another_is_told_apart(
    tmp_path, monkeypatch, capfd, offline
):
    repository = tmp_path / "models--someone--toy"
    toys.llada(repository / "snapshots" / COMMIT, shards=2)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    # as the Hub's client reads them from the environment when it is imported
    for name, value in {
        "HF_HUB_CACHE": str(tmp_path),
        "HF_HUB_OFFLINE": offline,
        "ENDPOINT": NOBODY,
        "HUGGINGFACE_CO_URL_TEMPLATE": NOBODY + "/{repo_id}/resolve/{revision}/{filename}",
    }.items():
        monkeypatch.setattr(huggingface_hub.constants, name, value)
    info, loaded = describe("someone/toy"), load("someone/toy", revision="main")
    assert info.parameters == loaded.model.num_parameters()
    assert (loaded.name, loaded.revision) == ("someone/toy", COMMIT)
    for call in (load, describe):
        refused(
            "'someone/absent'; use 'tiny', 'tiny-sink', 'tiny-causal', a folder",
            call,
            "someone/absent",
        )
        refused(
            "mean 'GSAI-ML/LLaDA-8B-Instruct' or 'GSAI-ML/LLaDA-8B-Base'",
            call,
            "GSAI-ML/LLaDA-8B-Instrukt",
        )
    assert capfd.readouterr().err == ""


def test_only_the_files_of_the_repository_itself_are_fetched(tmp_path, monkeypatch):
    asked = {}

    def fetch(name, **patterns):
        asked.update(patterns)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    assert resolve("someone/toy", "main", ("*.safetensors",)) == tmp_path
    ours = [
        "config.json",
        "model.safetensors",
        "model.safetensors.index.json",
        "merges.txt",
        "chat_template.jinja",
    ]
    # what other programs read: a second copy of the weights
    others = [
        "original/model.safetensors",
        "onnx/config.json",
        "original/tokenizer.model",
        "pytorch_model.bin",
        "x.py",
    ]
    patterns = {name: asked[name] for name in ("allow_patterns", "ignore_patterns")}
    assert list(huggingface_hub.utils.filter_repo_objects(ours + others, **patterns)) == ours
