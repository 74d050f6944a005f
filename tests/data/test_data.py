import gzip
import json

import pytest
import torch

from refusals import refused
from sinklab.lab.checkpoints import check_vocabulary
from sinklab.lab.data import SPECIAL_TOKENS, pack, read_corpus, train_tokenizer
from tiny_diffusion import TEXT, tiny_tokenizer


def jsonl(*texts, field="text"):
    return "".join(json.dumps({"id": 1, field: text}) + "\n\n" for text in texts).encode()


CONTENTS = {
    "a.txt": "plain é".encode(),
    "b.md": b"# mark\r\ndown",
    "c.jsonl": jsonl("one", "two"),
    "d.jsonl.gz": gzip.compress(jsonl("three", "four")),
    "e.txt.gz": gzip.compress(b"packed"),
    "f.md.gz": gzip.compress(b"packed notes"),
    "sub/f.txt": b"below",
    "blank.txt": b" \n",
    "bom.txt": b"\xef\xbb\xbfmarked",
    "ignored.csv": b"x,y",
}
TEXTS = [
    "plain é",
    "# mark\ndown",
    "marked",
    "one",
    "two",
    "three",
    "four",
    "packed",
    "packed notes",
    "below",
]


def write(folder, contents):
    for name, content in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def test_a_folder_of_every_kind_is_read_in_a_fixed_order(tmp_path):
    write(tmp_path, CONTENTS)
    assert list(read_corpus(tmp_path)) == TEXTS
    assert list(read_corpus(str(tmp_path / "d.jsonl.gz"))) == ["three", "four"]


@pytest.mark.parametrize(
    "contents, message",
    [
        (
            {"a.jsonl": jsonl("x", field="body")},
            r"a.jsonl, line 1: no field 'text' \(it has id, body\)",
        ),
        (
            {"a.jsonl": b'{"text": "x"}\n[1]\n'},
            "a.jsonl, line 2: each line must be one JSON object.* a list",
        ),
        ({"a.jsonl": b'{"text": "x"}\n{"text": \n'}, "a.jsonl, line 2: .*: Expecting value"),
        (
            {"a.jsonl": b'{"text": null}\n'},
            "a.jsonl, line 1: field 'text' must be text, but is a NoneType",
        ),
        ({"a.txt": b"caf\xe9"}, "a.txt cannot be read as UTF-8 text: .*utf-8"),
        ({"a.txt.gz": gzip.compress(b"x" * 1000)[:-12]}, "a.txt.gz cannot be read"),
        ({"a.txt.gz": gzip.compress(b"abcdef")[:10] + b"\xff" * 20}, "a.txt.gz cannot be read"),
        ({"a.txt": b"\n \n"}, "holds no text; training needs at least one document"),
        ({"a.csv": b"x"}, r"no file of a known kind \(.txt, .md"),
        ({}, "no file of a known kind"),
    ],
)
def test_a_corpus_that_cannot_be_used_is_refused_by_name(tmp_path, contents, message):
    refused(message, list, read_corpus(write(tmp_path, contents)))
    refused("a corpus is needed", list, read_corpus(""))


def test_a_tokenizer_loses_nothing(tmp_path):
    tokenizer = tiny_tokenizer()
    text = "Zwölf Boxkämpfer\n\n\tjagen  ‘Viktor’ über 大 🙂 . , ! 's\x00"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert len(tokenizer(TEXT)["input_ids"]) < len(TEXT.encode())
    tokenizer.save_pretrained(tmp_path)
    again = type(tokenizer).from_pretrained(tmp_path)
    assert again(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert (again.pad_token, again.eos_token, again.mask_token) == SPECIAL_TOKENS


def test_special_tokens_come_first_and_are_one_token_each():
    tokenizer = tiny_tokenizer()
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.mask_token_id) == (0, 1, 2)
    assert tokenizer("a<|mask|>")["input_ids"][-1] == 2
    assert len(tokenizer) == 280
    assert tokenizer.decode([0, 1, 2], skip_special_tokens=True) == ""


def test_a_vocabulary_must_hold_the_bytes():
    refused(r"least 259 \(256 bytes and 3", train_tokenizer, [TEXT], 258)
    assert len(train_tokenizer([TEXT], 259)) == 259


def test_packing_puts_an_end_after_each_document_and_loses_the_tail_alone():
    tokenizer = tiny_tokenizer()
    stream, spelt = [], "In HTML, <|mask|> is nothing."
    for text in (TEXT, "The sea.", TEXT[:50]):
        stream += [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
    rows = pack([TEXT, "The sea.", TEXT[:50]], tokenizer, 16)
    assert rows.dtype == torch.int32
    assert rows.shape == (len(stream) // 16, 16)
    assert rows.flatten().tolist() == stream[: rows.numel()]
    assert len(stream) - rows.numel() < 16
    assert len(stream) % 16, "the case needs a tail"
    rows = pack([spelt], tokenizer, 4)
    assert tokenizer.mask_token_id not in rows
    assert spelt.startswith(tokenizer.decode(rows.flatten().tolist()))


def test_packing_refuses_what_does_not_fit():
    endless = train_tokenizer([TEXT], 260)
    endless.eos_token = None
    for texts, tokenizer, length, message in (
        ([TEXT], tiny_tokenizer(), 1, "2 tokens, but length is 1"),
        ([TEXT], tiny_tokenizer(), 4096, "do not fill one row of 4096"),
        ([], tiny_tokenizer(), 4, "has 0 tokens"),
        ([TEXT], endless, 4, "no eos_token, which separates"),
    ):
        refused(message, pack, texts, tokenizer, length)


def test_a_tokenizer_must_fit_the_embedding():
    tokenizer = tiny_tokenizer()
    check_vocabulary(tokenizer, 280)
    check_vocabulary(tokenizer, 300)
    last = tokenizer.convert_ids_to_tokens(279)
    refused(rf"largest id is 279 \({last!r}\)", check_vocabulary, tokenizer, 279)
