"""What a model is and needs, from its config alone; real configs give the real sizes."""

import json

import pytest
import torch

import published_toys as toys
from refusals import refused
from shared_data import shared
from sinklab.lab.checkpoints import ModelInfo, describe, load
from tiny_diffusion import save_tiny, tiny_model


def real(name):
    return shared(f"data/configs/{name}")


def counted(vocabulary, width, inner, layers, heads, kv_heads, *, tied=False, biased=False):
    """Parameters of a Llama-like decoder, by hand."""
    keys = width // heads * kv_heads
    layer = 2 * width * width + 2 * keys * width + 3 * inner * width + 2 * width
    layer += (width + 2 * keys) if biased else 0
    return (1 if tied else 2) * vocabulary * width + layers * layer + width


@pytest.mark.parametrize(
    "file, family, sizes, settings, expected",
    [
        (
            "LLaDA-8B-Instruct/config.json",
            "llada",
            (126464, 4096, 12288, 32, 32, 32),
            {},
            8_015_581_184,
        ),
        (
            "hf_transcribed/DiffuCoder_7B_Instruct.json",
            "dream",
            (152064, 3584, 18944, 28, 28, 4),
            {"biased": True},
            7_615_616_512,
        ),
        (
            "Qwen2.5-0.5B-Instruct/config.json",
            "qwen2",
            (151936, 896, 4864, 24, 14, 2),
            {"biased": True, "tied": True},
            494_032_768,
        ),
    ],
)
def test_real_configs_have_the_real_sizes(file, family, sizes, settings, expected):
    info = describe(real(file))
    assert info.published_family == family
    found = (
        info.vocabulary,
        info.hidden,
        info.intermediate,
        info.layers,
        info.heads,
        info.kv_heads,
    )
    assert found == sizes
    assert info.parameters == counted(*sizes, **settings) == expected
    assert info.weight_bytes("bfloat16") == 2 * expected
    assert info.logit_shift == (family == "dream")


def test_llada_in_words():
    lines = describe(real("LLaDA-8B-Instruct/config.json")).lines()
    text = "\n".join(lines)
    for part in (
        "diffusion, llada (LLaDAModelLM) on llama",
        "8,015,581,184",
        "mask 126336, eos 126081, eot 126348, pad 126081, bos 126080, stop 126081 126348",
        "4,096 tokens",
        "weights 14.93 GiB",
        "weights 29.86 GiB",
    ):
        assert part in text
    assert all("\n" not in line for line in lines)


@pytest.mark.parametrize("sink", [0, 2])
def test_our_own_model(tmp_path, sink):
    folder = save_tiny(tmp_path, sink, gate="elementwise")
    # no weights are read
    (folder / "model.safetensors").unlink()
    model, before = tiny_model(sink, gate="elementwise"), torch.random.get_rng_state()
    info = describe(folder)
    assert torch.equal(before, torch.random.get_rng_state())
    assert isinstance(info, ModelInfo)
    assert info.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert (info.family, info.published_family, info.gate) == (
        "diffusion",
        "sinklab",
        "elementwise",
    )
    assert info.sink == ("2 (token, front)" if sink else "none")
    assert info.context == 64 - sink
    assert info.special.mask == model.config.mask_token_id
    refused("dtype must be one of float32", info.weight_bytes, "int8")
    plain = json.loads(json.dumps(info.as_dict()))
    assert plain["memory_bytes"]["float32"]["weights"] == 4 * info.parameters


def test_what_only_the_weights_say_is_noted(tmp_path):
    folder, _ = toys.smdm(tmp_path, sink=1)
    info = describe(folder)
    assert info.sink == "none"
    assert "seen in the weights" in info.notes[0]
    assert info.lines()[-1].startswith("note")
    assert load(folder).model.config.sink_count == 1
