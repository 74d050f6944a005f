"""The decoders of the field on their golden weights: the canvas after every evaluation, and how
many there were.
"""

import functools

import pytest
import torch

from golden import golden_case, golden_cases, golden_folder, tensors_of
from golden_fast_dllm import DUAL, IDLE, PLAIN, PREFIX
from refusals import refused
from sinklab.core.sampling import Canvas, DecodingSettings
from sinklab.lab.checkpoints import load

NAMES = {
    "llada": [
        *(
            "full",
            "uneven",
            "blocks3",
            "blocks3_uneven",
            "one_step",
            "cfg",
            "eos_inf",
            "conf_eos_eot_inf",
        ),
        *("batch_leftpad", "batch_leftpad_cfg", "batch_equal"),
    ],
    "dream": [
        *(
            "maskgit_plus_16",
            "maskgit_plus_8",
            "topk_margin_16",
            "topk_margin_8",
            "entropy_16",
            "entropy_8",
        ),
        *(
            "entropy_leftpad",
            "maskgit_plus_leftpad_few",
            "topk_margin_more_steps",
            "entropy_eps",
            "entropy_topk50",
        ),
        "maskgit_plus_topk50_topp",
    ],
    "mmada": ["full", "blocks", "uneven", "cfg", "batch_equal", "leftpad_fullmask"],
    "llada_moe": ["lowconf", "oneblock", "fullsteps"],
    "smdm_vanilla": ["greedy", "greedy_cfg", "greedy_pooled"],
    "smdm_sink": ["greedy", "greedy_cfg", "greedy_pooled"],
    "smdm_gate": ["greedy", "greedy_cfg", "greedy_pooled"],
}
QUIRKS = {"llada": {"prompt_with_masks"}}
CASES = [
    pytest.param(family, name, marks=[pytest.mark.ring("extras")] * (family == "llada_moe"))
    for family, names in NAMES.items()
    for name in names
]


@functools.cache
def model_of(family):
    # The golden numbers of SMDM were made with float32 rope tables; its release has bfloat16 ones.
    settings = {"rope_dtype": "float32"} if family.startswith("smdm") else {}
    if family == "llada_moe":
        settings = {"mask_token_id": golden_cases(family)["special_ids"]["mask"]}
    return load(golden_folder(family), **settings).model.eval()


def settings_of(family, name):
    """The original's settings as ours."""
    theirs = golden_case(family, "generate", name)["settings"]
    special = golden_cases(family)["special_ids"]
    common = {
        "steps": theirs["steps"],
        "temperature": theirs["temperature"],
        "cfg_scale": theirs.get("cfg_scale", 0.0),
    }
    if family == "dream":
        cuts = {key: theirs[key] for key in ("top_p", "top_k", "alg_temp")}
        return DecodingSettings(
            rule=theirs["alg"], schedule="timed", eps=theirs["eps"], **common, **cuts
        )
    if family.startswith("smdm"):
        return DecodingSettings(schedule="timed", eps=theirs["eps"], pooled=True, **common)
    return DecodingSettings(
        **common,
        block_length=theirs["block_length"],
        suppress_ids=(special["eos"],) if theirs.get("logits_eos_inf") else (),
        defer_ids=(special["eos"], special["eot"]) if theirs.get("confidence_eos_eot_inf") else (),
        # The original proposes image codes too.
        text_only=False,
    )


def prompt_of(family, name):
    theirs = golden_case(family, "generate", name)["settings"]
    stored = tensors_of(family, f"gen.{name}.")
    prompt_BP, attention = stored["prompt"], stored.get("attention_mask")
    new_tokens = theirs.get("gen_length") or theirs.get("max_new_tokens")
    new_tokens = new_tokens or theirs["context_length"] - prompt_BP.shape[1]
    # MMaDA's mask covers the generation too.
    return prompt_BP, None if attention is None else attention[:, : prompt_BP.shape[1]], new_tokens


def assert_same_run(steps, canvases_TBS, confidence_TBS=None):
    assert len(steps) == len(canvases_TBS) - 1, "number of model evaluations"
    assert torch.equal(steps[0].before_BS, canvases_TBS[0])
    for step, after_BS in zip(steps, canvases_TBS[1:], strict=True):
        assert torch.equal(step.ids_BS, after_BS), (
            f"the canvas after evaluation {step.index} differs"
        )
    for step, theirs_BS in zip(
        steps, [] if confidence_TBS is None else confidence_TBS, strict=confidence_TBS is not None
    ):
        asked_BS = ~theirs_BS.isinf()
        # Dream keeps no confidences where it selects nothing.
        if asked_BS.any():
            assert torch.equal(asked_BS, ~step.confidence_BS.isnan())
            torch.testing.assert_close(
                step.confidence_BS[asked_BS], theirs_BS[asked_BS], rtol=0, atol=5e-4
            )


@pytest.mark.parametrize("family, name", CASES, ids="-".join)
def test_every_canvas_and_what_generate_returns(family, name):
    model, stored = model_of(family), tensors_of(family, f"gen.{name}.")
    prompt_BP, attention_BP, new_tokens = prompt_of(family, name)
    mask_id = golden_cases(family)["special_ids"]["mask"]
    assert model.config.mask_token_id == mask_id
    canvas = Canvas.from_prompts(
        prompt_BP, new_tokens=new_tokens, mask_id=mask_id, attention_BP=attention_BP
    )
    denoiser = model.denoiser(None if attention_BP is None else canvas.attention_BS)
    settings = settings_of(family, name)
    steps = list(settings.decode(denoiser, canvas, text_vocabulary=model.config.text_vocab_size))
    assert_same_run(steps, stored["canvas"], stored.get("confidence"))
    written_BS = model.generate(
        prompt_BP, attention_BP, max_new_tokens=new_tokens, settings=settings
    )
    assert torch.equal(written_BS, stored["sequences"])


def test_no_stored_case_is_left_out():
    for family, names in NAMES.items():
        stored = {case["name"]: case.get("quirk") for case in golden_cases(family)["generate"]}
        assert set(stored) == set(names) | QUIRKS.get(family, set())
        assert all(stored[name] for name in QUIRKS.get(family, ()))
    stored = {case["name"]: case["quirk"] for case in golden_cases("fast_dllm")["generate"]}
    assert set(stored) == {*PLAIN, *PREFIX, *DUAL, *IDLE, "dual_threshold_fewsteps_b"}
    assert stored["dual_threshold_fewsteps_b"]


def test_golden_masks_in_the_prompt_are_refused_where_the_original_lets_them_use_up_the_quota():
    prompt_BP, attention_BP, new_tokens = prompt_of("llada", "prompt_with_masks")
    refused(
        r"Canvas.infill, or --new-tokens",
        model_of("llada").generate,
        prompt_BP,
        attention_BP,
        max_new_tokens=new_tokens,
    )


def test_golden_mmada_writes_text_alone_unless_asked():
    model = model_of("mmada")
    prompt_BP, _, new_tokens = prompt_of("mmada", "full")
    text = model.config.text_vocab_size
    every, words = (
        model.generate(prompt_BP, max_new_tokens=new_tokens, text_only=text_only)[
            :, prompt_BP.shape[1] :
        ]
        for text_only in (False, True)
    )
    assert (words < text).all()
    expected = tensors_of("mmada", "gen.full.")["sequences"][:, prompt_BP.shape[1] :]
    assert torch.equal(every, expected)
    assert (every >= text).any(), "the original writes image codes"
