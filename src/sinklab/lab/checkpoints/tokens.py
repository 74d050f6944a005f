"""Tokenizers of checkpoints, read as data, and special tokens: their ids and roles."""

import re
from collections.abc import Iterable
from contextlib import suppress
from operator import itemgetter
from pathlib import Path
from typing import Any

import transformers
from transformers import (
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.convert_slow_tokenizer import bytes_to_unicode

from sinklab.core.compat import stated
from sinklab.core.subject.config import DiffusionLMConfig
from sinklab.lab.checkpoints import families
from sinklab.lab.checkpoints.families import (
    NO_IDS,
    CheckpointPlan,
    Family,
    Published,
    SpecialIds,
    known_families,
)
from sinklab.lab.files import read_json, refused

PLAIN = ("TokenizersBackend", "PreTrainedTokenizerFast")
"""Classes that are their ``tokenizer.json`` and nothing besides."""


def read_tokenizer(folder: Path, plan: CheckpointPlan, name: str) -> PreTrainedTokenizerBase | None:
    """The tokenizer of a checkpoint folder, or None if it has no tokenizer files.

    The class follows from family and files, never from code: that of the family, or if the files
    name a class that only code has, its replacement with this backbone (Dream's is Qwen2's, also
    beside a model of another format).

    Args:
        folder: of the checkpoint.
        plan: of the checkpoint.
        name: for messages.

    Raises:
        ValueError: if there are tokenizer files and they cannot be read, or are those of a kind of
            model that is not.
    """
    single = (folder / "tokenizer.json").is_file()
    pair = (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file()
    words = (folder / "vocab.txt").is_file()
    if not (single or pair or words or (folder / "tokenizer.model").is_file()):
        return None
    reader: Any = AutoTokenizer
    settings: dict[str, Any] = {"trust_remote_code": False}
    family = plan.family
    own = family.tokenizer_class
    kind = _named_class(folder / "tokenizer_config.json")
    foreign = kind is not None and not hasattr(transformers, str(kind))
    if foreign and pair:
        own = known_families().get(plan.backbone.model_type, family).foreign_tokenizer_class or own
    if own is None and (foreign or kind in PLAIN):
        # beside a Qwen2 model transformers would put Qwen's own splitting of words in place of the
        # file's
        own = PreTrainedTokenizerFast
    if own is not None and (single or own is not PreTrainedTokenizerFast):
        reader = own
        settings = {}
    fault = f"{name} has a model but no tokenizer that can be read"
    if not (single or pair or words):
        fault += (
            "; it has tokenizer.model only: install sentencepiece, or put a tokenizer.json beside "
            "it (AutoTokenizer's save_pretrained writes one where sentencepiece is installed)"
        )
    with refused(fault):
        tokenizer = reader.from_pretrained(str(folder), **settings)
    if family.unread_token and family.unread_token in tokenizer.get_vocab():
        raise ValueError(
            f"the tokenizer of {name} has {family.unread_token}, so this is no {family.name} that "
            "sinklab reads; load it with the code of its authors"
        )
    # it was read without the code that the files name, and nobody to whom it is given shall be
    # asked to run that
    tokenizer.init_kwargs.pop("auto_map", None)
    if family.chat_template and (family.replaces_chat_template or not tokenizer.chat_template):
        tokenizer.chat_template = family.chat_template
    return tokenizer


def _named_class(settings: Path) -> str | None:
    """The class that a ``tokenizer_config.json`` names; one that only code has is called
    ``code``.
    """
    # if it is absent or no object, the reader will report it
    with suppress(OSError, ValueError, TypeError, AttributeError):
        named = read_json(settings)
        if "auto_map" in named:
            return "code"
        return named.get("tokenizer_class")
    return None


def check_vocabulary(
    tokenizer: PreTrainedTokenizerBase, rows: int, name: str = "the model"
) -> None:
    """Refuse a tokenizer with ids that an embedding of ``rows`` rows does not have; spare rows are
    fine.

    Raises:
        ValueError: naming the largest id.
    """
    token, largest = max(tokenizer.get_vocab().items(), key=itemgetter(1))
    if largest >= rows:
        raise ValueError(
            f"every id of the tokenizer must have a row in the embedding of {name}, but its "
            f"largest id is {largest} ({token!r}) and the embedding has {rows} rows; take the "
            "tokenizer that belongs to the model, or resize the embedding"
        )


_BYTES = {spelt: byte for byte, spelt in bytes_to_unicode().items()}
"""Spellings of the 256 bytes in byte-level BPE."""


def token_text(tokenizer: PreTrainedTokenizerBase | None, token_id: int) -> str:
    """The text of one token; its id if there is no tokenizer.

    Bytes that are no whole character by themselves are named: " <0xE2><0x80>".
    `sinklab.lab.analysis.characters` reads such neighbours as one.
    """
    if tokenizer is None:
        return f"⟨{token_id}⟩"
    text = str(tokenizer.decode([token_id]))
    spelt = str(tokenizer.convert_ids_to_tokens(token_id))
    if "\ufffd" not in text or not set(spelt) <= {*_BYTES}:
        return text
    # a tokenizer that falls back on bytes names them so itself
    if re.fullmatch("<0x[0-9A-F]{2}>", spelt):
        raw = bytes.fromhex(spelt[3:5])
    else:
        raw = bytes(_BYTES[sign] for sign in spelt)
    written = ""
    for sign in raw.decode("utf-8", "surrogateescape"):
        if "\udc80" <= sign <= "\udcff":
            sign = f"<0x{ord(sign) - 0xDC00:02X}>"
        written += sign
    return written


ROLES = ("mask", "bos", "eos", "eot", "pad", "template", "image", "other")
"""Every role a special token may have; a token of text has none."""
_TEXTS: dict[str, list[str]] = families.FORMATS["special_texts"]


def special_ids(
    config: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase | None,
    row: Published | None,
    family: Family,
) -> SpecialIds:
    """Special ids from the model's config, then the tokenizer, then the table of published
    checkpoints.
    """
    known = NO_IDS
    if row is not None:
        known = row.special
    entries: dict[str, int] = {}
    if tokenizer is not None:
        entries = tokenizer.get_vocab()

    def first(role: str, otherwise: int | None, text: str = "") -> Any:
        for source in (config, tokenizer):
            said = stated(source, f"{role}_token_id")
            if said not in (None, []):
                return said
        return entries.get(text, otherwise)

    eot = stated(config, "eot_token_id")
    if eot is None:
        eot = entries.get(family.end_of_turn, known.eot)
    eos_ids = _as_tuple(first("eos", known.eos))
    eos = next(iter(eos_ids), None)
    return SpecialIds(
        mask=first("mask", known.mask, family.mask_token),
        eos=eos,
        eot=eot,
        pad=first("pad", known.pad),
        bos=first("bos", known.bos),
        stop=tuple(dict.fromkeys([*eos_ids, *_as_tuple(eot)])),
    )


def adopt(
    config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase | None, special: SpecialIds
) -> None:
    """Tell a diffusion model's config the facts that tokenizer and table know, so that they survive
    ``save_pretrained``, and a tokenizer its mask and pad token; only if they have none.
    """
    if isinstance(config, DiffusionLMConfig):
        # in our config and not the backbone's, which would freeze the row of its padding
        for name in ("mask", "eos", "eot", "pad", "bos"):
            token_id = getattr(special, name)
            if (
                getattr(config, f"{name}_token_id") is None
                and token_id is not None
                and token_id < config.vocab_size
            ):
                setattr(config, f"{name}_token_id", token_id)
    if tokenizer is None:
        return
    for role in ("mask", "pad"):
        token_id = getattr(special, role)
        if token_id is not None and stated(tokenizer, f"{role}_token") is None:
            # a vocabulary of 150,000 entries takes a tenth of a second
            texts = {number: text for text, number in tokenizer.get_vocab().items()}
            if token_id in texts:
                setattr(tokenizer, f"{role}_token", texts[token_id])


def _as_tuple(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    if isinstance(value, int):
        return (value,)
    return tuple(value)


def special_roles(loaded: Any) -> dict[int, str]:
    """Id -> role, one of :data:`ROLES`, for every special token of a model that
    :func:`sinklab.load` returned; ids that are not in it are text.

    ``mask`` goes first; then the conventional texts (``<|endoftext|>`` is eos even if the config
    names it as padding too); then the ids that config, tokenizer and the table of published
    checkpoints name, eot before eos, bos and pad. ``image`` are the ids from
    ``text_vocab_size`` on, ``other`` the rest of the tokenizer's special tokens.
    """
    special = loaded.special
    tokenizer = loaded.tokenizer
    config: Any = loaded.model.config
    texts = _special_texts(tokenizer)
    first_image = stated(config, "text_vocab_size") or config.vocab_size
    mask = stated(config, "mask_token_id")
    if mask is None:
        mask = special.mask
    found: list[tuple[str, Iterable[int | None]]] = [
        ("mask", [mask]),
        *(
            (role, [number for number, text in texts.items() if text in known])
            for role, known in _TEXTS.items()
        ),
        ("eot", [special.eot]),
        ("eos", [special.eos, *special.stop, stated(tokenizer, "eos_token_id")]),
        ("bos", [special.bos, stated(tokenizer, "bos_token_id")]),
        ("pad", [special.pad, stated(tokenizer, "pad_token_id")]),
        ("other", texts),
        ("image", range(first_image, config.vocab_size)),
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
    added: dict[int, Any] = stated(tokenizer, "added_tokens_decoder", {})
    found = {token_id: str(token) for token_id, token in added.items() if token.special}
    for token_id in tokenizer.all_special_ids:
        found.setdefault(token_id, str(tokenizer.convert_ids_to_tokens(token_id)))
    return found
