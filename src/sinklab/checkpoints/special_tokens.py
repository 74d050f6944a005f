"""Special tokens: their ids, and what each is there for, from config, tokenizer, chat format and what is published."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from sinklab.checkpoints.families import NO_IDS, Family, Published, SpecialIds
from sinklab.models.config import DiffusionLMConfig

ROLES = ("mask", "bos", "eos", "eot", "pad", "template", "image", "other")
"""Every role a special token may have; a token of text has none."""

# Conventional texts of published tokenizers. They go before the ids: Qwen names <|endoftext|> as bos, eos and padding.
_TEXTS = {
    "bos": ("<|startoftext|>", "<|beginoftext|>", "<|begin_of_text|>", "<s>"),
    "eos": ("<|endoftext|>", "<|end_of_text|>", "</s>"),
    "eot": ("<|eot_id|>", "<|eom_id|>", "<|im_end|>"),
    "pad": ("<pad>", "[PAD]", "<|pad|>"),
    "template": ("<|start_header_id|>", "<|end_header_id|>", "<|im_start|>", "<role>", "</role>"),
}


def special_ids(
    config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase | None, row: Published | None, family: Family
) -> SpecialIds:
    """Special ids from the model's config, then the tokenizer, then the table of published checkpoints."""
    known = row.special if row else NO_IDS
    listed = _as_tuple(getattr(config, "eos_token_id", None)) or _as_tuple(getattr(tokenizer, "eos_token_id", None))
    eos = listed or _as_tuple(known.eos)
    eot = getattr(config, "eot_token_id", None)
    if eot is None and tokenizer is not None:
        eot = tokenizer.get_vocab().get(family.end_of_turn)
    eot = known.eot if eot is None else eot

    def first(name: str, fallback: int | None) -> int | None:
        for source in (config, tokenizer):
            if (value := getattr(source, name, None)) is not None:
                return value
        return fallback

    return SpecialIds(
        mask=first("mask_token_id", known.mask),
        eos=eos[0] if eos else None,
        eot=eot,
        pad=first("pad_token_id", known.pad),
        bos=first("bos_token_id", known.bos),
        stop=tuple(dict.fromkeys([*eos, *_as_tuple(eot)])),
    )


def adopt(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase | None, special: SpecialIds) -> None:
    """Tell a diffusion model's config what tokenizer and table know, so that it survives ``save_pretrained``, and a
    tokenizer its mask and pad token; only where they have none.
    """
    if isinstance(config, DiffusionLMConfig):
        # in our config and not the backbone's, which would freeze the row of its padding
        for name in ("mask", "eos", "eot", "pad", "bos"):
            token_id = getattr(special, name)
            if getattr(config, f"{name}_token_id") is None and token_id is not None and token_id < config.vocab_size:
                setattr(config, f"{name}_token_id", token_id)
    if tokenizer is None:
        return
    for name, token_id in (("mask_token", special.mask), ("pad_token", special.pad)):
        if getattr(tokenizer, name) is None and token_id is not None and token_id < len(tokenizer):
            setattr(tokenizer, name, tokenizer.convert_ids_to_tokens(token_id))


def _as_tuple(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def special_roles(loaded: Any) -> dict[int, str]:
    """Id -> role, one of :data:`ROLES`, for every special token of what :func:`sinklab.load` returned; ids that are not
    in it are text.

    ``mask`` goes first; then the conventional texts (``<|endoftext|>`` is eos even where the config names it as padding
    too); then the ids that config, tokenizer and the table of published checkpoints name, eot before eos, bos and pad.
    ``template`` are the other special tokens that the chat format writes, ``image`` the ids from ``text_vocab_size``
    on, ``other`` what the tokenizer holds special beside these.
    """
    special, tokenizer = loaded.special, loaded.tokenizer
    config: Any = loaded.model.config
    mask = getattr(config, "mask_token_id", None)
    texts = _special_texts(tokenizer)
    found: list[tuple[str, Iterable[int | None]]] = [
        ("mask", [special.mask if mask is None else mask]),
        *((role, [number for number, text in texts.items() if text in known]) for role, known in _TEXTS.items()),
        ("eot", [special.eot]),
        ("eos", [special.eos, *special.stop, getattr(tokenizer, "eos_token_id", None)]),
        ("bos", [special.bos, getattr(tokenizer, "bos_token_id", None)]),
        ("pad", [special.pad, getattr(tokenizer, "pad_token_id", None)]),
        ("template", _template_ids(tokenizer, set(texts))),
        ("other", texts),
        ("image", range(getattr(config, "text_vocab_size", None) or config.vocab_size, config.vocab_size)),
    ]
    roles: dict[int, str] = {}
    for role, ids in found:
        for token_id in ids:
            if token_id is not None:
                roles.setdefault(token_id, role)
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
