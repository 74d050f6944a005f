"""The decoders of the field on their golden weights: the canvas after every evaluation, and how
many there were.
"""

import pytest
import torch

from golden import check_canvases, golden_case, golden_cases, golden_model, tensors_of
from refusals import refused
from sinklab.core.subject import Canvas, DecodingSettings, LowConfidence

FAMILIES = [
    "llada",
    "dream",
    "mmada",
    pytest.param("llada_moe", marks=pytest.mark.ring("extras")),
    "smdm_vanilla",
    "smdm_sink",
    "smdm_gate",
]
QUIRK = "prompt_with_masks"


def model_of(family):
    # The golden numbers of SMDM were made with float32 rope tables; its release has bfloat16 ones.
    settings = {"rope_dtype": "float32"} if family.startswith("smdm") else {}
    if family == "llada_moe":
        settings = {"mask_token_id": golden_cases(family)["special_ids"]["mask"]}
    return golden_model(family, **settings).model


def settings_of(family, theirs):
    """The original's settings as ours."""
    special = golden_cases(family)["special_ids"]
    common = {
        "steps": theirs["steps"],
        "temperature": theirs["temperature"],
        "cfg_scale": theirs.get("cfg_scale", 0.0),
    }
    if family == "dream":
        cuts = {key: theirs[key] for key in ("top_p", "top_k")}
        rule = theirs["alg"]
        if theirs["alg_temp"] is not None:
            rule += f":alg_temp={theirs['alg_temp']}"
        return DecodingSettings(rule=rule, schedule=f"timed:eps={theirs['eps']}", **common, **cuts)
    if family.startswith("smdm"):
        return DecodingSettings(schedule=f"timed:eps={theirs['eps']},pooled=true", **common)
    deferred = ()
    if theirs.get("confidence_eos_eot_inf"):
        deferred = special["eos"], special["eot"]
    return DecodingSettings(
        **common,
        rule=LowConfidence(defer_ids=deferred),
        block_length=theirs["block_length"],
        suppress_ids=(special["eos"],) if theirs.get("logits_eos_inf") else (),
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


def assert_same_run(name, steps, canvases_TBS, confidence_TBS=None):
    assert torch.equal(steps[0].before_BS, canvases_TBS[0])
    check_canvases(name, steps, canvases_TBS[1:])
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


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_canvas_and_what_generate_returns(family):
    model, mask_id = model_of(family), golden_cases(family)["special_ids"]["mask"]
    assert model.config.mask_token_id == mask_id
    for case in golden_cases(family)["generate"]:
        name = case["name"]
        if name == QUIRK:
            assert case["quirk"]
            continue
        stored = tensors_of(family, f"gen.{name}.")
        prompt_BP, attention_BP, new_tokens = prompt_of(family, name)
        canvas = Canvas.from_prompts(
            prompt_BP, new_tokens=new_tokens, mask_id=mask_id, attention_BP=attention_BP
        )
        denoiser = model.denoiser(None if attention_BP is None else canvas.attention_BS)
        settings = settings_of(family, case["settings"])
        text = model.config.text_vocab_size
        steps = list(settings.decode(denoiser, canvas, text_vocabulary=text))
        assert_same_run(name, steps, stored["canvas"], stored.get("confidence"))
        assert torch.equal(steps[-1].ids_BS, stored["sequences"]), name
    # the last of them in one call
    written_BS = model.generate(
        prompt_BP, attention_BP, max_new_tokens=new_tokens, settings=settings
    )
    assert torch.equal(written_BS, stored["sequences"])


def test_golden_masks_in_the_prompt_are_refused_where_the_original_lets_them_use_up_the_quota():
    prompt_BP, attention_BP, new_tokens = prompt_of("llada", QUIRK)
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
        model.generate(prompt_BP, max_new_tokens=new_tokens, text_only=text_only)
        for text_only in (False, True)
    )
    assert (words[:, prompt_BP.shape[1] :] < text).all()
    assert torch.equal(every, tensors_of("mmada", "gen.full.")["sequences"])
    assert (every >= text).any(), "the original writes image codes"
