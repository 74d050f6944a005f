"""A2D, SDAR, Fast-dLLM v2 and iLLaDA in the formats they are published in; and what must not be
taken for another.
"""

import copy

import pytest
import torch
from causal_toys import save_causal

import published_toys as toys
from refusals import refused
from sinklab.lab.checkpoints import describe, from_causal, load
from sinklab.lab.cli.main import main
from tiny_diffusion import tiny_tokenizer

pytestmark = pytest.mark.ring("extras")

IDS = torch.arange(3, 15)[None]
BACKBONE = {"a2d-qwen3": "qwen3", "a2d-qwen2": "qwen2", "a2d-llama": "llama"}
BACKBONE |= {"sdar": "qwen3", "fast-dllm-v2": "qwen2", "illada": "llama"}


@pytest.mark.parametrize("name", toys.ADAPTED)
def test_a_published_folder_loads_and_is_described(tmp_path, name, capsys):
    folder, tensors = toys.adapted(tmp_path, name)
    ran, ids = toys.poison(folder), toys.save_adapted_tokenizer(folder, name)
    # SDAR's config has it, that of d3LLM and others not
    mask = ids[toys.UNSAID[name]]
    toys.edit(folder, mask_token_id="absent")
    loaded, info = load(folder), describe(folder)
    model, config = loaded.model, loaded.model.config
    assert not ran.exists()
    assert (loaded.family, loaded.published_family, config.backbone.model_type) == (
        "diffusion",
        name,
        BACKBONE[name],
    )
    assert (loaded.special.mask, config.mask_token_id, loaded.tokenizer.mask_token_id) == (
        mask,
        mask,
        mask,
    )
    end = ids["<|eot_id|>" if name == "a2d-llama" else "<|im_end|>"]
    assert (loaded.special.eot, loaded.special.stop) == (end, (1, end))
    blocks = {"sdar": 4, "fast-dllm-v2": 8}.get(name)
    assert (config.block_length, config.logit_shift) == (blocks, name == "fast-dllm-v2")
    assert model.model.rotary_emb.inv_freq[1].item() == pytest.approx(1e6 ** (-2 / config.head_dim))
    for target, tensor in model.state_dict().items():
        source = (
            "model.embed_tokens.weight"
            if config.tie_word_embeddings and target == "lm_head.weight"
            else target
        )
        assert torch.equal(tensor, tensors[source]), target
    written = model.generate(IDS, max_new_tokens=4)
    assert written.shape == (1, 16) and not (written == mask).any()
    assert info.parameters == sum(parameter.numel() for parameter in model.parameters())
    main(["info", str(folder)])
    said = " ".join(capsys.readouterr().out.split())
    assert f"diffusion, {name} ({info.architecture})" in said
    assert (
        "attention full" if blocks is None else f"attention in blocks of {blocks} tokens"
    ) in said


@pytest.mark.parametrize("name", toys.ADAPTED)
def test_the_length_of_blocks_is_said_or_noted(tmp_path, name):
    folder, _ = toys.adapted(tmp_path, name)
    fields = {"sdar": {"block_size": "absent"}, "fast-dllm-v2": {"bd_size": "absent"}}.get(name, {})
    toys.edit(folder, **fields)
    notes = [
        note
        for note in load(folder, mask_token_id=301).notes
        if "unless block_length= is given" in note
    ]
    assert len(notes) == (name != "illada")
    assert load(folder, mask_token_id=301, block_length=16).model.config.block_length == 16
    refused("block_length must be at least", load, folder, block_length=0)


def test_a_mask_that_nobody_names_is_noted(tmp_path):
    loaded = load(toys.adapted(tmp_path, "illada")[0])
    assert loaded.special.mask is None
    assert (
        "neither config.json nor a tokenizer says which id is [MASK]: pass mask_token_id="
        in loaded.notes[-1]
    )
    assert load(tmp_path, mask_token_id=5).special.mask == 5


@pytest.mark.parametrize(
    "make, theirs, ours",
    [
        (toys.llada, "LLaDASomethingElse", "LLaDAModelLM"),
        (toys.dream, "DreamVLModel", "DreamModel"),
        (
            lambda folder, **fields: toys.adapted(folder, "sdar", **fields),
            "SDARMoeForCausalLM",
            "SDARForCausalLM",
        ),
    ],
)
def test_another_class_of_a_known_model_type_is_refused_by_name(tmp_path, make, theirs, ours):
    folder, _ = make(tmp_path, architectures=[theirs])
    refused(f"model .{theirs}.*sinklab loads .*{ours}", load, folder)
    # without a class the model_type decides
    assert load(toys.edit(folder, architectures="absent"), mask_token_id=9).family == "diffusion"


def test_quantised_checkpoints_under_names_of_their_own_are_refused_by_their_config(tmp_path):
    folder, _ = toys.llada(tmp_path)
    toys.edit(folder, quantization_config={"quant_method": "gptq", "bits": 4})
    refused(r"\(quantization_config: .*gptq.*but llada has others", load, folder)
    assert load(toys.edit(folder, quantization_config=None)).family == "diffusion"


@pytest.fixture
def causal(tmp_path):
    """A Qwen2 that may have been trained to denoise: its tokenizer has a [MASK]."""
    save_causal(tmp_path, "qwen2", vocab_size=310)
    return tmp_path


@pytest.mark.parametrize("where", ["config", "tokenizer", "entry"])
def test_a_causal_folder_with_a_mask_says_so(causal, where):
    assert load(causal).notes == ()
    if where == "config":
        mask = 300
        toys.edit(causal, mask_token_id=mask)
    else:
        tokenizer = copy.deepcopy(tiny_tokenizer())
        tokenizer.mask_token = None if where == "entry" else "<|endoftext|>"
        mask = tokenizer.convert_tokens_to_ids("<|mask|>" if where == "entry" else "<|endoftext|>")
        tokenizer.save_pretrained(causal)
    loaded = load(causal)
    assert loaded.family == "autoregressive"
    assert loaded.notes == (
        f"it has a [MASK], id {mask}: if it was trained to denoise, load it with from_causal",
    )
    denoises = from_causal(causal)
    assert (denoises.family, denoises.model.config.mask_token_id) == ("diffusion", mask)
    assert from_causal(causal, mask_token_id=7).model.config.mask_token_id == 7
    toys.edit(causal, is_causal=False)
    refused("is_causal: false", load, causal)
    assert from_causal(causal).family == "diffusion"
