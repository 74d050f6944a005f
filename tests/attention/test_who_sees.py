"""Who may see whom, and the block that hides calls from taps."""

import math

import pytest
import torch

from sinklab.core.attention import Visibility, is_observed, scores, unobserved


def test_visible_without_mask_and_causal():
    assert Visibility(None, (2, 3, 5)).visible_BHS.tolist() == [[[3] * 5]] * 2
    assert Visibility(None, (1, 4, 4), is_causal=True).visible_BHS.tolist() == [[[4, 3, 2, 1]]]
    assert Visibility(None, (2, 3, 5)).real_BQ is None


@pytest.mark.parametrize("form", ["row", "expanded", "square", "additive", "finfo_min", "billion"])
@pytest.mark.parametrize("prefix", [0, 2])
def test_padding_is_no_viewer_and_is_not_viewed(form, prefix):
    seen = torch.ones(2, 1, 1, prefix + 4, dtype=torch.bool)
    seen[0, ..., prefix] = False
    square = seen.expand(2, 1, 4, prefix + 4)
    floor = {
        "additive": -math.inf,
        "finfo_min": torch.finfo(torch.float32).min,
        "billion": -1e9,
    }.get(form, 0.0)
    mask = {
        "row": seen,
        "expanded": square,
        "square": square.clone(),
        "additive": torch.zeros(square.shape).masked_fill(~square, floor),
        "finfo_min": torch.zeros(square.shape).masked_fill(~square, floor),
        # a bias by distance hides nothing, however far
        "billion": torch.full(square.shape, -5000.0).masked_fill(~square, floor),
    }[form]
    visible = Visibility(mask, (2, 4, prefix + 4)).visible_BHS
    assert visible[:, 0].tolist() == [[3] * prefix + [0, 3, 3, 3], [4] * (prefix + 4)]
    real = Visibility(mask, (2, 4, prefix + 4)).real_BQ
    assert real is not None
    assert real.tolist() == [[False, True, True, True], [True] * 4]


def test_causal_padding_counts_from_the_first_real_token():
    square = torch.ones(4, 4, dtype=torch.bool).tril()
    square[:, 0] = False
    assert Visibility(square, (1, 4, 4)).visible_BHS[0, 0].tolist() == [0, 3, 2, 1]


def test_no_query_sees_a_key_behind_the_last_of_them():
    """A causal call without a mask and with more keys than queries: torch counts from the first
    key.
    """
    own = Visibility(None, (2, 3, 6), True)
    assert own.visible_BHS[:, 0].tolist() == [[3, 2, 1, 0, 0, 0]] * 2


@pytest.mark.parametrize("form", ["all", "causal", "row", "square", "heads"])
@pytest.mark.parametrize("queries, keys", [(7, 7), (5, 9), (9, 5)])
def test_some_queries_are_counted_as_a_dense_mask_counts_them(form, queries, keys, monkeypatch):
    monkeypatch.setattr(scores, "SOME", 2)
    shapes = {
        "row": (2, 1, 1, keys),
        "square": (1, 1, queries, keys),
        "heads": (2, 3, queries, keys),
    }
    mask = torch.rand(shapes[form]) < 0.7 if form in shapes else None
    some_BQ = torch.rand(2, queries) < 0.5
    dense = torch.ones(queries, keys, dtype=torch.bool)
    dense_BHQS = (dense.tril() if form == "causal" else dense)[None, None] if mask is None else mask
    found = Visibility(mask, (2, queries, keys), form == "causal").seen_by(some_BQ)
    assert found.dtype == torch.int64 and torch.equal(
        found, (dense_BHQS & some_BQ[:, None, :, None]).sum(2)
    )


def test_a_static_cache_with_room_at_the_end_counts_every_query():
    # three queries at keys 2 to 4 of a buffer of 8; the first row is padded at key 0
    may = torch.zeros(2, 1, 3, 8, dtype=torch.bool)
    may[:, :, :, :5] = torch.ones(3, 5, dtype=torch.bool).tril(2)
    may[0, :, :, 0] = False
    expected = [[0, 3, 3, 2, 1, 0, 0, 0], [3, 3, 3, 2, 1, 0, 0, 0]]
    assert Visibility(may, (2, 3, 8)).visible_BHS[:, 0].tolist() == expected
    assert Visibility(may, (2, 3, 8)).real_BQ is None


def test_where_queries_cannot_be_placed_in_a_static_cache_every_one_counts():
    # all three see the keys 0 to 4 of a buffer of 8, so nothing says which are their own
    may = (torch.arange(8) < 5).expand(1, 1, 3, 8).clone()
    assert Visibility(may, (1, 3, 8)).visible_BHS[0, 0].tolist() == [3] * 5 + [0] * 3
    assert Visibility(may, (1, 3, 8)).real_BQ is None


def test_unobserved_is_undone_also_after_an_exception():
    with pytest.raises(RuntimeError), unobserved():
        assert not is_observed()
        raise RuntimeError
    assert is_observed()
