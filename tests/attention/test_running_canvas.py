"""What a denoiser announces, and which queries see which keys where random calls of a trace do not
say it; and the block that hides calls from taps.
"""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from sinklab.core.attention import (
    RunningCanvas,
    Visibility,
    decoding,
    decoding_run,
    running,
    running_canvas,
)

IDS = torch.arange(8).view(2, 4)


def test_the_innermost_announcement_holds_and_is_undone():
    assert running_canvas() is None
    with running(IDS):
        outer = running_canvas()
        assert outer is not None and outer.ids_BS is IDS and outer.columns is None
        with pytest.raises(RuntimeError), running(IDS + 1, slice(1, 3)):
            inner = running_canvas()
            assert inner is not None and inner.columns == slice(1, 3)
            raise RuntimeError
        assert running_canvas() is outer
    assert running_canvas() is None


def test_the_run_that_decodes_is_known_in_its_own_thread_alone():
    assert decoding_run() is None
    outer, inner = object(), object()
    with decoding(outer):
        with pytest.raises(RuntimeError), decoding(inner):
            assert decoding_run() is inner
            raise RuntimeError
        assert decoding_run() is outer
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(decoding_run).result() is None
    assert decoding_run() is None


@pytest.mark.parametrize("form", ["row", "square"])
def test_padding_queries_are_known_by_their_own_keys(form):
    # two sink columns, then four canvas positions of which the first row's first two are padding
    mask = torch.ones(2, 1, 1, 6, dtype=torch.bool)
    mask[0, ..., 2:4] = False
    mask = mask if form == "row" else mask.expand(2, 1, 2, 6).clone()
    # the queries stand at canvas positions 1 and 2
    found = Visibility(mask, (2, 2, 6), running=RunningCanvas(IDS, torch.tensor([1, 2])))
    assert found.real_BQ.tolist() == [[False, True], [True, True]]
    assert found.visible_BHS[:, 0].tolist() == [[1, 1, 0, 0, 1, 1], [2] * 6]
    # taken for the last two, they would all be real
    assert Visibility(mask, (2, 2, 6)).real_BQ is None


def test_no_query_sees_a_key_behind_the_last_of_them():
    """A causal call without a mask and with more keys than queries: torch counts from the first
    key.
    """
    own = Visibility(None, (2, 3, 6), True)
    assert own.visible_BHS[:, 0].tolist() == [[3, 2, 1, 0, 0, 0]] * 2


def test_where_queries_cannot_be_placed_in_a_static_cache_every_one_counts():
    # all three see the keys 0 to 4 of a buffer of 8, so nothing says which are their own
    may = (torch.arange(8) < 5).expand(1, 1, 3, 8).clone()
    assert Visibility(may, (1, 3, 8)).visible_BHS[0, 0].tolist() == [3] * 5 + [0] * 3
    assert Visibility(may, (1, 3, 8)).real_BQ is None
