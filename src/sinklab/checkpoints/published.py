"""Published checkpoints: what their ``config.json`` does not say, and what is known before anything is fetched.

Values are None where no source could be checked. The weights' own config always has the last word; this table fills
in what it leaves out, and only where the sizes of the vocabulary agree.
"""

from __future__ import annotations

import difflib
import os
import re
from dataclasses import dataclass
from pathlib import Path

NEWLINE = "\\n"


@dataclass(frozen=True)
class SpecialIds:
    """Ids of special tokens; None where there is none or it is not known."""

    mask: int | None = None
    eos: int | None = None
    eot: int | None = None
    """End of a turn of a chat."""
    pad: int | None = None
    bos: int | None = None
    stop: tuple[int, ...] = ()
    """Every id that ends a text: all eos ids and eot."""


NO_IDS = SpecialIds()


@dataclass(frozen=True)
class Published:
    """One published checkpoint."""

    family: str
    vocabulary: int | None = None
    """Rows of the embedding."""
    special: SpecialIds = NO_IDS
    context: int | None = None
    """Tokens, as its authors state it; its positions may reach further."""
    chat_template: str | None = None
    """Name of the chat format, one of :data:`CHAT_TEMPLATES` or the tokenizer's own (``chatml``, ``llama3``)."""
    logit_shift: bool = False


_LLADA = SpecialIds(mask=126336, eos=126081, pad=126081, bos=126080, eot=126348, stop=(126081, 126348))
# what the authors' sampler names for every LLaDA; bos and end of turn are seen in the tokenizer
_LLADA_PLAIN = SpecialIds(mask=126336, eos=126081, stop=(126081,))
_MMADA = SpecialIds(mask=126336, eos=126081, pad=126081, stop=(126081,))
_DREAM = SpecialIds(mask=151666, eos=151643, pad=151643, stop=(151643,))
_DREAM_CHAT = SpecialIds(mask=151666, eos=151643, pad=151643, eot=151645, stop=(151643, 151645))
_QWEN = SpecialIds(eos=151643, bos=151643, stop=(151643,))
_QWEN_CHAT = SpecialIds(eos=151645, bos=151643, eot=151645, stop=(151645,))
_LLAMA = SpecialIds(eos=128001, bos=128000, stop=(128001,))
_LLAMA_CHAT = SpecialIds(eos=128001, bos=128000, stop=(128001, 128008, 128009))


def _dream(special: SpecialIds = _DREAM, context: int | None = None, template: str | None = None) -> Published:
    return Published("dream", 152064, special, context, template, logit_shift=True)


PUBLISHED: dict[str, Published] = {
    "GSAI-ML/LLaDA-8B-Base": Published("llada", 126464, _LLADA_PLAIN),
    "GSAI-ML/LLaDA-8B-Instruct": Published("llada", 126464, _LLADA, 4096, "llada"),
    "GSAI-ML/LLaDA-1.5": Published("llada", 126464, _LLADA_PLAIN),
    "Gen-Verse/MMaDA-8B-Base": Published("mmada", 134656, _MMADA, None, "mmada"),
    "Gen-Verse/MMaDA-8B-MixCoT": Published("mmada", 134656, _MMADA, None, "mmada"),
    "Dream-org/Dream-v0-Base-7B": _dream(context=2048),
    "Dream-org/Dream-v0-Instruct-7B": _dream(_DREAM_CHAT, 2048, "chatml"),
    "Dream-org/Dream-Coder-v0-Base-7B": _dream(),
    "Dream-org/Dream-Coder-v0-Instruct-7B": _dream(),
    "apple/DiffuCoder-7B-Base": _dream(),
    "apple/DiffuCoder-7B-Instruct": _dream(),
    "apple/DiffuCoder-7B-cpGRPO": _dream(),
    "meta-llama/Llama-3.1-8B": Published("llama", 128256, _LLAMA, 131072),
    "meta-llama/Llama-3.1-8B-Instruct": Published("llama", 128256, _LLAMA_CHAT, 131072, "llama3"),
    "Qwen/Qwen2.5-0.5B": Published("qwen2", 151936, _QWEN, 32768),
    "Qwen/Qwen2.5-0.5B-Instruct": Published("qwen2", 151936, _QWEN_CHAT, 32768, "chatml"),
    "Qwen/Qwen2.5-1.5B-Instruct": Published("qwen2", 151936, _QWEN_CHAT, 32768, "chatml"),
}

END_OF_TURN = {
    "llada": "<|eot_id|>",
    "mmada": "<|eot_id|>",
    "dream": "<|im_end|>",
    "llama": "<|eot_id|>",
    "qwen2": "<|im_end|>",
    "qwen3": "<|im_end|>",
}
"""Family -> the token that ends a turn, where its tokenizer has one."""


def _headers(after: str) -> str:
    """A chat in Llama-3 headers, opened by LLaDA's start token; ``after`` stands between a header and its text."""
    header = "'<|start_header_id|>' + {} + '<|end_header_id|>" + after + "'"
    said = header.format("message['role']") + " + message['content'] + '<|eot_id|>'"
    return (
        "{{ '<|startoftext|>' }}{% for message in messages %}{{ " + said + " }}{% endfor %}"
        "{% if add_generation_prompt %}{{ " + header.format("'assistant'") + " }}{% endif %}"
    )


CHAT_TEMPLATES = {"llada": _headers(2 * NEWLINE), "mmada": _headers(NEWLINE)}
"""Name -> Jinja template, for tokenizers that bring none. MMaDA's code replaces the one its tokenizer brings."""


def find(*names: str | None, vocabulary: int | None = None) -> Published | None:
    """The row for the first of these names that has one, if its vocabulary is of this size.

    Args:
        names: Hub names, e.g. the name asked for and the ``_name_or_path`` of its config.
        vocabulary: rows of the embedding; None does not compare.
    """
    row = next((PUBLISHED[name] for name in names if name in PUBLISHED), None)
    if row is not None and vocabulary is not None and row.vocabulary not in (None, vocabulary):
        return None
    return row


def of_checkpoint(
    name: str, said: object, folder: Path | None, family: str, vocabulary: int
) -> tuple[Published | None, tuple[str, ...]]:
    """The row for a checkpoint, and notes on how it was found.

    Args:
        name: it was asked for by this name.
        said: the ``_name_or_path`` of its config.
        folder: where it lies, if it was asked for as a folder or file; None for a Hub name.
        family: of the checkpoint.
        vocabulary: rows of the embedding.
    """
    row = find(name, said if isinstance(said, str) else None, vocabulary=vocabulary)
    if row is not None or folder is None:
        return row, ()
    return find_by_folder(folder, family, vocabulary)


def find_by_folder(folder: Path, family: str, vocabulary: int) -> tuple[Published | None, tuple[str, ...]]:
    """The row for a folder that is called like a checkpoint, and a note that says so.

    Args:
        folder: ``…/LLaDA-8B-Instruct``, or ``…/models--GSAI-ML--LLaDA-8B-Instruct/snapshots/<commit>``.
        family: of the checkpoint; a row of another family is not meant.
        vocabulary: rows of the embedding; nor is a row of another size.
    """
    # not resolved: the name that a link has is the one that was chosen
    parts = Path(os.path.abspath(folder)).parts
    cached = re.fullmatch(r"models--([^/]+?)--(.+)", parts[-3]) if parts[-2:-1] == ("snapshots",) else None
    if cached:
        meant = [name for name in PUBLISHED if name == "/".join(cached.groups())]
    else:
        meant = [name for name in PUBLISHED if name.partition("/")[2] == parts[-1]]
    if len(meant) != 1 or (PUBLISHED[meant[0]].family, PUBLISHED[meant[0]].vocabulary) != (family, vocabulary):
        return None, ()
    return PUBLISHED[meant[0]], (f"taken for {meant[0]}: matched by folder name, family and vocabulary",)


def nearest(name: str, others: tuple[str, ...] = ()) -> str | None:
    """The known name that looks most like this one."""
    near = difflib.get_close_matches(name, [*others, *PUBLISHED], n=1)
    return near[0] if near else None
