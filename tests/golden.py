"""Golden data: the numbers that the authors' own code gave, to which ours is held."""

import functools
import json

import torch

from shared_data import shared
from sinklab.lab.checkpoints import load

ASKED = [
    "a2d_llama",
    "a2d_qwen2",
    "a2d_qwen3",
    "attention",
    "bd3lm_llama",
    "bd3lm_qwen3",
    "diffusion_gemma",
    "dream",
    "fast_dllm",
    "fast_dllm_v2",
    "illada",
    "llada",
    "llada21_moe",
    "llada2_moe",
    "llada_moe",
    "mmada",
    "sdar",
    "smdm_gate",
    "smdm_sink",
    "smdm_vanilla",
]
"""The folders that tests hold ours to."""
LEFT = ["bd3lm", "mdlm"]
"""Those of formats that are no longer read."""


def golden_folder(family):
    """The folder of one golden family; skips the calling test where the golden data are not at
    hand.
    """
    assert family in ASKED, family
    return shared(f"golden/{family}/cases.json").parent


@functools.cache
def golden_model(family, **settings):
    """A golden family, loaded; tests leave it as it is."""
    with torch.inference_mode(False):
        return load(golden_folder(family), **settings)


@functools.cache
def golden_cases(family):
    return json.loads((golden_folder(family) / "cases.json").read_text())


def golden_case(family, kind, name):
    """One of the stored cases of a kind, by its name."""
    return next(case for case in golden_cases(family)[kind] if case["name"] == name)


@functools.cache
def golden_tensors(family):
    """Every stored tensor by its name, whole numbers as int64."""
    from safetensors.torch import load_file

    stored = load_file(golden_folder(family) / "expected.safetensors")
    return {name: one.long() if one.dtype == torch.int32 else one for name, one in stored.items()}


def tensors_of(family, prefix):
    """The stored tensors whose names begin with this, by the rest of their names."""
    found = golden_tensors(family)
    return {
        name.removeprefix(prefix): one for name, one in found.items() if name.startswith(prefix)
    }


def check_canvases(name, steps, canvas_TBS):
    """Hold the canvas after each evaluation to the stored ones, in the columns that were there."""
    assert len(steps) == len(canvas_TBS), name
    for step, after_BS in zip(steps, canvas_TBS, strict=True):
        shown_BS = torch.where(after_BS >= 0, step.ids_BS[:, : after_BS.shape[1]], -1)
        assert torch.equal(shown_BS, after_BS), f"{name}: the canvas after evaluation {step.index}"
