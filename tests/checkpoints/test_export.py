"""Exported folders: loaded by plain transformers in processes that cannot import sinklab, and by
sinklab unexecuted.
"""

import ast
import functools
import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.testing import assert_close
from transformers import AutoTokenizer, PreTrainedTokenizerFast, PythonBackend, Qwen2Config

import published_toys as toys
import sinklab
from launched import launch
from refusals import refused
from sinklab.core.models import DiffusionLM, DiffusionLMConfig
from sinklab.core.registry import sinks
from sinklab.extras.sharing import export, exporting
from sinklab.lab.checkpoints import Loaded, load
from sinklab.lab.files import load_plugin
from tiny_diffusion import save_tiny, tiny_loaded, tiny_tokenizer
from tiny_models import SIZES

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
KINDS = {
    "token": {"sink_kind": "token", "sink_count": 2},
    "token_end_gate": {
        "sink_kind": "token",
        "sink_count": 1,
        "sink_side": "end",
        "gate": "elementwise",
        "gate_bias": 0.5,
    },
    "zero": {"sink_kind": "zero", "sink_count": 1},
    "kv": {"sink_kind": "kv", "sink_count": 4},
    "logit": {"sink_kind": "logit", "sink_count": 1},
    "blocks": {"block_length": 4, "logit_shift": True, "sink_kind": "token", "sink_count": 1},
    "keys": {"sink_kind": "keys", "sink_count": 2},
}
CACHES = ("none", "prefix", "dual")
# what a process does that has transformers and no sinklab; the finder stands in for an environment
# without it
PLAIN = """
import json, sys


def chosen(name, caches):
    # every kind decodes with what recomputes columns
    return {"blocks": ["none", "committed"], "token": caches}.get(name, caches[-2:])


class Without:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "sinklab":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, Without())
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForMaskedLM, AutoTokenizer

torch.set_num_threads(1)
folders, ids, real, caches = json.loads(sys.argv[1])
ids, real, found = torch.tensor(ids), torch.tensor(real), {}
for name, folder in folders.items():
    AutoConfig.from_pretrained(folder, trust_remote_code=True)
    model = AutoModelForMaskedLM.from_pretrained(folder, trust_remote_code=True).eval()
    assert type(model).__module__.startswith("transformers_modules."), type(model)
    with torch.no_grad():
        found[f"{name} logits"] = model(ids, real).logits.clone()
    for cache in chosen(name, caches):
        options = {"max_new_tokens": 8, "block_length": 4, "cache": cache}
        found[f"{name} {cache}"] = model.generate(ids, real, **options)
    if name == "token":
        model.save_pretrained(folder + "-again")
        tokenizer = AutoTokenizer.from_pretrained(folder)
        found["text"] = torch.tensor(tokenizer("The old man")["input_ids"])
for name, place in (("again", folders["token"] + "-again"), ("hub", "me/token")):
    model = AutoModelForMaskedLM.from_pretrained(place, trust_remote_code=True).eval()
    with torch.no_grad():
        found[name] = model(ids, real).logits.clone()
assert not [name for name in sys.modules if name.partition(".")[0] == "sinklab"]
save_file(found, sys.argv[2])
"""


@pytest.fixture(autouse=True, scope="module")
def read_once():
    """Each module of the package is read and changed once, and not for every folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exporting, "_as_sibling", functools.cache(exporting._as_sibling))
        yield


@pytest.fixture
def keys(scratch):
    """The sink kind of the example."""
    scratch(sinks, example="add_a_sink")


def moved(loaded):
    """In float64, where the order of sums is no difference, and with sinks that do something."""
    with torch.no_grad():
        for name, parameter in loaded.model.double().named_parameters():
            if name.startswith(("sink", "gates")):
                parameter.normal_(generator=torch.Generator().manual_seed(1))
    return loaded


@pytest.mark.slow
def test_plain_transformers_computes_and_writes_the_same(keys, tmp_path):
    models = {name: moved(tiny_loaded(**settings)) for name, settings in KINDS.items()}
    for name in ("llada", "dream", "smdm"):
        folder, _ = getattr(toys, name)(tmp_path / f"published-{name}")
        models[name] = load(folder, dtype=torch.float64)
    folders = {name: str(export(loaded, tmp_path / name)) for name, loaded in models.items()}
    ids = torch.randint(5, 50, (2, 9), generator=torch.Generator().manual_seed(0))
    real = torch.ones_like(ids)
    real[1, :4] = 0
    given = json.dumps([folders, ids.tolist(), real.tolist(), CACHES])
    # as the Hub's own client keeps a repository
    home, commit = tmp_path / "huggingface", "0" * 40
    kept = home / "hub" / "models--me--token"
    shutil.copytree(folders["token"], kept / "snapshots" / commit)
    (kept / "refs").mkdir()
    (kept / "refs" / "main").write_text(commit)
    # modules of folders of one name and content are kept in HF_HOME, which is read at the import
    done = launch(sys.executable, "-c", PLAIN, given, tmp_path / "found", HF_HOME=str(home))
    assert done.returncode == 0, done.stderr
    found = load_file(tmp_path / "found")
    for name, loaded in models.items():
        with torch.no_grad():
            wanted = loaded.model(ids, real).logits
        assert wanted[..., :50].std() > 0.01
        assert_close(found.pop(f"{name} logits"), wanted, rtol=0, atol=1e-6)
        caches = {"blocks": ("none", "committed"), "token": CACHES}.get(name, CACHES[-2:])
        for cache in caches:
            written = loaded.model.generate(
                ids, real, max_new_tokens=8, block_length=4, cache=cache
            )
            assert torch.equal(found.pop(f"{name} {cache}"), written), (name, cache)
    with torch.no_grad():
        wanted = models["token"].model(ids, real).logits
    for name in ("again", "hub"):
        assert_close(found.pop(name), wanted, rtol=0, atol=1e-6)
    assert found.pop("text").tolist() == tiny_tokenizer()("The old man")["input_ids"] and not found


def test_sinklab_reads_the_folder_and_runs_none_of_it(tmp_path):
    loaded = tiny_loaded(1, gate="elementwise")
    folder = export(loaded, tmp_path / "exported")
    code = sorted(folder.glob("*.py"))
    assert len(code) > 20
    for file in code:
        file.write_text("raise SystemExit('executed')")
    again = load(folder)
    assert again.family == "diffusion" and again.published_family == "sinklab"
    for name, tensor in loaded.model.state_dict().items():
        assert torch.equal(again.model.state_dict()[name], tensor), name
    assert not [name for name in sys.modules if name.startswith("transformers_modules")]


def test_the_files_import_each_other_and_nothing_of_sinklab(tmp_path):
    folder = export(tiny_loaded(1), tmp_path / "exported")
    files, used = {file.stem: file.read_text("utf-8") for file in folder.glob("*.py")}, set()
    for text in files.values():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                assert not [alias for alias in node.names if alias.name.startswith("sinklab")]
            elif isinstance(node, ast.ImportFrom) and node.level:
                used |= {node.module} if node.module else {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert not str(node.module).startswith("sinklab")
    # transformers copies what it finds by this expression, and says so once for each file that has
    # any
    form = re.compile(r"^\s*from\s+\.(\S+)\s+import", re.M)
    named = {name: form.findall(text) for name, text in files.items() if form.search(text)}
    assert named.keys() == {"modeling_sinklab"}
    assert used <= {*named["modeling_sinklab"]} == files.keys() - {"modeling_sinklab"}
    assert all("SPDX-License-Identifier: MIT" in text for text in files.values())


def test_the_sources_are_those_of_the_package(tmp_path):
    """But for imports, line by line: a change of the core needs no change here."""
    source = Path(sinklab.__file__).parent / "core" / "sampling" / "rules.py"
    kept = [
        line
        for line in source.read_text("utf-8").splitlines()
        if not line.startswith("from sinklab.")
    ]
    text = exporting.sources()["sinklab.core.sampling.rules"]
    assert [line for line in text.splitlines()[2:] if not line.startswith("from.")] == kept
    assert "from.core_sampling_canvas import true_indices" in text


def test_the_folder_says_what_it_is_and_where_nothing_was(tmp_path):
    loaded = load(save_tiny(tmp_path / "secret" / "mine", 1))
    folder = export(loaded, tmp_path / "exported")
    card = (folder / "README.md").read_text("utf-8")
    assert (
        "trust_remote_code=True" in card
        and "# mine, exported from sinklab" in card
        and "| mask | " in card
    )
    assert "1 sink of kind `token` (front)" in card
    config = json.loads((folder / "config.json").read_text("utf-8"))
    assert config["auto_map"] == {
        "AutoConfig": "modeling_sinklab.DiffusionLMConfig",
        "AutoModel": "modeling_sinklab.DiffusionLM",
        "AutoModelForMaskedLM": "modeling_sinklab.DiffusionLM",
    }
    ids = json.loads((folder / "generation_config.json").read_text("utf-8"))
    assert ids["eos_token_id"] == config["eos_token_id"] is not None
    for file in folder.iterdir():
        assert (
            b"secret" not in file.read_bytes() and str(tmp_path).encode() not in file.read_bytes()
        ), file.name


FOREIGN = {"AutoTokenizer": ["me/evil--evil.Tokenizer", None]}


def test_names_of_code_and_unknown_settings_are_left_behind(tmp_path):
    """A tokenizer with code of its own, as Dream's is, reads the same as a plain tokenizer.json."""
    folder, _ = toys.dream(tmp_path / "dream")
    toys.save_dream_tokenizer(folder)
    for name, more in (
        (
            "tokenizer_config.json",
            {"auto_map": FOREIGN, "evil": {"run": 1}, "processor_class": "Evil"},
        ),
        (
            "config.json",
            {"custom_generate": "me/evil", "auto_map": {"AutoModel": "me/evil--evil.Model"}},
        ),
    ):
        told = json.loads((Path(folder) / name).read_text("utf-8"))
        (Path(folder) / name).write_text(json.dumps(told | more))
    loaded = load(folder)
    loaded.model.config.backbone.custom_generate = "me/evil"
    exported = export(loaded, tmp_path / "exported")
    settings = json.loads((exported / "tokenizer_config.json").read_text("utf-8"))
    assert settings["tokenizer_class"] == "Qwen2Tokenizer" and settings["mask_token"] == "<|mask|>"
    assert {*settings} <= exporting.KEPT and (exported / "tokenizer.json").is_file()
    for file in exported.glob("*.json"):
        assert "evil" not in file.read_text("utf-8").lower(), file.name
    lines = (exported / "README.md").read_text("utf-8").splitlines()
    (asks,) = [line for line in lines if "from_pretrained(" in line and "trust_remote_code" in line]
    assert "AutoModelForMaskedLM" in asks
    again, text = AutoTokenizer.from_pretrained(exported), "hello <|im_start|>he<|mask|>"
    assert again(text)["input_ids"] == loaded.needed_tokenizer()(text)["input_ids"]
    # what a training writes is read as data too, and hands nothing on
    loaded.needed_tokenizer().save_pretrained(tmp_path / "trained")
    assert "auto_map" not in (tmp_path / "trained" / "tokenizer_config.json").read_text("utf-8")


def test_a_tokenizer_of_a_class_that_only_code_has(tmp_path):
    loaded, plain = tiny_loaded(), tiny_tokenizer()

    class Own(PreTrainedTokenizerFast):
        pass

    class Slow(PythonBackend):
        vocab_size = 2

        def get_vocab(self):
            return {"a": 0, "b": 1}

        def save_vocabulary(self, *_, **__):
            return ()

    own = Own(tokenizer_object=plain.backend_tokenizer)
    folder = export(Loaded(loaded.model, own, "toy", loaded.special, "diffusion"), tmp_path / "own")
    assert (
        AutoTokenizer.from_pretrained(folder)("The old man")["input_ids"]
        == plain("The old man")["input_ids"]
    )
    refused(
        r"is a Slow of .*test_export",
        export,
        Loaded(loaded.model, Slow(), "toy", loaded.special, "diffusion"),
        tmp_path / "slow",
    )
    assert not (tmp_path / "slow").exists()


def test_only_what_an_export_left_is_removed(tmp_path):
    beside = tmp_path / ".mine.partial"
    beside.mkdir()
    (beside / "thesis.txt").write_text("mine")
    refused(r"\.mine\.partial", export, tiny_loaded(), tmp_path / "mine")
    assert (beside / "thesis.txt").read_text() == "mine"
    (beside / exporting.MARKER).touch()
    folder = export(tiny_loaded(), tmp_path / "mine")
    assert (
        sorted(path.name for path in tmp_path.iterdir()) == ["mine"]
        and not (folder / exporting.MARKER).exists()
    )


def test_without_a_tokenizer_the_card_writes_ids(tmp_path):
    loaded = tiny_loaded()
    folder = export(
        Loaded(loaded.model, None, "someone/toy", None, "diffusion"), tmp_path / "exported"
    )
    card = (folder / "README.md").read_text("utf-8")
    assert (
        "AutoTokenizer" not in card
        and "base_model: someone/toy" in card
        and "model.generate([[5" in card
    )
    assert not (folder / "tokenizer.json").exists()


def test_what_cannot_be_exported_is_refused_and_leaves_nothing(tmp_path, monkeypatch):
    causal = load("tiny-causal")
    refused("LlamaForCausalLM: transformers", export, causal, tmp_path / "causal")
    dit, _ = toys.mdlm(tmp_path / "mdlm")
    refused("must be one of llama", export, load(dit), tmp_path / "dit")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "notes.txt").write_text("mine")
    refused("is taken; choose another one", export, tiny_loaded(), tmp_path / "taken")
    assert (tmp_path / "taken" / "notes.txt").read_text() == "mine"
    monkeypatch.setattr(exporting, "_card", lambda *_: 1 / 0)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ZeroDivisionError):
        export(tiny_loaded(), tmp_path / "half")
    assert sorted(tmp_path.iterdir()) == before


def test_a_plug_in_that_uses_the_whole_package_is_refused(tmp_path, scratch):
    scratch(sinks)
    text = (
        (EXAMPLES / "add_a_sink.py")
        .read_text("utf-8")
        .replace("per_layer(model", "sinklab.x.per_layer(model")
    )
    (tmp_path / "whole.py").write_text(text.replace('"keys"', '"whole"'))
    load_plugin(tmp_path / "whole.py")
    loaded = tiny_loaded(sink_kind="whole", sink_count=1)
    refused("sinklab_plugin_whole uses", export, loaded, tmp_path / "exported")


def test_other_decoders_are_exported_too(tmp_path):
    backbone = Qwen2Config(vocab_size=60, **SIZES)
    model = DiffusionLM(DiffusionLMConfig(backbone, mask_token_id=59)).eval()
    folder = export(Loaded(model, None, "toy", None, "diffusion"), tmp_path / "exported")
    assert torch.equal(load(folder).model.lm_head.weight, model.lm_head.weight)
