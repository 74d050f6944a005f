"""Questions with steps and answers (GSM8K-Aug): noise and loss fall on the answered
pieces alone.
"""

# R rows, S sequence
from __future__ import annotations

import random
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from sinklab.core.errors import one_of
from sinklab.lab.data.corpora import json_object, placed_lines, text_of
from sinklab.lab.data.rows import Rows, check_packing, encode_texts

ARITHMETIC = "arithmetic"
_NAMES = ("Ann", "Ben", "Cleo", "Dan", "Eve", "Finn", "Gus", "Hana")
_THINGS = ("apples", "books", "coins", "cards", "pens", "shells", "stamps", "tickets")


def _sums() -> Iterator[Pair]:
    """8,000 invented sums of one to three steps; no two questions are the same."""
    source = random.Random(0)
    seen = set[str]()
    while len(seen) < 8000:
        pair = _sum(source)
        if pair.question not in seen:
            seen.add(pair.question)
            yield pair


def _sum(source: random.Random) -> Pair:
    name = source.choice(_NAMES)
    things = source.choice(_THINGS)
    total = source.randint(2, 60)
    sentences = [f"{name} has {total} {things}."]
    steps = []
    for _ in range(source.randint(1, 3)):
        kind = source.choice(("gets", "gives", "times"))
        if kind == "times" and total <= 100:
            factor = source.randint(2, 4)
            sentences.append(f"Then {name} has {factor} times as many.")
            step = f"{total}*{factor}"
            total *= factor
        elif kind == "gives" and total > 1:
            less = source.randint(1, min(total - 1, 40))
            sentences.append(f"{name} gives away {less}.")
            step = f"{total}-{less}"
            total -= less
        else:
            more = source.randint(1, 40)
            sentences.append(f"{name} gets {more} more.")
            step = f"{total}+{more}"
            total += more
        steps.append(f"<<{step}={total}>>")
    return Pair(
        f"{' '.join(sentences)} How many {things} does {name} have?", " ".join(steps), str(total)
    )


STYLES = ("published", "corrected", "completion")
_SUFFIXES = (".txt", ".txt.gz", ".jsonl", ".jsonl.gz")
ANSWER = 18
"""Tokens behind the question in a completion."""
_BATCH = 1024
_Examples = list[tuple[list[int], list[int]]]
"""Prompt and target of the rows of one pair, token ids."""


@dataclass(frozen=True)
class Pair:
    """A question, the steps to its answer (maybe none), and the answer."""

    question: str
    thought: str
    answer: str

    def texts(self) -> tuple[str, str, str]:
        """The three pieces as the model reads them, the answer without the text after it."""
        return f"Question: {self.question}", f"Answer: {self.thought} ", f"#### {self.answer}"


class Pairs(list[Pair]):
    """The pairs of a file."""

    skipped = 0
    """Lines that are no ``question||steps #### answer``; the published code leaves them out too."""


def read_pairs(source: str | Path) -> Pairs:
    """Read questions with steps and answers.

    Args:
        source: a file of lines ``question||<<3+4=7>> <<7*2=14>> #### 14`` (.txt), or of JSON
            objects with the fields ``question`` and ``answer``, steps and answer divided by
            ``####`` (.jsonl), each also .gz; or, present on every machine, ``"arithmetic"``:
            invented sums.

    Raises:
        ValueError: if there is no such file, it cannot be read, or no line is a pair.
    """
    if str(source) == ARITHMETIC:
        return Pairs(_sums())
    path = Path(source)
    if not path.is_file() or not path.name.endswith(_SUFFIXES):
        fact = "does not exist"
        if path.is_dir():
            fact = "is a folder"
        elif path.is_file():
            fact = "is of another kind"
        raise ValueError(
            f"questions and answers are read from one file ({', '.join(_SUFFIXES)}) or are "
            f"{ARITHMETIC!r}, but {source} {fact}"
        )
    return _pairs_of(path)


def _pairs_of(path: Path) -> Pairs:
    pairs = Pairs()
    for line, where in placed_lines(path):
        fields = line.split("||")
        if ".jsonl" in path.name:
            row = json_object(line, where)
            fields = [text_of(row, name, where) for name in ("question", "answer")]
        parts = [part.strip() for part in (*fields[:1], *"".join(fields[1:]).split("####"))]
        if len(fields) == 2 and len(parts) == 3 and parts[0] and parts[2]:
            pairs.append(Pair(*parts))
        else:
            pairs.skipped += 1
    if not pairs:
        raise ValueError(
            f"{path} must hold lines such as 'question||<<3+4=7>> #### 7', but none of its "
            f"{pairs.skipped} lines is one"
        )
    return pairs


def pair_rows(
    pairs: Iterable[Pair],
    tokenizer: PreTrainedTokenizerBase,
    length: int,
    *,
    style: str = "published",
) -> tuple[Rows, int]:
    """Two rows of each pair in turn: question → steps, question with steps → answer; or one of
    both, as a completion.

    ``published`` follows the authors' code: the three pieces are encoded apart, each with a start
    token if the tokenizer puts one, so that start tokens stand inside rows; the answer keeps its
    newline and has an end token; rows are filled with end tokens, which are attended to and have
    noise and loss. ``corrected`` has one start token, an end token with loss after the steps and
    after the answer, and padding without attention, noise and loss. ``completion`` is one row a
    pair: the question as it stands, then steps and answer filled with end tokens to
    `ANSWER` (noise and loss fall on these), then padding without attention: the look of a
    canvas of as many new tokens when it is decoded.

    Args:
        pairs: as from :func:`read_pairs`.
        tokenizer: must have an ``eos_token``; its ``pad_token`` fills corrected rows, else the
            ``eos_token``.
        length: tokens a row, S. A pair with a longer row that does not fit is left out with both
            rows.
        style: ``published``, ``corrected`` or ``completion``.

    Returns:
        the rows, and how many pairs were left out.

    Raises:
        ValueError: for an unknown style, a tokenizer without end token, or if no pair fits.
    """
    check_packing(tokenizer, length)
    one_of("style", style, STYLES)
    completed = style == "completion"
    padded = style != "published"
    given = list(pairs)
    if completed:
        made = _completions(given, tokenizer)
    else:
        made = _examples(given, tokenizer, padded)
    pad = tokenizer.eos_token_id
    if padded and tokenizer.pad_token_id is not None:
        pad = tokenizer.pad_token_id
    rows: list[array[int]] = []
    prompts = []
    dropped = longest = 0
    for examples in made:
        most = max(len(prompt) + len(target) for prompt, target in examples)
        longest = max(longest, most)
        # an answer without room for its end token is too long as well
        if most > length or (completed and len(examples[0][1]) > ANSWER):
            dropped += 1
            continue
        for prompt, target in examples:
            rows.append(array("i", prompt + target))
            prompts.append(len(prompt))
    if not rows:
        room = f"a row of {length} tokens"
        if completed:
            room += f", {ANSWER} of them for the answer"
        raise ValueError(
            f"no question with its answer fits {room}: the longest of {len(given)} has {longest}; "
            "use a longer length"
        )
    ids_RS = torch.full((len(rows), length), pad, dtype=torch.int32)
    attention_RS = torch.zeros(ids_RS.shape, dtype=torch.bool)
    for row, ids in enumerate(rows):
        ids_RS[row, : len(ids)] = torch.tensor(ids)
        attention_RS[row, : len(ids)] = True
    maskable_RS = torch.arange(length) >= torch.tensor(prompts)[:, None]
    if not padded:
        return Rows(ids_RS, maskable_RS=maskable_RS), dropped
    return Rows(ids_RS, maskable_RS=maskable_RS & attention_RS, attention_RS=attention_RS), dropped


def _examples(
    pairs: list[Pair], tokenizer: PreTrainedTokenizerBase, corrected: bool
) -> Iterator[_Examples]:
    """Prompt and target of the two examples of each pair."""
    begin = _begin(tokenizer)
    end = [int(tokenizer.eos_token_id)]
    # the published rows are filled with end tokens: the one after the steps is the first of them
    inner, tail, steps_end = begin, "\n", list[int]()
    if corrected:
        inner, tail, steps_end = [], "", end
    for start in range(0, len(pairs), _BATCH):
        questions, thoughts, answers = zip(
            *(pair.texts() for pair in pairs[start : start + _BATCH]), strict=True
        )
        columns = (list(questions), list(thoughts), [answer + tail for answer in answers])
        for question, thought, answer in zip(
            *(encode_texts(texts, tokenizer) for texts in columns), strict=True
        ):
            prompt = begin + question
            steps = inner + thought
            yield [(prompt, steps + steps_end), (prompt + steps, inner + answer + end)]


def _completions(pairs: list[Pair], tokenizer: PreTrainedTokenizerBase) -> Iterator[_Examples]:
    """Question, and steps with answer filled up with end tokens; one token longer than the room if
    too long.
    """
    begin = _begin(tokenizer)
    end = [int(tokenizer.eos_token_id)]
    for pair in pairs:
        answer = " ".join(filter(None, (pair.thought, pair.answer)))
        question, target = encode_texts([pair.question, answer], tokenizer)
        yield [(begin + question, target + end * max(1, ANSWER - len(target)))]


def _begin(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The start token, if the tokenizer puts one before a text."""
    ids: Any = tokenizer("a")["input_ids"]
    if tokenizer.bos_token_id is None or ids[0] != tokenizer.bos_token_id:
        return []
    return ids[:1]
