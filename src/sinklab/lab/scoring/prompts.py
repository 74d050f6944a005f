"""Prompts: as text or token ids, from files, in a chat format."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sinklab.core.compat import stated
from sinklab.lab.data import row_start
from sinklab.lab.data.corpora import placed_lines
from sinklab.lab.files import from_json, refused

if TYPE_CHECKING:
    from sinklab.lab.checkpoints import Loaded


FIELDS = ("prompt", "question", "text", "instruction", "input")
"""Fields of a row that may hold a prompt; the first present is used."""


@dataclass(frozen=True)
class Prompt:
    """A prompt as a model reads it."""

    text: str
    """The text as it was given."""
    ids: tuple[int, ...]
    template: tuple[bool, ...]
    """True at tokens that the chat format put around the text."""


def encode(loaded: Loaded, text: str, chat: bool = False) -> Prompt:
    """The ids of a prompt; for a checkpoint without tokenizer files a prompt is token ids such as
    "5 17 3".

    Raises:
        ValueError: for anything but text, or but ids if ids are needed, and for a chat format that
            is absent or cannot be used.
    """
    if not isinstance(text, str):
        raise ValueError(f"a prompt is text, got {text!r}; generate and loss take token ids too")
    with refused("a prompt is text in UTF-8", UnicodeError):
        text.encode()
    opening = stated(loaded.config, "opening_ids", ())
    if chat and loaded.tokenizer is not None:
        rendered, start, stop = _in_chat(loaded, text)
        offsets = bool(loaded.tokenizer.is_fast)
        tokens = loaded.tokenizer(
            rendered, add_special_tokens=False, return_offsets_mapping=offsets
        )
        # a token that reaches into the text belongs to the text; without offsets only special
        # tokens are told apart, by their role
        spans = tokens.get("offset_mapping", [(start, stop)] * len(tokens["input_ids"]))
        template = (offsets and not (first < stop and start < last) for first, last in spans)
        return Prompt(text, tuple(tokens["input_ids"]), tuple(template))
    if loaded.tokenizer is None:
        if chat:
            loaded.needed_tokenizer()
        with refused(
            f"{loaded.name} has no tokenizer files, so a prompt is token ids such as '5 17 3', but "
            f"is {text!r}"
        ):
            ids = tuple(int(part) for part in text.replace(",", " ").split())
        rows = loaded.config.get_text_config().vocab_size
        wrong = [number for number in ids if not 0 <= number < rows]
        if wrong:
            raise ValueError(
                f"token ids of {loaded.name} are 0 to {rows - 1}, but the prompt holds {wrong[0]}"
            )
        if ids[: len(opening)] != opening:
            ids = (*opening, *ids)
    elif opening:
        # of [CLS] … [SEP] the first alone: the written text comes between
        ids = (*opening, *loaded.tokenizer(text, add_special_tokens=False)["input_ids"])
    else:
        # a text begins as the tokenizer says if the model was trained so; an autoregressive
        # model has its sink there
        begins = not loaded.is_diffusion or bool(row_start(loaded.tokenizer))
        ids = tuple(loaded.tokenizer(text, add_special_tokens=begins)["input_ids"])
    return Prompt(text, ids, (False,) * len(ids))


def ids_to_score(loaded: Loaded, text: str | Sequence[int]) -> list[int]:
    """Ids of a text as the tokenizer reads it alone; ids as they are.

    Raises ValueError for what is no text and no token ids, and for a text that is not token ids, of
    a checkpoint without tokenizer files.
    """
    if not isinstance(text, str):
        try:
            return [_whole(one) for one in text]
        except TypeError as error:
            raise ValueError(f"a text is a string or a list of token ids, but {error}") from error
    if loaded.tokenizer is None:
        return list(encode(loaded, text).ids)
    return list(loaded.tokenizer(text)["input_ids"])


def _whole(number: Any) -> int:
    if isinstance(number, bool):
        raise TypeError(f"{number} is no whole number")
    return operator.index(number)


def read_prompts(path: str | Path, samples: int | None = None) -> tuple[str, ...]:
    """The prompts of a file: .txt (one a line) or .jsonl (a string or an object a line), also .gz
    or .bz2.

    Objects hold their prompt in the field prompt, question, text, instruction or input, the first
    that is there.

    Args:
        path: the file.
        samples: take this many, the first ones; None takes all.

    Raises:
        ValueError: for a file that is absent, of another kind or not as its name says, and when it
            holds too few.
    """
    source = Path(path)
    kinds = {".txt", ".jsonl"} & {*source.suffixes}
    if not kinds or not source.is_file():
        raise ValueError(
            f"prompts are read from a .txt or .jsonl file, but {source} is none or does not exist"
        )
    if samples is not None and samples < 1:
        raise ValueError(f"samples counts prompts, at least 1, but is {samples}")
    found = []
    for line, where in islice(placed_lines(source), samples):
        row = line.removesuffix("\n")
        if ".jsonl" in kinds:
            with refused(f"{where} is no JSON"):
                row = from_json(line)
        found.append(_prompt_of(row, where))
    if not found or len(found) < (samples or 0):
        raise ValueError(
            f"{source} holds {len(found)} prompts, but {samples or 'at least 1'} are needed"
        )
    return tuple(found)


def _prompt_of(row: Any, where: str) -> str:
    if isinstance(row, dict):
        named = [name for name in FIELDS if name in row]
        if not named:
            raise ValueError(
                f"{where}: no field {', '.join(FIELDS[:-1])} or {FIELDS[-1]} (it has "
                f"{', '.join(map(str, row))})"
            )
        row = row[named[0]]
    if not isinstance(row, str):
        raise ValueError(f"{where}: a prompt is text, but this one is a {type(row).__name__}")
    return row


def _in_chat(loaded: Loaded, prompt: str) -> tuple[str, int, int]:
    """The prompt in the chat format, and the beginning and end of its own text in that."""
    # a stand-in that no template changes shows the place of the text, even if the template trims it
    stand_in = "\ue000"
    text, around = (
        in_chat(loaded, [{"role": "user", "content": each}]) for each in (prompt, stand_in)
    )
    before, found, after = around.partition(stand_in)
    if not found or not text.startswith(before) or not text.endswith(after):
        return text, 0, 0
    return text, len(before), len(text) - len(after)


def in_chat(loaded: Loaded, messages: list[dict[str, str]], *, answered: bool = True) -> str:
    """Messages in the model's chat format; `answered`: the next one is the model's, else the last
    goes on.

    Raises:
        ValueError: for a chat format that is absent or cannot be used.
    """
    tokenizer = loaded.needed_tokenizer()
    if tokenizer.chat_template is None:
        raise ValueError(
            f"{loaded.name} has no known chat format; leave out --chat, or give it one: a "
            "chat_template.jinja beside its tokenizer.json, or tokenizer.chat_template"
        )
    with refused(f"the chat format of {loaded.name} cannot be used (leave out --chat)"):
        return str(
            tokenizer.apply_chat_template(
                messages,
                tokenize=False,
                add_generation_prompt=answered,
                continue_final_message=not answered,
            )
        )
