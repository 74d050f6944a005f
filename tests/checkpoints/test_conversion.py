from pathlib import Path

import pytest
import torch
from causal_toys import save_causal
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from refusals import refused
from sinklab.core.subject import DiffusionLM
from sinklab.lab.checkpoints import from_causal, load
from tiny_diffusion import save_tiny

WORDS = 40
IDS = torch.randint(0, WORDS, (2, 9), generator=torch.Generator().manual_seed(0))


def words(entries=WORDS, **special):
    """A tokenizer of whole words w0, w1, … without a mask token."""
    tokenizer = Tokenizer(
        WordLevel({f"w{number}": number for number in range(entries)}, unk_token="w0")
    )
    tokenizer.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="w1", **special)


def save_words(folder, family="llama", *, rows=WORDS + 3, tokenizer=None, **fields):
    """A causal model of whole words, whose embedding has spare rows."""
    return save_causal(folder, family, tokenizer=tokenizer or words(), vocab_size=rows, **fields)


@pytest.mark.parametrize(
    "family, tied, mask_token",
    [
        ("llama", True, None),
        ("qwen2", True, 5),
        ("qwen3", False, None),
    ],
)
def test_the_causal_model_is_reproduced_exactly(tmp_path, family, tied, mask_token):
    causal = save_words(tmp_path, family, tie_word_embeddings=tied)
    loaded = from_causal(tmp_path, mask_token_id=mask_token)
    assert (loaded.family, loaded.published_family) == ("diffusion", family)
    # its [MASK] is named once, and nothing says that it has none
    assert sum("[MASK]" in note for note in loaded.notes) == 1
    with torch.inference_mode():
        theirs = causal(IDS).logits
        ours = loaded.model(IDS, causal=True).logits
        assert not torch.equal(loaded.model(IDS).logits[..., : WORDS + 3], theirs)
    assert theirs.std() > 0.1
    assert torch.equal(ours[..., : WORDS + 3], theirs)
    assert (loaded.model.lm_head.weight is loaded.model.model.embed_tokens.weight) == tied


def test_the_shift_puts_the_causal_prediction_at_the_token_it_predicts(tmp_path):
    causal = save_words(tmp_path, "qwen3")
    model = from_causal(tmp_path, logit_shift=True).model
    with torch.inference_mode():
        assert torch.equal(model(IDS, causal=True).logits[:, 1:], causal(IDS).logits[:, :-1])


@pytest.mark.parametrize("family, tied, spare", [("llama", True, 1), ("qwen2", True, 0)])
def test_a_converted_model_is_saved_and_loaded(tmp_path, family, tied, spare):
    save_words(tmp_path / "causal", family, tie_word_embeddings=tied, rows=WORDS + spare)
    settings = {
        "sink_kind": "token",
        "sink_count": 2,
        "gate": "elementwise",
        "gate_bias": 4,
        "logit_shift": True,
    }
    first = from_causal("causal", **settings)
    first.model.save_pretrained("dlm")
    first.tokenizer.save_pretrained("dlm")
    second = load("dlm")
    for loaded in (first, second):
        config = loaded.model.config
        assert {name: getattr(config, name) for name in settings} == settings
        assert config.vocab_size == config.backbone.vocab_size == WORDS + 1
        assert (
            loaded.special.mask == config.mask_token_id == loaded.tokenizer.mask_token_id == WORDS
        )
        assert loaded.tokenizer("w3 <|mask|> w4").input_ids == [3, WORDS, 4]
    assert isinstance(second.model, DiffusionLM)
    with torch.inference_mode():
        assert torch.equal(first.model(IDS).logits, second.model(IDS).logits)
    written = second.model.generate(IDS[:, :3], max_new_tokens=4)
    assert not (written == WORDS).any()


def test_where_mask_comes_from():
    save_words("spare")
    save_words("full", rows=WORDS)
    save_words("own", rows=WORDS, tokenizer=words(mask_token="w7"))
    save_words("named", tokenizer=words())
    named = words()
    named.add_tokens(["<|mask|>"], special_tokens=True)
    named.add_tokens(["w99"])
    named.save_pretrained("named")
    for folder, mask_token, expected, rows, note in [
        (
            "spare",
            None,
            (WORDS, "<|mask|>"),
            WORDS + 3,
            "<|mask|>, a row that the tokenizer did not use",
        ),
        (
            "full",
            None,
            (WORDS, "<|mask|>"),
            WORDS + 1,
            "<|mask|>, a new row, the mean of the others",
        ),
        ("own", None, (7, "w7"), WORDS, "w7, its own"),
        ("named", None, (WORDS, "<|mask|>"), WORDS + 3, "<|mask|>, its own"),
        ("full", 9, (9, "w9"), WORDS, "w9, as requested"),
        ("spare", WORDS + 2, (WORDS + 2, "<|mask|>"), WORDS + 3, "<|mask|>, as requested"),
    ]:
        loaded = from_causal(folder, mask_token_id=mask_token)
        assert (loaded.tokenizer.mask_token_id, loaded.tokenizer.mask_token) == expected
        assert loaded.model.config.mask_token_id == loaded.special.mask == expected[0]
        assert loaded.model.config.vocab_size == rows
        assert loaded.notes[-1] == f"[MASK] is id {expected[0]}: {note}"


def test_without_a_tokenizer_a_row_is_added_or_named(tmp_path):
    save_words(tmp_path)
    for file in tmp_path.glob("tokenizer*"):
        file.unlink()
    assert from_causal(tmp_path).model.config.mask_token_id == WORDS + 3
    loaded = from_causal(tmp_path, mask_token_id=4)
    assert (loaded.tokenizer, loaded.special.mask, loaded.notes[-1]) == (
        None,
        4,
        "[MASK] is id 4: as requested",
    )


@pytest.mark.parametrize(
    "settings, message",
    [
        (
            {"mask_token_id": WORDS},
            rf"mask_token_id must be a row .*\(0…{WORDS - 1}\), but is {WORDS}; leave",
        ),
        ({"mask_token_id": 2}, "must be an id that text does not use, but 2 ends it"),
        ({"sink_kind": "token"}, "sink_kind and sink_count must agree"),
    ],
)
def test_what_makes_no_sense_is_refused(tmp_path, settings, message):
    save_words(tmp_path, rows=WORDS)
    refused(message, from_causal, tmp_path, **settings)


def test_a_diffusion_model_is_no_start(tmp_path):
    save_tiny(tmp_path)
    Path("model.safetensors").unlink()
    refused(r"model \(llama, qwen2, qwen3", from_causal, tmp_path)
