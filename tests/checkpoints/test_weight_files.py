"""Weight files: shards, damage, memory, dtype and placement."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import published_toys as toys
from launched import launch
from refusals import refused
from sinklab.lab.checkpoints import load, materialize
from tiny_diffusion import save_tiny

IDS = torch.arange(3, 15)[None]


def logits(folder, **settings):
    with torch.inference_mode():
        return load(folder, **settings).model(IDS).logits


def test_shards_are_one_model():
    whole, _ = toys.llada("whole")
    shards, _ = toys.llada("shards", shards=3)
    assert not (shards / "model.safetensors").exists()
    assert torch.equal(logits(shards), logits(whole))


def test_an_index_that_lies_is_refused():
    folder, _ = toys.llada("m", shards=3)
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    name = next(iter(content["weight_map"]))
    for text, message in [
        ("{", "the index model.safetensors.index.json of .* is damaged"),
        ('{"weight_map": []}', "is damaged"),
        (
            json.dumps({"weight_map": {**content["weight_map"], name: "../else.safetensors"}}),
            "points out of its folder",
        ),
        (
            json.dumps({"weight_map": {**content["weight_map"], name: "lost.safetensors"}}),
            r"1 of 4 shards .*\(lost",
        ),
    ]:
        index.write_text(text)
        refused(message, load, folder)
    index.unlink()
    refused("model-00001-of-00003", load, folder)


def test_a_tensor_in_two_shards_is_refused(tmp_path):
    folder, tensors = toys.llada(tmp_path, shards=2)
    first, second = (folder / f"model-0000{n}-of-00002.safetensors" for n in (1, 2))
    name = next(iter(load_file(first)))
    save_file({**load_file(second), name: tensors[name]}, second)
    refused(f"{name} is in .*in model-00002", load, folder)


@pytest.mark.parametrize("keep", [0, 5, 0.5, -1])
def test_a_truncated_shard_is_refused(tmp_path, keep):
    folder, _ = toys.llada(tmp_path, shards=2)
    shard = folder / "model-00002-of-00002.safetensors"
    content = shard.read_bytes()
    shard.write_bytes(content[: int(len(content) * keep) if isinstance(keep, float) else keep])
    refused(r"weights of .* cannot be read", load, folder)


def test_a_single_file_may_have_any_name(tmp_path):
    folder, _ = toys.smdm(tmp_path)
    before = logits(folder)
    (folder / "model.safetensors").rename(folder / "mdm-472M.safetensors")
    assert torch.equal(logits(folder), before)


MEASURE = """
import sys
import torch
from torch.utils._python_dispatch import TorchDispatchMode
torch.set_num_threads(1)
from sinklab.lab.checkpoints import load

def anonymous():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("RssAnon")) * 1024

class Watched(TorchDispatchMode):
    # behind every operation: what is held then is seen, however short, which a clock could miss
    peak = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        made = operation(*args, **(kwargs or {}))
        self.peak = max(self.peak, anonymous())
        return made

load(sys.argv[2])  # everything is imported
start = anonymous()
with Watched() as watched:
    model = load(sys.argv[1], dtype=sys.argv[3]).model
size = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
print((watched.peak - start) / size, size)
"""


BIG = {"d_model": 512, "mlp_hidden_size": 1536, "n_layers": 8, "embedding_size": 20000}
EXPERTS = {
    "hidden_size": 256,
    "expert_intermediate_size": 192,
    "num_experts": 64,
    "vocab_size": 2000,
    "moe_layer_freq": [1] * 8,
    "num_hidden_layers": 8,
}


@pytest.mark.slow
@pytest.mark.ring("extras")
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
@pytest.mark.parametrize(
    "dtype, make, fields",
    [("float32", toys.llada, BIG), ("bfloat16", toys.llada_moe, EXPERTS)],
    ids=["dense", "experts"],
)
def test_the_host_holds_the_model_once(dtype, make, fields, python):
    big, _ = make("big", shards=3, **fields)
    small, _ = make("small")
    done = launch(python, "-c", MEASURE, big, small, dtype)
    assert done.returncode == 0, done.stderr
    ratio, size = map(float, done.stdout.split())
    assert size > 80e6
    # 1.00–1.02 here; a second copy of the largest tensor alone would make it 1.2
    assert 0.9 < ratio < 1.1


def test_dtypes(tmp_path):
    folder, tensors = toys.llada(tmp_path)
    for dtype, expected in [
        ("auto", torch.bfloat16),
        ("float16", torch.float16),
        (torch.float64, torch.float64),
        ("torch.bfloat16", torch.bfloat16),
    ]:
        model = load(folder, dtype=dtype).model
        assert {parameter.dtype for parameter in model.parameters()} == {expected}
        assert (model.dtype, model.config.dtype, model.config.backbone.dtype) == (expected,) * 3
        name = "model.transformer.blocks.0.q_proj.weight"
        assert torch.equal(
            model.model.layers[0].self_attn.q_proj.weight, tensors[name].to(expected)
        )
    for wrong in ("bf16", torch.int8, "int16"):
        refused(r"torch\.bfloat16 or 'auto'", load, folder, dtype=wrong)


@pytest.mark.parametrize(
    "flags, expected",
    [
        # AVX2, as on Zen 3; Cooper Lake and Zen 4; Sapphire Rapids; ARM
        ("fpu avx avx2 fma", torch.float32),
        ("avx2 avx512f avx512_vnni avx512_bf16", torch.bfloat16),
        ("avx512f amx_bf16 amx_tile", torch.bfloat16),
        ("fp asimd bf16 i8mm", torch.bfloat16),
        (None, torch.float32),
    ],
)
def test_a_processor_is_asked_what_type_it_multiplies(tmp_path, monkeypatch, flags, expected):
    if flags is not None:
        Path("cpuinfo").write_text(f"processor : 0\nflags : {flags}\n")
    monkeypatch.setattr(materialize, "CPU_FLAGS", tmp_path / "cpuinfo")
    assert (
        materialize.machine_type("cpu")
        == materialize.machine_type(torch.device("cpu", 0))
        == expected
    )
    assert materialize.machine_type("mps") == torch.float32


def test_a_model_has_the_type_that_suits_its_machine_and_says_so(tmp_path, monkeypatch):
    folder = save_tiny(tmp_path)
    for flags, expected in (("avx2", torch.float32), ("avx512_bf16", torch.bfloat16)):
        Path("cpuinfo").write_text(flags)
        monkeypatch.setattr(materialize, "CPU_FLAGS", tmp_path / "cpuinfo")
        loaded = load(folder, dtype="machine")
        assert {parameter.dtype for parameter in loaded.model.parameters()} == {expected}
        assert f"weights in {expected}, which suits this machine" in loaded.notes
    # what config.json says stays what it was
    assert load(folder, dtype="auto").model.dtype == torch.float32


SPLIT = {
    "model.embed_tokens": "cpu",
    "model.layers.0": "cpu",
    "model.layers.1": "cpu",
    "model.norm": "cpu",
    "model.rotary_emb": "cpu",
    "lm_head": "cpu",
}


@pytest.mark.parametrize("device_map", ["auto", SPLIT])
def test_device_maps(tmp_path, device_map):
    folder = save_tiny(tmp_path, 1, gate="elementwise")
    assert torch.equal(logits(folder, device_map=device_map), logits(folder))
    refused("cannot be read and placed: .*autp?", load, folder, device_map="autp")


def test_a_device_by_number_is_not_the_cpu(tmp_path):
    folder = save_tiny(tmp_path)
    assert load(folder, device="meta").model.device.type == "meta"
    if torch.cuda.is_available():
        assert load(folder, device=0).model.device.index == 0
    else:
        refused(r"use here \(cpu\), but is 0", load, folder, device=0)


NO_CUDA = pytest.param("cuda", marks=pytest.mark.skipif("torch.cuda.is_available()"))


@pytest.mark.parametrize("device", ["cudaa", "cuda:99", 3.5, "disk", NO_CUDA])
def test_a_device_that_is_not_there_is_refused_with_the_remedy(tmp_path, device):
    folder = save_tiny(tmp_path)
    refused(f"is {device!r}; pass device='cpu'", load, folder, device=device)


def test_device_and_device_map_exclude_each_other(tmp_path):
    refused("give device or device_map", load, save_tiny(tmp_path), device="cpu", device_map="auto")


def test_saving_over_the_files_it_came_from(tmp_path):
    """A model that lived in a mapping of its file would die with it."""
    folder = save_tiny(tmp_path)
    model = load(folder).model
    before = model(IDS).logits
    model.save_pretrained(folder)
    assert torch.equal(model(IDS).logits, before)
    assert torch.equal(logits(folder), before)
