"""A model that several processes hold together is, to whoever looks at it, edits it or writes with
it, the whole model.

The processes run ``divided_twin.py``, two of them here; four, and two models of two:
``benchmarks/tensor_parallel.py``.
"""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from torch import distributed, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh
from transformers import Glm4MoeConfig, LlamaConfig, Qwen3MoeConfig

from launched import torchrun
from refusals import refused
from sinklab.core import compat
from sinklab.core.models import DiffusionLM, DiffusionLMConfig
from sinklab.core.probing.call import NAMES, AttentionCall
from sinklab.extras.parallel import dividing
from sinklab.extras.parallel.heads import TensorParallelShare
from sinklab.lab.checkpoints import load, materialize
from sinklab.lab.checkpoints.controls import permuted
from sinklab.lab.checkpoints.weights import Safetensors
from tiny_diffusion import tiny_backbone, tiny_loaded, tiny_tokenizer
from tiny_models import llama

ROOT = Path(__file__).parents[1]
needs_division = pytest.mark.skipif(
    not dividing.divides_experts(), reason="transformers cannot divide experts"
)


def save_model(folder, backbone=None, heads=(8, 4), **settings):
    """A model whose sink and gate do something."""
    tokenizer = tiny_tokenizer()
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    shape = {"num_attention_heads": heads[0], "num_key_value_heads": heads[1], **ids}
    torch.manual_seed(1)
    config = DiffusionLMConfig(
        backbone or tiny_backbone(**shape), mask_token_id=tokenizer.mask_token_id, **settings
    )
    model = DiffusionLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.startswith(("sink", "gates")):
                parameter.normal_(std=0.5)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def save_models(folder, count):
    """Every kind of sink, a gate, experts and blocks; of two models each process of ``count`` holds
    a single head.
    """
    tokenizer, alone = tiny_tokenizer(), (count, count)
    fields = tiny_backbone().to_dict()
    shared = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "max_position_embeddings",
    )
    sizes = {name: fields[name] for name in (*shared, "initializer_range")}
    sizes |= {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 8,
        "moe_intermediate_size": 16,
    }
    sizes |= {
        "num_experts_per_tok": 2,
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    experts = Qwen3MoeConfig(num_experts=8, **sizes)
    beside_a_dense_layer = Glm4MoeConfig(n_routed_experts=8, first_k_dense_replace=1, **sizes)
    save_model(folder / "token", sink_kind="token", sink_count=2, gate="elementwise", gate_bias=0.5)
    save_model(folder / "zero", sink_kind="zero", sink_count=1, sink_side="end")
    save_model(folder / "kv", heads=alone, sink_kind="kv", sink_count=2)
    save_model(folder / "logit", heads=alone, sink_kind="logit", sink_count=1)
    save_model(folder / "experts", experts, sink_kind="token", sink_count=1)
    save_model(folder / "blocks", beside_a_dense_layer, block_length=8)
    # a causal model that transformers divides itself
    llama(causal=True, kv_heads=count).double().save_pretrained(folder / "causal")


def noted(python, folder, processes=2, count=2):
    """What each of some processes notes, by model, of which so many hold one together."""
    save_models(folder, count)
    done = torchrun(python, ROOT / "tests" / "divided_twin.py", folder, count, processes=processes)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(processes)]


@needs_division
@pytest.mark.slow
def test_two_processes_see_write_and_read_one_model(tmp_path, python):
    ranks = noted(python, tmp_path)
    causal = [rank.pop("causal") for rank in ranks]
    assert max(apart for found in causal for apart in found.values()) <= 1e-9
    for name, found in [(name, found) for rank in ranks for name, found in rank.items()]:
        wrong = {what: apart for what, apart in found["float64"].items() if not apart <= 1e-9}
        assert not wrong, f"{name}: {wrong}"
        assert not [how for how, same in found["texts"].items() if not same], name
        # sums over processes are rounded anew
        assert found["float32"] <= 1e-3, name
        assert found["read"] == found["held"] < 0.9 * found["whole"], name
    first, second = ranks
    assert all(first[name]["unseeded"] == second[name]["unseeded"] for name in first)


def test_a_part_of_a_tensor_is_read_alone(tmp_path):
    folder = save_model(tmp_path / "model")
    weights = Safetensors([folder / "model.safetensors"])
    name = "model.layers.0.self_attn.o_proj.weight"
    ((rows, piece),) = weights.pieces(name, (slice(4, 20), slice(8, 16)))
    assert rows == slice(0, 16)
    assert torch.equal(piece, weights.whole(name)[4:20, 8:16])


REFUSALS = {
    "one process": (
        {"world": "1"},
        r"takes 2 processes for each model, but 1 run here: start torchrun",
    ),
    "a rest": ({"world": "3"}, r"takes 2 processes for each model, but 3 run here"),
    "none": ({"count": 0}, r"tensor_parallel"),
    "a map of devices": (
        {"device_map": "auto"},
        r"give device_map, or device and tensor_parallel, not both",
    ),
    "query heads": (
        {"count": 3, "world": "3"},
        r"has 8 query heads for tensor_parallel=3; pass a divisor of 8",
    ),
    "key heads": (
        {"count": 8, "world": "8"},
        r"has 4 key/value heads for tensor_parallel=8; pass a divisor of 4",
    ),
    "a new sink": (
        {"sink_kind": "kv", "sink_count": 1},
        r"has no sink_keys, which would start anew",
    ),
}


@needs_division
@pytest.mark.parametrize("case", REFUSALS)
def test_what_cannot_be_divided_is_refused_before_processes_meet(case, tmp_path, monkeypatch):
    given, message = REFUSALS[case]
    given = {"world": "2", "count": 2} | given
    monkeypatch.setenv("WORLD_SIZE", given.pop("world"))
    refused(
        message, load, save_model(tmp_path / "model"), tensor_parallel=given.pop("count"), **given
    )
    assert not distributed.is_initialized()


@needs_division
def test_sizes_that_do_not_divide_are_named(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    odd = tiny_backbone(intermediate_size=49)
    refused(r"gate_proj.*divisor of 49", load, save_model(tmp_path / "odd", odd), tensor_parallel=2)
    fields = {
        name: getattr(odd, name) for name in ("vocab_size", "hidden_size", "num_hidden_layers")
    }
    fields |= {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "moe_intermediate_size": 16,
    }
    three = Qwen3MoeConfig(num_experts=3, num_experts_per_tok=2, intermediate_size=48, **fields)
    refused(
        r"gate_up_proj .*divisor of 3",
        load,
        save_model(tmp_path / "three", three),
        tensor_parallel=2,
    )


@needs_division
def test_a_style_without_a_rule_and_a_model_without_a_plan_are_named(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    folder, known = save_model(tmp_path / "model"), LlamaConfig.base_model_tp_plan
    monkeypatch.setattr(LlamaConfig, "base_model_tp_plan", known | {"norm": "sequence_parallel"})
    refused("'sequence_parallel', and rules", load, folder, tensor_parallel=2)
    monkeypatch.setattr(LlamaConfig, "base_model_tp_plan", {})
    refused(r"\(llama\) .*its attention", load, folder, tensor_parallel=2)


def test_a_transformers_without_division_of_experts_is_named(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")

    @dataclasses.dataclass
    class Older:
        tp_size: int | None = None

    monkeypatch.setattr("sinklab.extras.parallel.dividing.DistributedConfig", Older)
    refused(r"ep_size, 5\.19 or newer", load, "tiny", tensor_parallel=2)


def test_a_divided_model_has_no_twin_and_is_not_quantised():
    loaded = tiny_loaded()
    loaded.model._tp_size = 2
    refused("so it has no control", permuted, loaded)
    refused("torchao does not store in int8", materialize.store, loaded.model, "int8", "tiny")


@pytest.fixture
def one_process():
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


def test_projections_that_are_divided_otherwise_are_refused(one_process):
    def attention(**placements):
        module = nn.Module()
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            layer = nn.Linear(8, 8, bias=False)
            if name in placements:
                local = DTensor.from_local(layer.weight.detach(), one_process, [placements[name]])
                layer.weight = nn.Parameter(local)
            setattr(module, name, layer)
        return module

    rows = {name: Shard(0) for name in ("q_proj", "k_proj", "v_proj")}
    assert TensorParallelShare.serving(attention()) is None
    assert TensorParallelShare.serving(attention(**rows, o_proj=Shard(1))).count == 1
    # gathered for the call, as a shard of training is
    assert TensorParallelShare.serving(attention(**rows), 8) is None
    for wrong in (
        {**rows, "k_proj": Replicate()},
        {"o_proj": Shard(1)},
        {name: Shard(1) for name in rows},
    ):
        refused("q_proj, k_proj, v_proj divided", TensorParallelShare.serving, attention(**wrong))
    refused(r"divided by rows \(colwise\)", TensorParallelShare.serving, attention(**rows), 24)


def test_a_gathered_axis_keeps_type_order_and_gradient(one_process):
    share = TensorParallelShare(one_process.get_group())
    x = torch.randn(2, 3, 4, requires_grad=True)
    share.whole(x).sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))
    flags = torch.tensor([[True, False]])
    assert torch.equal(share.own(share.whole(flags)), flags)
    assert share.whole_mask(None, 3) is None
    assert share.whole_mask(torch.ones(1, 1, 2, 2), 3).shape == (1, 1, 2, 2)
    q, masks = (
        torch.randn(1, 2, 3, 4),
        (None, torch.ones(1, 1, 3, 3) > 0, torch.ones(1, 2, 3, 3) > 0),
    )
    for mask in masks:
        call = AttentionCall.of(
            "attention", torch.nn.Module(), dict(zip(NAMES, (q, q, q, mask), strict=False)), {}
        )
        factors = dataclasses.replace(call, share=share).factors()
        assert all(torch.equal(factor, q) for factor in factors[:3])
        assert factors[3] is mask or torch.equal(factors[3], mask)


@needs_division
def test_a_model_is_divided_over_the_processes_that_run():
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        with torch.device("meta"):
            model = llama(causal=True)
        assert not compat.is_divided(model)
        group = dividing.divide(model, {"model.layers.*.self_attn.q_proj": "colwise"}, 1, "cpu")
        assert distributed.get_world_size(group) == model._tp_size == 1
        assert not hasattr(model.config, "distributed_config")
    finally:
        distributed.destroy_process_group()
