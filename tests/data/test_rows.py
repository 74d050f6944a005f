import pickle

import torch
from torch.utils.data import default_collate

from sinklab.lab.data import Rows
from sinklab.lab.data.rows import spread


def numbered(rows=7, length=3):
    return torch.arange(rows * length, dtype=torch.int32).view(rows, length)


def firsts(rows, count=None):
    return [int(rows[n]["input_ids"][0]) // 3 for n in range(count or len(rows))]


def test_every_pass_has_each_row_once_in_an_order_of_its_own():
    order = firsts(Rows(numbered(), seed=5, total=21))
    passes = [order[start : start + 7] for start in (0, 7, 14)]
    assert [sorted(part) for part in passes] == [list(range(7))] * 3
    assert len({tuple(part) for part in passes}) == 3
    assert firsts(Rows(numbered(), seed=6, total=21)) != order


def test_a_row_does_not_depend_on_what_was_read_before():
    rows = Rows(numbered(), seed=5, total=30)
    order = firsts(rows)
    again = pickle.loads(pickle.dumps(Rows(numbered(), seed=5, total=1_000_000)))
    for n in (29, 0, 8, 13, 7):
        assert int(again[n]["input_ids"][0]) // 3 == order[n]
        assert int(again[n]["row"]) == n


def test_what_belongs_to_a_row_stays_with_it_and_batches_have_the_types_of_the_model():
    ids_RS = numbered()
    parts = {
        "maskable_RS": ids_RS % 3 > 0,
        "attention_RS": ids_RS > 5,
    }
    rows = Rows(ids_RS, **parts, seed=1, total=14)
    batch = default_collate([rows[n] for n in range(8, 12)])
    ids_BS = batch["input_ids"]
    assert ids_BS.shape == (4, 3)
    assert ids_BS.dtype == batch["row"].dtype == torch.int64
    assert batch["row"].tolist() == [8, 9, 10, 11]
    assert torch.equal(batch["maskable"], ids_BS % 3 > 0)
    assert torch.equal(batch["attention_mask"], ids_BS > 5)
    assert batch["maskable"].dtype == torch.bool


def test_rows_that_are_measured_lie_over_the_whole_text():
    assert spread(511, 256)[[0, 1, -1]].tolist() == [0, 1, 509]
    assert spread(12, 4).tolist() == [0, 3, 6, 9] and spread(3, 8).tolist() == [0, 1, 2]
