import json
import pickle
from itertools import islice

import pytest
import torch
from torch.utils.data import DataLoader, default_collate

from refusals import refused
from sinklab.lab.data import (
    StreamedRows,
    pack,
    read_corpus,
    streams,
)
from tiny_diffusion import TEXT, tiny_tokenizer

LENGTH = 8
BLOCK = 3


def corpus(folder, texts=None):
    """Short and long documents with blank ones between: about 14 rows a pass."""
    texts = (
        ["", TEXT[:40], " \n", TEXT, "The sea.", "", TEXT[20:90], "rain"]
        if texts is None
        else texts
    )
    folder.mkdir(exist_ok=True)
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return folder


def stream(folder, heldout=0, **changes):
    rows = StreamedRows(
        folder, tiny_tokenizer(), LENGTH, **({"seed": 4, "shuffle_rows": BLOCK} | changes)
    )
    if heldout:
        rows.hold_out(heldout)
    return rows


def ids(rows):
    return [row["input_ids"].tolist() for row in rows]


def same(rows, others):
    return all(
        left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)
        for left, right in zip(rows, others, strict=True)
    )


def test_rows_are_shuffled_inside_their_block_alone(tmp_path):
    folder = corpus(tmp_path)
    plain = ids(list(stream(folder, shuffle_rows=1, repeat=False)))
    shuffled = ids(list(stream(folder, repeat=False)))
    orders = set()
    for start in range(0, len(plain), BLOCK):
        block, before = shuffled[start : start + BLOCK], plain[start : start + BLOCK]
        assert sorted(block) == sorted(before)
        orders.add(tuple(before.index(row) for row in block))
    assert len(orders) > 2, "each block has an order of its own"
    assert ids(list(stream(folder, repeat=False, seed=5))) != shuffled
    assert ids(list(stream(folder, repeat=False))) == shuffled


@pytest.mark.parametrize("changes", [{}, {"heldout": 4}, {"shuffle_rows": 1}])
def test_every_row_can_be_gone_on_from(tmp_path, changes):
    folder = corpus(tmp_path)
    expected = list(islice(stream(folder, **changes), 45))
    cursors = [row["cursor"] for row in expected]
    assert cursors[-1][1] >= 2, "the case needs several passes"
    for row in range(1, 40, 3):
        for earlier in {row - 1, max(0, row - 5)}:
            again = stream(folder, **changes)
            again.start_at(row, cursors[earlier])
            assert same(list(islice(again, 5)), expected[row : row + 5]), (row, earlier)


def test_held_out_rows_are_left_out_in_every_pass(tmp_path):
    folder = corpus(tmp_path)
    whole = stream(folder, shuffle_rows=1)
    heldout = whole.hold_out(5)
    expected_RS = pack(read_corpus(folder), tiny_tokenizer(), LENGTH)
    assert torch.equal(heldout.ids_RS, expected_RS[:5])
    rows = list(stream(folder, shuffle_rows=1, repeat=False))
    assert [int(row["row"]) for row in rows] == list(range(len(rows)))
    assert ids(rows) == expected_RS.tolist()
    once = ids(list(stream(folder, heldout=5, shuffle_rows=1, repeat=False)))
    assert once == expected_RS[5:].tolist()
    tokens = torch.cat([row["input_ids"] for row in islice(whole, 60)])
    one_pass = torch.cat([*streams.encode(read_corpus(folder), tiny_tokenizer())])[5 * LENGTH :]
    assert torch.equal(tokens, one_pass.repeat(9)[: tokens.numel()].long())


def test_a_loader_with_one_worker_reads_the_same(tmp_path):
    folder = corpus(tmp_path)
    expected = default_collate(list(islice(stream(folder), 4, 8)))
    # read to the end: a worker of an endless stream that is left is waited for, five seconds
    rows = pickle.loads(pickle.dumps(stream(folder, repeat=False)))
    for workers in (0, 1):
        loader = DataLoader(rows, batch_size=4, num_workers=workers)
        _, batch, *_ = loader
        assert batch.keys() == {"input_ids", "row", "cursor"}
        assert all(torch.equal(batch[name], expected[name]) for name in expected)


def test_a_corpus_that_fills_no_row_is_refused(tmp_path):
    short = corpus(tmp_path / "short", ["", "sea"])
    refused("short has 3 tokens, which", next, iter(stream(short)))
    folder = corpus(tmp_path / "whole")
    rows = pack(read_corpus(folder), tiny_tokenizer(), LENGTH).shape[0]
    assert len(list(stream(folder, heldout=rows - 1, repeat=False))) == 1
    refused(f"fill {rows} held-out rows of 8", stream(folder).hold_out, rows)
    refused("has 0 tokens", next, iter(stream(corpus(tmp_path / "blank", [" "]))))


def test_streams_that_cannot_be_are_refused(tmp_path):
    folder = corpus(tmp_path)
    refused("shuffle_rows must be at least 1, got 0", stream, folder, shuffle_rows=0)
    refused("at least 2 tokens", StreamedRows, folder, tiny_tokenizer(), 1)
