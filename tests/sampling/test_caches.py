"""Which columns a cache recomputes, what the loop is handed, and what a cache cannot do."""

import pytest
import torch

from refusals import refused
from sinklab.core.subject import (
    Canvas,
    Denoiser,
    Session,
    denoise,
)
from sinklab.lab.caching import DualCache, PrefixCache

MASK, PAD = 9, 8


class Notebook(Denoiser):
    """A denoiser with a session that notes what it is asked for; every token of the vocabulary is
    equally likely.
    """

    def __init__(self):
        self.asked, self.sessions = [], 0

    def logits(self, ids_BS, at):
        self.asked.append("afresh")
        return torch.zeros(len(at.flat_M), MASK)

    def begin(self, cache):
        self.sessions += 1
        return NotebookSession(self.asked)


class NotebookSession(Session):
    def __init__(self, asked):
        self.asked = asked

    def logits(self, ids_BS, at, columns=None):
        columns = (columns.start, columns.stop) if isinstance(columns, slice) else columns
        self.asked.append((at.wanted_BS.nonzero()[:, 1].tolist(), columns))
        return torch.zeros(len(at.flat_M), MASK)


def asked(cache, canvas=None, **settings):
    denoiser = Notebook()
    canvas = canvas or Canvas.from_prompts([[1, 2, 3]], new_tokens=5, mask_id=MASK, pad_id=PAD)
    list(denoise(denoiser, canvas, cache=cache, **{"block_length": 3, **settings}))
    assert denoiser.sessions == (cache is not None)
    return denoiser.asked


@pytest.mark.parametrize("cache, stop", [(PrefixCache(), 8), (DualCache(), 6)])
def test_a_cache_recomputes_the_block_or_what_follows_too(cache, stop):
    assert asked(cache) == [
        ([3, 4, 5], None),
        ([4, 5], (3, stop)),
        ([5], (3, stop)),
        ([6, 7], None),
        ([7], (6, 8)),
    ]
    assert asked(None) == ["afresh"] * 5


@pytest.mark.parametrize(
    "canvas, expected",
    [
        (
            Canvas.from_prompts([[1, 2, 3], [1], []], new_tokens=4, mask_id=MASK, pad_id=PAD),
            [None, (3, 5), None, (5, 7)],
        ),
        # the span between the first and the last hole
        (Canvas.infill([[1, MASK, 2, MASK, 3, MASK, 4]], mask_id=MASK), [None, (1, 4), None]),
        # a row without the block has no say
        (
            Canvas.infill([[1, MASK, MASK, 2, MASK], [1, MASK, MASK, 2, 3]], mask_id=MASK),
            [None, (1, 3), None],
        ),
    ],
)
def test_rows_agree_on_their_blocks(canvas, expected):
    assert [columns for _, columns in asked(DualCache(), canvas, block_length=2)] == expected


def test_rows_whose_blocks_stand_elsewhere_are_refused():
    canvas = Canvas.infill([[1, MASK, MASK, 2, 3], [1, 2, MASK, 3, MASK]], mask_id=MASK)
    message = (
        "block 0, in columns 1 to 4 of the batch, is in fewer of row 0; pad prompts on the left, "
        "decode these rows one"
    )
    refused(message, denoise, Notebook(), canvas, cache=PrefixCache())
    assert len(list(denoise(Notebook(), canvas))) == 2
