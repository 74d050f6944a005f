"""A2D, BD3LM, SDAR, Fast-dLLM v2 and iLLaDA against the numbers of their authors' code: logits, and
the canvases of those that attend to everything.
"""

# B batch rows, S canvas positions, Q queries, K keys, V vocabulary
from dataclasses import replace

import pytest
import torch
from test_golden_blocks import by_noise, noises

from golden import check_canvases, golden_cases, golden_model, tensors_of
from refusals import refused
from sinklab.core.subject import Canvas, DecodingSettings, LowConfidence
from sinklab.core.subject.denoisers import guided

pytestmark = pytest.mark.ring("extras")

A2D = ("a2d_qwen3", "a2d_qwen2", "a2d_llama")
BLOCKS = ("bd3lm_qwen3", "bd3lm_llama", "sdar", "fast_dllm_v2")
FAMILIES = {
    "a2d_qwen3": "a2d-qwen3",
    "a2d_qwen2": "a2d-qwen2",
    "a2d_llama": "a2d-llama",
    "bd3lm_qwen3": "a2d-qwen3",
    "bd3lm_llama": "a2d-llama",
    "sdar": "sdar",
    "fast_dllm_v2": "fast-dllm-v2",
    "illada": "illada",
}
# What config.json does not say: iLLaDA's [MASK] stands in its README, and this folder has no
# tokenizer.
GIVEN = {"illada": {"mask_token_id": 5}}
QUIRKS = ("mask_proposed",)
"""[MASK] itself is proposed, counted as revealed and left behind; here it never is."""
QUIRKS_ILLADA = {"lowconf", "oneblock", "cfg"}
"""Likewise."""
REFUSED = ("blocks",)
"""Infilling alone: its rows have unequal numbers of masks; each alone gives what the original
writes.
"""


def loaded(family, **settings):
    return golden_model(family, **GIVEN.get(family, {}), **settings)


def places(stored, case, length):
    """What the model is given besides ids: padding, and the keys that each query sees, as the
    original was.
    """
    mask = stored.get("attention_mask", stored.get("attention"))
    if mask is None and "block_size" in case:
        block_S = torch.arange(length) // case["block_size"]
        return None, block_S[None, :] <= block_S[:, None]
    if mask is None:
        return None, None
    mask = mask.bool()
    if mask.ndim == 2 and "position_ids" in stored:
        return mask, None
    if mask.ndim == 2:
        # positions that count padding too
        return None, mask[:, None].expand(-1, length, -1)
    visible_BQK = mask.flatten(0, -3)
    real_BS = visible_BQK.diagonal(dim1=1, dim2=2)
    if len(real_BS) < len(stored["input_ids"]):
        return None, visible_BQK[0]
    return (None if bool(real_BS.all()) else real_BS), visible_BQK


def most_off(ours_BSV, expected_BSV, valid_BS):
    return (ours_BSV - expected_BSV)[valid_BS].abs().max()


def golden_logits(family):
    """Name, ids, padding, who sees whom, expected logits, and where they compare."""
    for case in golden_cases(family)["logits"]:
        stored = tensors_of(family, f"logits.{case['name']}.")
        ids_BS = stored["input_ids"]
        valid_BS = stored.get("valid", torch.ones_like(ids_BS, dtype=torch.bool))
        expected_BSV = stored.get("shifted", stored["logits"])
        if family == "fast_dllm_v2" and "shifted" not in stored:
            # raw logits: the row before is the one that is used, and the first is used twice
            expected_BSV = torch.cat([expected_BSV[:, :1], expected_BSV[:, :-1]], 1)
        real_BS, visible = places(stored, case, ids_BS.shape[1])
        yield case["name"], ids_BS, real_BS, visible, expected_BSV, valid_BS


@pytest.mark.parametrize("family", FAMILIES)
def test_golden_logits(family):
    """By the mask that the original was given, over full attention."""
    lm, names = loaded(family, block_length=None), set()
    assert (lm.family, lm.published_family) == ("diffusion", FAMILIES[family])
    for name, ids_BS, real_BS, visible, expected_BSV, valid_BS in golden_logits(family):
        names.add(name)
        if name == "train_mask":
            # its positions are counted twice, and no mask can say so
            continue
        with torch.inference_mode():
            ours_BSV = lm.model(ids_BS, real_BS, visible=visible).logits
            seen_BSV = lm.model(ids_BS, real_BS).logits
        assert most_off(ours_BSV, expected_BSV, valid_BS) < 5e-4, name
        hides = visible is not None and not bool(visible.all())
        is_off = most_off(seen_BSV, expected_BSV, valid_BS) > 5e-4
        assert hides == is_off, f"{name}: the mask does nothing"
    assert names == {case["name"] for case in golden_cases(family)["logits"]} and len(names) >= 4


@pytest.mark.parametrize("family", BLOCKS)
def test_golden_logits_in_blocks(family):
    """By the length of the blocks alone."""
    for name, ids_BS, real_BS, visible, expected_BSV, valid_BS in golden_logits(family):
        # what the first token of a text without padding sees
        model = loaded(family, block_length=int(visible.sum(-1)[..., 0].max())).model
        with torch.inference_mode():
            if name == "train_mask":
                noisy_BS, clean_BS = ids_BS.chunk(2, 1)
                ours_BSV = model(noisy_BS, clean=clean_BS).logits
                expected_BSV, valid_BS = expected_BSV.chunk(2, 1)[0], valid_BS.chunk(2, 1)[0]
            else:
                ours_BSV = model(ids_BS, real_BS).logits
        assert most_off(ours_BSV, expected_BSV, valid_BS) < 5e-4, name


@pytest.mark.parametrize("family", FAMILIES)
def test_golden_special_ids(family):
    lm, ids = loaded(family), golden_cases(family)["special_ids"]
    assert (lm.special.mask, lm.special.eos, lm.model.config.mask_token_id) == (
        ids["mask"],
        ids["eos"],
        ids["mask"],
    )
    # this config has the end of a turn as its padding, unlike its tokenizer
    assert lm.special.pad == (ids["eos"] if family == "fast_dllm_v2" else ids["pad"])
    if lm.tokenizer is not None:
        assert lm.tokenizer.mask_token_id == ids["mask"]
    assert lm.model.config.block_length == {"sdar": 4, "fast_dllm_v2": 8}.get(family)
    assert lm.model.config.blocks_from == (
        "column" if family.startswith(("a2d", "bd3lm")) else "text"
    )
    assert lm.model.config.logit_shift == (family == "fast_dllm_v2")
    assert any(
        "BD3LM" in note and "block_length=" in note for note in lm.notes
    ) == family.startswith(("a2d", "bd3lm"))


def settings_of(case, family):
    theirs = {"steps": 128, "block_size": 128, "temperature": 0.0, **case["settings"]}
    if family == "illada":
        return DecodingSettings(
            **{name: theirs[name] for name in ("steps", "block_length", "cfg_scale")}
        )
    return DecodingSettings(
        schedule="alpha:curve=cosine" if case["scheduler"].startswith("Cosine") else "alpha",
        steps=theirs["steps"],
        block_length=theirs["block_size"],
        suppress_ids=tuple(theirs.get("suppress_tokens") or ()),
        rule=LowConfidence(defer_ids=tuple(theirs.get("begin_suppress_tokens") or ())),
    )


def canvas_of(family, case, kind):
    """The first canvas: prompts on the left, rows of dLLM padded on the right."""
    stored = tensors_of(family, f"{kind}.{case['name']}.")
    mask_id = case.get("special_ids", golden_cases(family)["special_ids"])["mask"]
    ids_BS = stored["canvas"][0]
    is_mask_BS, real_BS = ids_BS == mask_id, torch.ones_like(ids_BS, dtype=torch.bool)
    if family != "illada":
        width_B = stored["prompt_lengths"] + (is_mask_BS.sum(1) if kind == "gen" else 0)
        real_BS = torch.arange(ids_BS.shape[1]) < width_B[:, None]
    return Canvas(ids_BS, real_BS, is_mask_BS & real_BS, mask_id)


def in_windows(canvas, settings):
    """dLLM's blocks of infilling: windows of the columns, which share the steps with those that
    have no masks.
    """
    window_S = torch.arange(canvas.ids_BS.shape[1]) // (
        settings.block_length or canvas.ids_BS.shape[1]
    )
    window_BS = window_S.expand_as(canvas.ids_BS)
    held = window_BS[canvas.open_BS].unique()
    block_BS = torch.where(canvas.open_BS, torch.searchsorted(held, window_BS.contiguous()), -1)
    steps = -(-settings.steps // int(window_S[-1] + 1)) * len(held)
    return replace(canvas, block_BS=block_BS), replace(settings, steps=steps, block_length=None)


def decoded(family, case, kind, row=slice(None)):
    theirs, canvas = case["settings"], canvas_of(family, case, kind)
    canvas = Canvas(
        canvas.ids_BS[row], canvas.attention_BS[row], canvas.open_BS[row], canvas.mask_id
    )
    settings = settings_of(case, family)
    model = loaded(family, logit_shift=theirs.get("right_shift_logits", False)).model
    if kind == "infill":
        canvas, settings = in_windows(canvas, settings)
    denoiser = model.denoiser(None if bool(canvas.attention_BS.all()) else canvas.attention_BS)
    if scale := theirs.get("cfg_scale"):
        kept = torch.tensor(theirs.get("cfg_keep_tokens") or [-1])
        denoiser = guided(
            denoiser, scale, canvas.prompt_BS & ~torch.isin(canvas.ids_BS, kept), canvas.mask_id
        )
        settings = replace(settings, cfg_scale=0.0)
    given = {}
    if case.get("noise_draws"):
        noise = noises(family, case, case["noise_draws"])
        denoiser, given["rule"] = by_noise(denoiser, noise, theirs)
    return list(settings.decode(denoiser, canvas, **given))


def cases_of(family, kind):
    left_out = REFUSED if kind == "infill" else QUIRKS
    stored = golden_cases(family)["infill" if kind == "infill" else "generate"]
    assert set(left_out) <= {case["name"] for case in stored}
    return [case for case in stored if case["name"] not in left_out]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gen", "infill"])
@pytest.mark.parametrize("family", A2D)
def test_every_canvas_of_dllm(family, kind):
    for case in cases_of(family, kind):
        stored, steps = tensors_of(family, f"{kind}.{case['name']}."), decoded(family, case, kind)
        canvas_TBS = stored["canvas"]
        assert len(steps) == case["denoising_evaluations"] == len(canvas_TBS) - 1, case["name"]
        assert [int(step.committed_BS.sum()) for step in steps] == case["committed"], case["name"]
        check_canvases(case["name"], steps, canvas_TBS[1:])
        assert torch.equal(steps[-1].ids_BS, stored["sequences"])


@pytest.mark.parametrize("family", A2D)
def test_rows_that_would_change_one_another_are_refused_and_decode_alone(family):
    case = next(one for one in golden_cases(family)["infill"] if one["name"] in REFUSED)
    refused("same in every row, got rows", decoded, family, case, "infill")
    for row, text_S in enumerate(tensors_of(family, f"infill.{case['name']}.")["sequences"]):
        assert torch.equal(
            decoded(family, case, "infill", slice(row, row + 1))[-1].ids_BS[0], text_S
        )
