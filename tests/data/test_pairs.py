import gzip
import json

import pytest
import torch

from refusals import refused
from shared_data import shared
from sinklab.lab.data import Pair, pair_rows, read_pairs
from tiny_diffusion import beginning_tokenizer, tiny_tokenizer

LINES = (
    "Tom has 3 pens.  He buys 4. How many?||<<3+4=7>> #### 7\n",
    "A price of $20 doubles twice. What is it?||<<20*2=40>> <<40*2=80>> #### 80\n",
    "How many legs has a dog?|| #### 4\n",
)
PAIRS = (
    Pair("Tom has 3 pens.  He buys 4. How many?", "<<3+4=7>>", "7"),
    Pair("A price of $20 doubles twice. What is it?", "<<20*2=40>> <<40*2=80>>", "80"),
    Pair("How many legs has a dog?", "", "4"),
)


def published_rows(lines, tokenizer, length):
    """The published rows and the lengths of their prompts, written out from the raw lines."""
    rows, prompts = [], []
    for line in lines:
        question, rest = line.split("||")
        thought, answer = rest.split("####")
        pieces = [
            tokenizer(text)["input_ids"] for text in (f"Question: {question}", f"Answer: {thought}")
        ]
        last = [*tokenizer(f"####{answer}")["input_ids"], tokenizer.eos_token_id]
        both = pieces[0] + pieces[1]
        for row, prompt in [(both, len(pieces[0])), (both + last, len(both))]:
            rows.append(row + [tokenizer.eos_token_id] * (length - len(row)))
            prompts.append(prompt)
    return rows, prompts


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.jsonl", "a.jsonl.gz"])
def test_pairs_are_read_from_every_kind_of_file(tmp_path, name):
    text = "".join((LINES[0], "\n", *LINES[1:]))
    if "jsonl" in name:
        objects = [
            {"question": pair.question, "answer": f"{pair.thought}\n#### {pair.answer}"}
            for pair in PAIRS
        ]
        text = "".join(json.dumps(row) + "\n" for row in objects)
    (tmp_path / name).write_bytes(
        gzip.compress(text.encode()) if name.endswith("gz") else text.encode()
    )
    pairs = read_pairs(tmp_path / name)
    assert tuple(pairs) == PAIRS
    assert pairs.skipped == 0


def test_lines_of_another_form_are_left_out_and_counted(tmp_path):
    odd = (
        "a question|| no answer\n",
        "no steps #### 4\n",
        "two||parts||#### 4\n",
        "q||a #### 3 #### 4\n",
        "q|| ####\n",
    )
    (tmp_path / "a.txt").write_text("".join((*LINES, *odd, "||<<1+1=2>> #### 2\n")))
    pairs = read_pairs(str(tmp_path / "a.txt"))
    assert tuple(pairs) == PAIRS
    assert (len(pairs), pairs.skipped) == (3, 6)
    (tmp_path / "b.txt").write_text("".join(odd))
    refused("but none of its 5 lines", read_pairs, tmp_path / "b.txt")


def test_invented_sums_are_pairs_without_a_file():
    pairs = read_pairs("arithmetic")
    assert len(pairs) == 8000
    assert pairs.skipped == 0
    question, thought, answer = pairs[0].texts()
    assert question.startswith("Question: ")
    assert thought.startswith("Answer: <<")
    assert thought.endswith(f"={answer.removeprefix('#### ')}>> ")


def test_files_that_hold_no_pairs_are_refused_by_name(tmp_path):
    (tmp_path / "a.csv").write_text("x")
    for source, fact in [
        (tmp_path / "none.txt", "does not exist"),
        (tmp_path, "is a folder"),
        (tmp_path / "a.csv", ""),
    ]:
        refused(f"'arithmetic', but .*{fact or 'another kind'}", read_pairs, source)
    (tmp_path / "a.jsonl").write_text('{"question": "q", "solution": "s"}\n')
    refused(r"no field 'answer' \(it has", read_pairs, tmp_path / "a.jsonl")


def filled(tokenizer, style):
    """Rows of `PAIRS` as tensors, each of 100 tokens, and how many are too long."""
    made, dropped = pair_rows(PAIRS, tokenizer, 100, style=style)
    return made.ids_RS, made.maskable_RS, made.attention_RS, dropped


@pytest.mark.parametrize("begins", [False, True])
def test_published_rows_are_those_of_the_raw_lines(begins):
    tokenizer = beginning_tokenizer() if begins else tiny_tokenizer()
    ids_RS, maskable_RS, attention_RS, dropped = filled(tokenizer, "published")
    rows, prompts = published_rows(LINES, tokenizer, 100)
    assert ids_RS.dtype == torch.int32
    assert ids_RS.tolist() == rows
    assert attention_RS is None
    assert maskable_RS.tolist() == [[place >= prompt for place in range(100)] for prompt in prompts]
    assert dropped == 0
    if begins:
        assert [row.count(tokenizer.bos_token_id) for row in rows] == [2, 3] * 3


@pytest.mark.parametrize("begins", [False, True])
def test_corrected_rows_have_one_start_and_no_loss_on_padding(begins):
    tokenizer = beginning_tokenizer() if begins else tiny_tokenizer()
    ids_RS, maskable_RS, attention_RS, _ = filled(tokenizer, "corrected")
    assert attention_RS is not None
    for row, (pair, answered) in enumerate(
        [(pair, answered) for pair in PAIRS for answered in (False, True)]
    ):
        question, thought, answer = pair.texts()
        prompt, target = (question + thought, answer) if answered else (question, thought)
        kept = ids_RS[row][attention_RS[row]].tolist()
        length = len(kept)
        assert attention_RS[row].tolist() == [True] * length + [False] * (100 - length)
        assert ids_RS[row, length:].eq(tokenizer.pad_token_id).all()
        assert kept.count(tokenizer.eos_token_id) == 1
        assert kept[-1] == tokenizer.eos_token_id
        assert kept.count(280) == begins
        asked_M = ids_RS[row][maskable_RS[row]].tolist()
        assert kept[length - len(asked_M) :] == asked_M
        assert tokenizer.decode(asked_M[:-1]) == target
        assert tokenizer.decode(kept[begins : length - len(asked_M)]) == prompt


@pytest.mark.parametrize("style", ["published", "corrected"])
def test_pairs_that_are_too_long_are_left_out_whole(style):
    tokenizer = tiny_tokenizer()
    lengths = [len(tokenizer("".join(pair.texts()))["input_ids"]) for pair in PAIRS]
    # all but the longest: its question with steps would fit
    length = max(lengths) + (style == "published")
    whole, _ = pair_rows(PAIRS, tokenizer, 100, style=style)
    rows, dropped = pair_rows(PAIRS, tokenizer, length, style=style)
    assert dropped == 1
    whole_RS = whole.ids_RS
    assert torch.equal(rows.ids_RS, torch.cat([whole_RS[:2], whole_RS[4:]])[:, :length])
    assert pair_rows(PAIRS, tokenizer, length + 1, style=style)[1] == 0
    for size, asked, message in (
        (20, style, f"the longest of 3 has {length + 1}"),
        (100, "correct", "'correct'; did you mean"),
    ):
        refused(message, pair_rows, PAIRS, tokenizer, size, style=asked)


@pytest.mark.slow
def test_real_pairs_give_the_published_rows():
    folder = shared("data/gsm8k_aug")
    assert len(read_pairs(folder / "train_eq_derived.txt.gz")) == 6973
    pairs = read_pairs(folder / "valid.txt")
    assert (len(pairs), pairs.skipped) == (500, 0)
    tokenizer = beginning_tokenizer()
    with open(folder / "valid.txt", encoding="utf-8") as file:
        lines = tuple(file)
    # in characters rather than words a question is long
    rows, dropped = pair_rows(pairs, tokenizer, 1024)
    assert dropped == 0
    assert rows.ids_RS.tolist() == published_rows(lines, tokenizer, 1024)[0]
