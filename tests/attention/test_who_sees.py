"""Who may see whom, where the random calls that a trace is tried with do not say it; and the block
that hides calls from taps.
"""

import pytest
import torch

from sinklab.core.attention import Visibility, is_observed, scores, unobserved


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
