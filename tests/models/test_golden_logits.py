"""Logits of every published format, through load(), against what the authors' code gives."""

import pytest
import torch

from golden import ASKED, LEFT, golden_cases, golden_model, golden_tensors, tensors_of
from shared_data import shared
from sinklab.core.subject import DiffusionLM
from sinklab.lab.checkpoints import load

TOLERANCE = {"fast_dllm": 1e-3}
FAMILIES = {
    "llada": "llada",
    "fast_dllm": "llada",
    "mmada": "mmada",
    "dream": "dream",
    "smdm_vanilla": "smdm",
    "smdm_sink": "smdm",
    "smdm_gate": "smdm",
}


def cases(family):
    """Name, ids, attention mask, expected logits at comparable positions, and which those are."""
    for case in golden_cases(family)["logits"]:
        found = tensors_of(family, f"logits.{case['name']}.")
        logits = found.get("shifted", found["logits"])
        everywhere = torch.ones(logits.shape[:2], dtype=torch.bool)
        valid = found.get("valid_shifted", found.get("valid", everywhere))
        yield case["name"], found["input_ids"], found.get("attention_mask"), logits, valid


def settings(family):
    return {"rope_dtype": "float32"} if family.startswith("smdm") else {}


@pytest.mark.parametrize("family", FAMILIES)
def test_golden_logits(family):
    loaded = golden_model(family, **settings(family))
    assert (loaded.family, loaded.published_family, loaded.tokenizer) == (
        "diffusion",
        FAMILIES[family],
        None,
    )
    assert {parameter.dtype for parameter in loaded.model.parameters()} == {torch.float32}
    columns = golden_tensors(family).get("columns", slice(None))
    names = set()
    for name, ids, mask, logits, valid in cases(family):
        with torch.inference_mode():
            ours = loaded.model(ids, mask).logits
        ours = ours[..., columns][..., : logits.shape[-1]]
        assert (ours - logits)[valid].abs().max() < TOLERANCE.get(family, 5e-4), name
        names.add(name)
    assert {"batch"} < names
    assert ("leftpad" in names) == (family in ("llada", "mmada", "dream"))


@pytest.mark.parametrize("family", FAMILIES)
def test_golden_special_ids(family):
    loaded, ids = golden_model(family), golden_cases(family)["special_ids"]
    assert (loaded.special.mask, loaded.model.config.mask_token_id) == (ids["mask"], ids["mask"])
    assert (loaded.special.eos, loaded.special.pad) == (ids.get("eos"), ids.get("pad"))
    # the folder names a published model of another vocabulary: its end of turn is not this one's
    assert loaded.special.eot is None
    assert loaded.model.config.logit_shift == (family == "dream")
    if family == "mmada":
        assert (loaded.model.config.text_vocab_size, loaded.model.config.vocab_size) == (240, 304)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_published_model_becomes_our_own(tmp_path, family):
    loaded = golden_model(family)
    loaded.model.save_pretrained(tmp_path)
    again = load(tmp_path)
    assert again.published_family == "sinklab"
    # our own format has no name from the table, hence no end of turn or context that only the table
    # knows
    assert (again.special, again.context) == (loaded.special, loaded.context)
    assert again.model.config.text_vocab_size == loaded.model.config.text_vocab_size
    through_class = DiffusionLM.from_pretrained(tmp_path).eval()
    for _, ids, mask, _, _ in cases(family):
        with torch.inference_mode():
            logits = loaded.model(ids, mask).logits
            assert torch.equal(again.model(ids, mask).logits, logits)
            assert torch.equal(through_class(ids, mask).logits, logits)


def test_every_golden_folder_is_asked_for_or_named_as_left():
    found = shared("golden").glob("*/cases.json")
    assert sorted(file.parent.name for file in found) == sorted(ASKED + LEFT)
