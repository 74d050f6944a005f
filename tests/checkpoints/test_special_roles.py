import copy
from dataclasses import replace

import pytest
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from transformers import AddedToken, PreTrainedTokenizerFast

from sinklab.lab.analysis import characters
from sinklab.lab.checkpoints import SpecialIds, load
from sinklab.lab.checkpoints.tokens import ROLES, special_roles, token_text
from tiny_diffusion import tiny_loaded, tiny_tokenizer


def with_specials(*texts):
    tokenizer = copy.deepcopy(tiny_tokenizer())
    tokenizer.add_special_tokens(
        {"additional_special_tokens": [AddedToken(text, special=True) for text in texts]}
    )
    return tokenizer


def test_conventional_texts_have_their_roles():
    tokenizer = with_specials("<|im_start|>", "<|im_end|>", "<|tool|>")
    roles = special_roles(replace(tiny_loaded(), tokenizer=tokenizer))
    named = [
        roles[tokenizer.convert_tokens_to_ids(f"<|{one}|>")]
        for one in ("im_start", "im_end", "tool")
    ]
    assert named == ["template", "eot", "other"]


def test_ids_alone_will_do_and_the_mask_goes_first():
    ids = SpecialIds(mask=9, eos=5, eot=7, pad=5, bos=6, stop=(5, 7, 8))
    loaded = replace(tiny_loaded(mask_token_id=6), tokenizer=None, special=ids)
    assert special_roles(loaded) == {6: "mask", 7: "eot", 5: "eos", 8: "eos"}
    assert set(special_roles(loaded).values()) <= set(ROLES)


def falling_back():
    """As Llama's: a character that is not in the vocabulary is its bytes, by name."""
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "é", "x"]
    model = BPE(
        {name: number for number, name in enumerate(names)},
        [],
        byte_fallback=True,
        unk_token="<unk>",
    )
    plain = Tokenizer(model)
    plain.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="<unk>")


@pytest.mark.parametrize("kind", ["byte-level", "byte fallback"])
def test_a_token_names_its_bytes_where_they_are_no_character(kind):
    tokenizer = load("tiny").needed_tokenizer() if kind == "byte-level" else falling_back()
    text = "xé€\n😀\ufffdx"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    named = [token_text(tokenizer, token_id) for token_id in ids]
    euro = named.index("<0xE2>")
    assert (
        named[euro : euro + 3] == ["<0xE2>", "<0x82>", "<0xAC>"]
        and "\ufffd" not in named
        and "\n" in named
    )
    assert "".join(characters(named)).replace("◌", "") == text == tokenizer.decode(ids)
    assert token_text(None, 7) == "⟨7⟩"
