import gzip
import json
import shutil
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from refusals import refused
from sinklab.lab.data import StreamedRows, corpus_documents, pack, read_corpus
from tiny_diffusion import tiny_tokenizer

TEXTS = ["one", "", "two", " \n", "three", "four"]


def lines(*texts):
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


def mixed(folder):
    """`TEXTS` over files of every kind."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "a.jsonl").write_bytes(lines("one", ""))
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(lines("two")))
    (folder / "c.txt").write_text(" \n")
    pq.write_table(pa.table({"id": [3, 4], "text": ["three", "four"]}), folder / "d.parquet")
    return folder


@pytest.mark.parametrize("start", range(8))
def test_documents_are_counted_over_every_kind_of_file_and_blank_ones_count(tmp_path, start):
    assert list(corpus_documents(mixed(tmp_path), start=start)) == TEXTS[start:]
    assert list(read_corpus(tmp_path)) == ["one", "two", "three", "four"]


def test_what_is_skipped_is_not_parsed(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"no json\n" + lines("one"))
    assert list(corpus_documents(tmp_path, start=1)) == ["one"]
    refused(r"a.jsonl, line 1: each line", list, corpus_documents(tmp_path))


@pytest.mark.parametrize(
    "content, name, message",
    [
        (None, "body", "row 0: no field 'text'"),
        (None, "text", "a.parquet, row 0: field 'text'"),
        (b"PAR1 and no more", "text", "cannot be read as Parquet"),
    ],
)
def test_parquet_files_are_refused_by_name(tmp_path, content, name, message):
    pq.write_table(pa.table({name: [1]}), tmp_path / "a.parquet")
    if content:
        (tmp_path / "a.parquet").write_bytes(content)
    refused(message, list, corpus_documents(tmp_path))


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A folder that `datasets` reads as a dataset, and a cache of its own."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "set"
    folder.mkdir()
    pq.write_table(pa.table({"id": list(range(6)), "text": TEXTS}), folder / "train.parquet")
    return folder


def test_a_dataset_is_streamed_and_can_be_begun_anywhere(hub):
    for start in (0, 2, 5, 9):
        assert list(corpus_documents(f"hub:{hub}", start=start)) == TEXTS[start:]
    assert list(read_corpus(f"hub:{hub}")) == ["one", "two", "three", "four"]


def test_a_configuration_of_a_dataset_can_be_named(hub):
    configs = "".join(
        f"- config_name: {name}\n  data_files: {name}.jsonl\n" for name in ("small", "large")
    )
    (hub / "README.md").write_text(f"---\nconfigs:\n{configs}---\n")
    (hub / "small.jsonl").write_bytes(lines("small"))
    (hub / "large.jsonl").write_bytes(lines("large"))
    assert list(read_corpus(f"hub:{hub}:large")) == ["large"]
    refused(r"\['small', 'large'\]", list, read_corpus(f"hub:{hub}"))


def test_datasets_that_cannot_be_used_are_refused_by_name(hub):
    for source, message in (
        ("hub:", "but the corpus is 'hub:'"),
        ("hub:nobody/nothing", "hub:nobody/nothing must be a"),
    ):
        refused(message, list, read_corpus(source))
    shutil.move(hub / "train.parquet", hub / "test.parquet")
    refused(r"split train, but: .*train", list, read_corpus(f"hub:{hub}"))


def test_without_datasets_the_remedy_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    refused(r"pip install 'sinklab\[train\]'", next, corpus_documents("hub:some/thing"))


ORIGINS = ["code", "web", "code", "web", "books"]


def of_origins(folder):
    """Documents 0 to 4, each with where it comes from, in two kinds of file."""
    folder.mkdir()
    rows = [
        {"text": f"{number}", "meta": {"set": origin}, "part": number % 2}
        for number, origin in enumerate(ORIGINS)
    ]
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:3]))
    pq.write_table(pa.Table.from_pylist(rows[3:]), folder / "b.parquet")
    return folder


@pytest.mark.parametrize(
    "only, kept",
    [
        ("meta.set!=code", "134"),
        ("meta.set=code", "02"),
        ("part=1", "13"),
        ("part!=1", "024"),
        ("meta.set!=news", "01234"),
    ],
)
def test_documents_are_chosen_by_a_field_and_keep_their_numbers(tmp_path, only, kept):
    folder = of_origins(tmp_path / "corpus")
    assert list(read_corpus(folder, only=only)) == list(kept)
    for start in (0, 2):
        texts = [text if text in kept else "" for text in "01234"[start:]]
        assert list(corpus_documents(folder, only=only, start=start)) == texts
    rows = StreamedRows(folder, tiny_tokenizer(), 2, only=only, repeat=False, shuffle_rows=1)
    ids = [token for row in rows for token in row["input_ids"].tolist()]
    assert ids == pack(kept, tiny_tokenizer(), 2).flatten().tolist()


@pytest.mark.parametrize(
    "source, only, message",
    [
        ("corpus", "meta.sets=code", "line 1: only='meta.sets=code' .*'meta.sets'"),
        ("corpus", "meta.set.name=code", "line 1: .*'meta.set.name'"),
        ("corpus", "parts", "line 1: only='parts' .*'parts'"),
        ("a.txt", "meta.set=x", r"a.txt: only='meta.set=x'"),
    ],
)
def test_a_choice_that_cannot_be_made_is_refused(tmp_path, source, only, message):
    of_origins(tmp_path / "corpus")
    (tmp_path / "a.txt").write_text("text")
    refused(message, list, read_corpus(tmp_path / source, only=only))
