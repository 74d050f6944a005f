"""Names on the Hub: found in the cache without a network, and refused in silence when there is
none.
"""

import sys

import huggingface_hub
import pytest

import published_toys as toys
from launched import launch
from sinklab.lab.checkpoints.published import resolve

# port 9 discards: nothing listens
NOBODY = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:9"}
COMMIT = "0123456789abcdef0123456789abcdef01234567"
SCRIPT = """
from sinklab.lab.checkpoints import describe, load

info, loaded = describe("someone/toy"), load("someone/toy", revision="main")
numbers = sum(p.numel() for p in loaded.model.parameters())
print(info.parameters == numbers, loaded.name, loaded.revision)
for name in ("someone/absent", "GSAI-ML/LLaDA-8B-Instrukt"):
    for call in (load, describe):
        try:
            call(name)
        except ValueError as error:
            print(str(error).split(": ")[0])
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "environment", [{"HF_HUB_OFFLINE": "1"}, NOBODY], ids=["offline", "nobody answers"]
)
def test_a_cached_repository_loads_without_a_network_and_another_is_told_apart(
    tmp_path, environment
):
    repository = tmp_path / "hub" / "models--someone--toy"
    toys.llada(repository / "snapshots" / COMMIT, shards=2)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    cache = {"HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HOME": str(tmp_path)}
    # the Hub's client reads them when it is imported
    done = launch(sys.executable, "-W", "error", "-c", SCRIPT, **cache | environment)
    names = "'tiny', 'tiny-sink', 'tiny-causal'"
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        f"True someone/toy {COMMIT}",
        *[
            f"no model can be loaded from 'someone/absent'; use {names}, a folder, a GGUF file, "
            "or a Hub name"
        ]
        * 2,
        *[
            "no model can be loaded from 'GSAI-ML/LLaDA-8B-Instrukt'; did you mean "
            "'GSAI-ML/LLaDA-8B-Instruct' or 'GSAI-ML/LLaDA-8B-Base' or 'GSAI-ML/iLLaDA-8B'?"
        ]
        * 2,
    ]


def test_only_the_files_of_the_repository_itself_are_fetched(tmp_path, monkeypatch):
    asked = {}

    def fetch(name, **patterns):
        asked.update(patterns)
        return str(tmp_path)

    monkeypatch.setattr(
        huggingface_hub, "try_to_load_from_cache", lambda *a, **k: str(tmp_path / "config.json")
    )
    monkeypatch.setattr(
        huggingface_hub, "hf_hub_download", lambda *a, **k: str(tmp_path / "config.json")
    )
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
