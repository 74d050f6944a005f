"""A model goes to others by what transformers has for it: `save_pretrained` and `push_to_hub`,
without a network here.
"""

import pytest
import torch
from transformers import AutoModelForMaskedLM, AutoTokenizer

from sinklab.lab.checkpoints import load
from tiny_diffusion import tiny_model, tiny_tokenizer

IDS = torch.arange(3, 15)[None]
KINDS = {
    "plain": {},
    "token": {"sink": 2},
    "kv": {"sink": 1, "sink_kind": "kv", "gate": "elementwise"},
    "blocks": {"block_length": 4, "attention": "full"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_save_pretrained_writes_is_read_by_sinklab_and_by_transformers(tmp_path, kind):
    model = tiny_model(**KINDS[kind])
    model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    ours, theirs = load(tmp_path), AutoModelForMaskedLM.from_pretrained(tmp_path)
    assert {file.suffix for file in tmp_path.iterdir()} == {".json", ".safetensors"}
    how = {"max_new_tokens": 8, "steps": 4}
    with torch.inference_mode():
        right, written = model(IDS).logits, model.generate(IDS, **how)
        for one in (ours.model, theirs.eval()):
            assert torch.equal(one(IDS).logits, right)
            assert torch.equal(one.generate(IDS, **how), written)
    text = "The old man"
    assert ours.needed_tokenizer()(text).input_ids == tiny_tokenizer()(text).input_ids
    assert (
        AutoTokenizer.from_pretrained(tmp_path)(text).input_ids == tiny_tokenizer()(text).input_ids
    )
