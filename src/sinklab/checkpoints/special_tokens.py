"""What each special token is there for: one role per id, from special ids, tokenizer and chat format."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedTokenizerBase

from sinklab.checkpoints.loading import Loaded

ROLES = ("mask", "bos", "eos", "eot", "pad", "template", "image", "other")
"""Every role a special token may have; a token of text has none."""

# Conventional texts of published tokenizers. They go before the ids: Qwen names <|endoftext|> as bos, eos and padding.
_TEXTS = {
    "<|startoftext|>": "bos",
    "<|beginoftext|>": "bos",
    "<|begin_of_text|>": "bos",
    "<s>": "bos",
    "<|endoftext|>": "eos",
    "<|end_of_text|>": "eos",
    "</s>": "eos",
    "<|eot_id|>": "eot",
    "<|eom_id|>": "eot",
    "<|im_end|>": "eot",
    "<pad>": "pad",
    "[PAD]": "pad",
    "<|pad|>": "pad",
    "<|start_header_id|>": "template",
    "<|end_header_id|>": "template",
    "<|im_start|>": "template",
    "<role>": "template",
    "</role>": "template",
}


def special_roles(loaded: Loaded) -> dict[int, str]:
    """Id -> role, one of :data:`ROLES`, for every special token of a model; ids that are not in it are text.

    ``mask`` goes first; then the conventional texts (``<|endoftext|>`` is eos even where the config names it as padding
    too); then the ids that config, tokenizer and the table of published checkpoints name, eot before eos, bos and pad.
    ``template`` are the other special tokens that the chat format writes, ``image`` the ids from ``text_vocab_size``
    on, ``other`` what the tokenizer holds special beside these.
    """
    special, tokenizer = loaded.special, loaded.tokenizer
    mask = getattr(loaded.model.config, "mask_token_id", None)
    texts = _special_texts(tokenizer)
    named = (
        ("mask", (special.mask if mask is None else mask,)),
        ("eot", (special.eot,)),
        ("eos", (special.eos, *special.stop, getattr(tokenizer, "eos_token_id", None))),
        ("bos", (special.bos, getattr(tokenizer, "bos_token_id", None))),
        ("pad", (special.pad, getattr(tokenizer, "pad_token_id", None))),
    )
    roles: dict[int, str] = {}
    for token_id in named[0][1]:
        if token_id is not None:
            roles[token_id] = "mask"
    for token_id, text in texts.items():
        if text in _TEXTS:
            roles.setdefault(token_id, _TEXTS[text])
    for role, ids in named[1:]:
        for token_id in ids:
            if token_id is not None:
                roles.setdefault(token_id, role)
    for token_id in _template_ids(tokenizer, set(texts)):
        roles.setdefault(token_id, "template")
    for token_id in texts:
        roles.setdefault(token_id, "other")
    config: Any = loaded.model.config
    if (text_size := getattr(config, "text_vocab_size", None)) is not None:
        for token_id in range(text_size, config.vocab_size):
            roles.setdefault(token_id, "image")
    return roles


def _special_texts(tokenizer: PreTrainedTokenizerBase | None) -> dict[int, str]:
    """Id -> text of every token that the tokenizer holds special."""
    if tokenizer is None:
        return {}
    added: dict[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
    found = {token_id: str(token) for token_id, token in added.items() if getattr(token, "special", False)}
    for token_id in tokenizer.all_special_ids:
        found.setdefault(token_id, str(tokenizer.convert_ids_to_tokens(token_id)))
    return found


def _template_ids(tokenizer: PreTrainedTokenizerBase | None, special: set[int]) -> list[int]:
    """The special tokens that the chat format writes around a message."""
    if tokenizer is None or not tokenizer.chat_template:
        return []
    from jinja2 import TemplateError

    try:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": "a"}], tokenize=False, add_generation_prompt=True
        )
    except (TemplateError, TypeError, ValueError):
        # a chat format that cannot be used writes nothing
        return []
    written: Any = tokenizer(text, add_special_tokens=False)["input_ids"]
    return [token_id for token_id in dict.fromkeys(written) if token_id in special]
