"""A model can be copied, pickled, saved, resized; its config says no to what it does not know."""

import copy
import pickle

import pytest
import torch

from refusals import refused
from sinklab.core.subject import DiffusionLM, DiffusionLMConfig
from sinklab.core.subject.head import Head
from tiny_diffusion import tiny_backbone, tiny_model
from tiny_models import checkpointed

IDS = torch.arange(3, 15)[None]


def pickled(model):
    return pickle.loads(pickle.dumps(model))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, pickled])
@pytest.mark.parametrize("prepare", [torch.nn.Module.eval, checkpointed])
def test_a_copy_uses_its_own_gate_and_sink(duplicate, prepare):
    model = tiny_model(2, gate="elementwise", rope_dtype="bfloat16")
    before = model(IDS).logits
    twin = duplicate(model)
    prepare(model), prepare(twin)
    assert torch.equal(twin(IDS).logits, before)
    with torch.no_grad():
        for gate in twin.gates:
            gate.weight.add_(1.0)
        twin.sink_embeddings.add_(1.0)
    changed = twin(IDS).logits
    assert (changed - before).abs().max() > 1e-2
    assert torch.equal(model(IDS).logits, before)
    changed.square().mean().backward()
    assert all(gate.weight.grad is not None for gate in twin.gates)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_callers_backbone_config_is_left_alone():
    config = tiny_backbone(is_causal=True)
    ours = DiffusionLMConfig(config)
    assert config.is_causal
    assert not ours.backbone.is_causal
    fields = config.to_dict()
    DiffusionLMConfig(fields)
    assert fields == config.to_dict()


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"sink_cuont": 1}, "'sink_count'"),
        ({"colour": "blue"}, "'colour'"),
        ({"rope_dtype": "bf16"}, "float32, bfloat16, .*'bf16'"),
        ({"text_vocab_size": 281}, "280"),
        ({"output_vocab_size": 279, "is_tied": True}, "279"),
    ],
)
def test_unknown_keys_are_refused_with_the_near_ones(fields, message):
    backbone = tiny_backbone(tie_word_embeddings=fields.pop("is_tied", False))
    refused(message, DiffusionLMConfig, backbone, **fields)


@pytest.mark.parametrize("rows, size, message", [(280, 2, "keep at least 3"), (279, 300, "279")])
def test_a_resize_that_cannot_be_is_refused(rows, size, message):
    refused(message, tiny_model(output_vocab_size=rows).resize_token_embeddings, size)


def test_what_transformers_writes_into_a_config_comes_back(tmp_path):
    config = tiny_model(1, text_vocab_size=270, eot_token_id=7, rope_dtype="bfloat16").config
    config.id2label = {0: "no", 1: "yes", 2: "perhaps"}
    config.label2id = {"no": 0, "yes": 1, "perhaps": 2}
    config.architectures = ["DiffusionLM"]
    config.dtype = torch.bfloat16
    config.save_pretrained(tmp_path)
    again = DiffusionLMConfig.from_pretrained(tmp_path)
    assert again.to_dict() | {"_name_or_path": ""} == config.to_dict() | {
        "_name_or_path": "",
        "transformers_version": again.to_dict()["transformers_version"],
    }
    assert (again.text_vocab_size, again.eot_token_id, again.rope_dtype) == (270, 7, "bfloat16")
    assert DiffusionLMConfig(**again.to_dict()).to_dict() == again.to_dict()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("size", [300, 278])
def test_the_vocabulary_can_be_resized(tmp_path, tied, size):
    torch.manual_seed(0)
    backbone = tiny_backbone(tie_word_embeddings=tied)
    model = DiffusionLM(DiffusionLMConfig(backbone, mask_token_id=5)).eval()
    before = model(IDS).logits
    embedding = model.resize_token_embeddings(size)
    assert embedding is model.get_input_embeddings()
    assert (model.config.vocab_size, model.config.backbone.vocab_size, model.model.vocab_size) == (
        size,
    ) * 3
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    after = model(IDS).logits
    shared = min(size, 280)
    assert after.shape[-1] == size
    assert torch.equal(after[..., :shared], before[..., :shared])
    model.save_pretrained(tmp_path)
    again = DiffusionLM.from_pretrained(tmp_path).eval()
    assert torch.equal(again(IDS).logits, after)
    assert (again.lm_head.weight is again.model.embed_tokens.weight) == tied


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_ids_without_a_row_are_below_any_logit(dtype):
    head = Head(2, 3, 5).to(dtype)
    with torch.no_grad():
        head.weight.fill_(-100.0)
    logits = head(torch.full((1, 2), 300.0, dtype=dtype))
    assert (logits[..., :3] == -60000.0).all() or dtype == torch.bfloat16
    assert logits[..., :3].max() < -5e4
    assert (logits[..., 3:] < logits[..., :3].min()).all()
    assert (logits.softmax(-1)[..., 3:] == 0).all()
    assert logits.isfinite().all()
