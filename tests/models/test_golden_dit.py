"""MDLM and BD3-LM through load(): logits, attention, losses and samplers against those of the
authors' code.
"""

import pytest
import torch

from golden import golden_case, golden_cases, golden_folder, tensors_of
from sinklab.core.diffusion import masked_token_loss
from sinklab.core.probing.tracing import trace
from sinklab.core.sampling import Canvas
from sinklab.extras.zoo import ddpm_cache, published_loss, published_noise, semi_ar
from sinklab.lab.checkpoints import load

LOGITS = [
    ("mdlm", "full"),
    ("mdlm", "short"),
    ("bd3lm", "train"),
    ("bd3lm", "sample_two"),
    ("bd3lm", "sample_all"),
]
LOSSES = [("mdlm", "pair"), ("mdlm", "four"), ("bd3lm", "pair"), ("bd3lm", "four")]
QUIRK = {
    "kv_cache": "keys are rotated anew at each call, and a finished block is run once more to "
    "store it: the same tokens, so we decode without that cache and count 4 calls less",
    "four": "loss and nlls of bd3lm's case are those of times from 0.001 to 1, t and noisy_input "
    "those of its own",
    "last update": "the timed sampler divides by t = 0 at its last update; here that one fills "
    "what is left",
    "256 tokens": "longer texts may end early where entropy falls; here every mask is filled",
}


def logits_of(model, ids, *, clean=False):
    """Logits as the file has them: the head lowers [MASK] by 1e6, which the authors do behind their
    forward.
    """
    ids, *texts = ids.chunk(2, dim=1) if clean else (ids,)
    with torch.inference_mode():
        return model(ids, **({"clean": texts[0]} if clean else {})).logits


@pytest.mark.parametrize("family, case", LOGITS)
def test_golden_logits(family, case):
    loaded, right = load(golden_folder(family)), tensors_of(family, f"logits.{case}.")
    ids, mask = golden_cases(family)["special_ids"], loaded.model.config.mask_token_id
    assert (loaded.family, loaded.published_family, loaded.special.mask, mask) == (
        "diffusion",
        family,
        ids["mask"],
        ids["mask"],
    )
    logits = logits_of(loaded.model, right["input_ids"], clean=case == "train")
    assert logits.shape == right["logits"].shape
    assert (logits - right["logits"])[..., :mask].abs().max() < 5e-4
    # what float32 holds of a number near 1e6
    assert (logits[..., mask] + 1e6 - right["logits"][..., mask]).abs().max() < 0.1


def subs(logits_BSV, ids_BS, mask_id):
    """MDLM's log-probabilities (2406.07524, section 3.2.3): [MASK] is never right, and what is not
    masked stays.
    """
    certain_BSV = torch.full_like(logits_BSV, -1e6).scatter(-1, ids_BS[..., None], 0.0)
    return torch.where((ids_BS != mask_id)[..., None], certain_BSV, logits_BSV.log_softmax(-1))


@pytest.mark.parametrize("case", ["full", "short"])
def test_golden_log_probabilities(case):
    loaded, right = load(golden_folder("mdlm")), tensors_of("mdlm", f"logits.{case}.")
    mask = loaded.model.config.mask_token_id
    ours = subs(logits_of(loaded.model, right["input_ids"]), right["input_ids"], mask)
    away = (ours - right["log_probs_subs"]).abs()
    assert away[..., :mask].max() < 5e-4
    assert away[..., mask].max() < 0.1


@pytest.mark.parametrize("family, case", [("mdlm", "short"), ("bd3lm", "sample_two")])
def test_golden_attention(family, case):
    model, right = load(golden_folder(family)).model, tensors_of(family, f"logits.{case}.")
    maps = [(0, layer, head) for layer in range(2) for head in range(4)]
    with trace(model, maps=maps) as recording:
        model(right["input_ids"])
    for layer in range(2):
        probs_BHQS = right[f"probs.{layer}"]
        received = torch.from_numpy(recording.array("received"))[0, :, layer]
        assert (received - probs_BHQS.sum(2)).abs().max() < 3e-4 * probs_BHQS.shape[2]
        for head in range(4):
            ours = torch.as_tensor(recording.map(0, layer, head))
            assert (ours.reshape(probs_BHQS.shape[2:]) - probs_BHQS[0, head]).abs().max() < 3e-4


def seeded(case):
    return torch.Generator().manual_seed(case["torch_seed"])


@pytest.mark.parametrize("family, name", LOSSES)
def test_golden_losses(family, name):
    model, case = load(golden_folder(family)).model, golden_case(family, "loss", name)
    right, mask = tensors_of(family, f"loss.{name}."), model.config.mask_token_id
    own = (case.get("sampling_eps_min", 1e-3), case.get("sampling_eps_max", 1.0))
    noisy, masked, t = published_noise(
        model.config, right["input_ids"], times=own, generator=seeded(case)
    )
    assert torch.equal(noisy, right["noisy_input"])
    assert (t - right["t"].view(len(t), -1)).abs().max() < 1e-6
    # QUIRK four
    loss = published_loss(
        model, right["input_ids"], right["attention_mask"], generator=seeded(case)
    )
    assert loss.item() == pytest.approx(right["loss"].item(), rel=1e-5)
    noisy, masked, t = published_noise(model.config, right["input_ids"], generator=seeded(case))
    clean = {"clean": right["input_ids"]} if family == "bd3lm" else {}
    with torch.inference_mode():
        log_probs = subs(model(noisy, **clean).logits, noisy, mask)
    nlls = (
        -log_probs.gather(-1, right["input_ids"][..., None])[..., 0] / t * right["attention_mask"]
    )
    assert torch.allclose(nlls, right["nlls"], rtol=1e-5, atol=1e-5)
    if family == "mdlm":
        # the lab's own loss is this one
        real, wanted = right["attention_mask"].bool(), masked & right["attention_mask"].bool()
        ours = masked_token_loss(
            model(noisy, logits_to_keep=wanted).logits,
            right["input_ids"],
            wanted,
            t[:, 0],
            maskable_BS=real,
        )
        assert ours.item() == pytest.approx(right["loss"].item(), rel=1e-5)


@pytest.mark.parametrize("name", ["steps8", "steps20"])
def test_golden_mdlm_sampler(name):
    loaded, case = load(golden_folder("mdlm")), golden_case("mdlm", "generate", name)
    right, mask = tensors_of("mdlm", f"gen.{name}."), loaded.model.config.mask_token_id
    canvas = Canvas.infill(torch.full((case["batch"], case["length"]), mask), mask_id=mask)
    options = {"steps": case["num_steps"], "eps": case["eps"], "generator": seeded(case)}
    steps = list(ddpm_cache(loaded.model.denoiser(), canvas, **options))
    assert len(steps) == case["nfe"] == len(right["evaluated"])
    for step, seen in zip(steps, right["evaluated"], strict=True):
        assert torch.equal(step.before_BS, seen)
    assert torch.equal(steps[-1].ids_BS, right["sequences"])
    # every canvas between the updates is one that a step left behind
    left = [canvas.ids_BS, *(step.ids_BS for step in steps)]
    assert all(any(torch.equal(one, other) for other in left) for one in right["canvas"])


@pytest.mark.parametrize("name", ["first_hitting", "first_hitting_kv", "ddpm_cache", "nucleus"])
def test_golden_bd3lm_sampler(name):
    loaded, case = load(golden_folder("bd3lm")), golden_case("bd3lm", "generate", name)
    right, mask = tensors_of("bd3lm", f"gen.{name}."), loaded.model.config.mask_token_id
    ids = torch.full((1, case["length"]), mask)
    ids[0, 0] = case["bos_token_id"]
    steps = list(
        semi_ar(
            loaded.model.denoiser(),
            Canvas.infill(ids, mask_id=mask),
            block_length=case["block_length"],
            steps=None if case["first_hitting"] else case["num_steps"],
            top_p=case["nucleus_p"],
            generator=seeded(case),
        )
    )
    assert (
        len(steps)
        == case["sampling_steps_reported"]
        == case["forward_calls"] - case["forward_calls_storing_kv"]
    )
    assert torch.equal(steps[-1].ids_BS, right["sequences"])
    changed = [
        row
        for row in range(case["updates"])
        if not torch.equal(right["canvas"][row], right["after"][row])
    ]
    assert len(changed) == len(steps)
    for step, row in zip(steps, changed, strict=True):
        end = int(right["window_end"][row])
        assert torch.equal(step.before_BS[0, :end], right["canvas"][row, :end])
        assert torch.equal(step.ids_BS[0, :end], right["after"][row, :end])
        assert step.block == end // case["block_length"] - 1
        assert torch.equal(step.committed_BS[0], step.before_BS[0] != step.ids_BS[0])


@pytest.mark.parametrize("family", ["mdlm", "bd3lm"])
def test_a_published_dit_becomes_our_own(tmp_path, family):
    loaded = load(golden_folder(family))
    loaded.model.save_pretrained(tmp_path)
    again, ids = load(tmp_path), torch.arange(2, 14)[None]
    assert again.published_family == "sinklab"
    assert (
        again.model.config.block_length
        == loaded.model.config.block_length
        == {"mdlm": None, "bd3lm": 4}[family]
    )
    with torch.inference_mode():
        assert torch.equal(again.model(ids).logits, loaded.model(ids).logits)
