"""A benchmark comes out the same from every form in which its files are handed around."""

import bz2
import json
from pathlib import Path

import pytest

from refusals import refused
from sinklab.lab.studies.benchmarks.offline import rows_of

ARC = {
    "question": "What falls?",
    "choices": {"text": ["Rain", "Fire"], "label": ["A", "B"]},
    "answerKey": "B",
}


def lines(path, *rows):
    path = Path(path)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path


def test_arc_from_two_forms():
    foundry = {"query": "Question: What falls?", "choices": ["Rain", "Fire"], "gold": 1}
    for row in (ARC, foundry):
        assert rows_of("arc_easy", [lines("rows.jsonl", row)]) == [ARC]
    authors = {"question": {"stem": "What falls?", "choices": []}, "answerKey": "B"}
    path = lines("authors.jsonl", authors)
    refused("document 1 needs the field choices", rows_of, "arc_easy", [path])


def test_hellaswag_text_sets_the_last_sentence_apart():
    endings = ["rows off.", "sinks.", "eats.", "is a boat."]
    text = ["Rowing: A man sits in a boat. the man", "2", *endings]
    text += ['Cooking: How to cook. Boil it: "slowly."', "0", *endings]
    path = Path("hellaswag_val_full.txt.bz2")
    path.write_bytes(bz2.compress(("\n".join(text) + "\n").encode()))
    first, second = rows_of("hellaswag", [path])
    assert first == {
        "activity_label": "Rowing",
        "ctx_a": "A man sits in a boat.",
        "ctx_b": "the man",
        "endings": endings,
        "label": "2",
    }
    assert (second["activity_label"], second["ctx_a"], second["ctx_b"]) == (
        "Cooking",
        'How to cook. Boil it: "slowly."',
        "",
    )
    path.write_bytes(bz2.compress(("\n".join(text[:-1]) + "\n").encode()))
    refused("but its 11 lines do not", rows_of, "hellaswag", [path])


def test_labels_may_stand_in_a_file_beside():
    row = {"goal": "Dry a cup", "sol1": "Towel.", "sol2": "Cup."}
    path = lines("valid.jsonl", row, row)
    refused("needs the field label.*NAME-labels.lst", rows_of, "piqa", [path])
    labels = Path("valid-labels.lst")
    labels.write_text("1\n")
    refused("a label for each of 2 rows of", rows_of, "piqa", [path])
    labels.write_text("1\n2\n")
    refused("document 2: label must be 0 to", rows_of, "piqa", [path])
    labels.write_text("1\n0\n")
    assert [row["label"] for row in rows_of("piqa", [path])] == [1, 0]
    social = lines(
        "dev.jsonl",
        {name: "x" for name in ("context", "question", "answerA", "answerB", "answerC")},
    )
    Path("dev-labels.lst").write_text("3\n")
    assert rows_of("social_iqa", [social])[0]["label"] == "3"


def test_lambada_from_two_forms():
    text = {"text": "She rowed to the island"}
    split = lines("split.jsonl", {"context": "She rowed to the", "continuation": "island"})
    assert rows_of("lambada_openai", [split]) == [text]
    assert rows_of("lambada_openai", [lines("hub.jsonl", text)]) == [text]


def test_parquet_parts_are_joined():
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    paths = []
    for number in range(2):
        paths.append(Path(f"test-0000{number}.parquet"))
        pq.write_table(
            pa.Table.from_pylist([{"question": f"Q{number}", "answer": "#### 1", "more": 0}]),
            paths[-1],
        )
    assert rows_of("gsm8k", paths) == [
        {"question": "Q0", "answer": "#### 1"},
        {"question": "Q1", "answer": "#### 1"},
    ]
    paths[0].write_bytes(b"PAR1 no more")
    refused("cannot be read as Parquet", rows_of, "gsm8k", paths)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty; get the file again"),
        ('{"question": "Q"}\n', "document 1 needs the field answer, but has question"),
    ],
)
def test_damaged_files_are_refused_by_place(text, message):
    path = Path("test.jsonl")
    path.write_text(text)
    refused(message, rows_of, "gsm8k", [path])
