"""A one-layer bidirectional attention model in float64 that tests decode with, and its canvases."""

import torch

from sinklab.core.subject import Candidates, Canvas, Denoiser, TokenSampling

# B batch rows, S positions, M wanted positions, V vocabulary, D width

VOCABULARY, MASK, PAD = 23, 20, 21
ROWS = [[1, 2, 3, 4, 5], [6, 7], [], [8, 9, 10]]
HOLES = [[MASK, 1, MASK, MASK, MASK, 3, MASK], [4, MASK, 5, MASK, 7, 8, 9], [0, 1, 2, 3, 4, 5, 6]]
"""texts with unequal numbers of masks"""


def prompts(rows=ROWS, new_tokens=12):
    return Canvas.from_prompts(rows, new_tokens=new_tokens, mask_id=MASK, pad_id=PAD)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def zeros(ids_BS, wanted_BS):
    """A denoiser to which all tokens are equally likely."""
    return torch.zeros(int(wanted_BS.sum()), VOCABULARY)


def candidates(logits_MV, generator=None, **sampling):
    """Of one row of masks, by a vocabulary without one."""
    every_BS = torch.ones(1, len(logits_MV), dtype=torch.bool)
    mask_id, ids_BS = logits_MV.shape[1], every_BS * logits_MV.shape[1]
    shape = TokenSampling(**sampling)
    return Candidates(logits_MV, shape, mask_id, every_BS, ids_BS, every_BS, generator)


def rows_of(canvas, steps):
    """The canvases of each row before the first evaluation and after each, without padding."""
    canvases = [canvas.ids_BS, *(step.ids_BS for step in steps)]
    return [
        [ids_BS[row][real_S].tolist() for ids_BS in canvases]
        for row, real_S in enumerate(canvas.attention_BS)
    ]


class ToyDenoiser(Denoiser):
    """Rows do not see one another, padding is seen by nobody and does not shift positions. Keeps
    what it was asked.
    """

    def __init__(self, attention_BS, seed=0, sharpness=1.0):
        generator = seeded(seed)
        self.token_VD = torch.randn(VOCABULARY, 16, generator=generator, dtype=torch.float64)
        self.place_SD = torch.randn(64, 16, generator=generator, dtype=torch.float64)
        self.head_DV = (
            torch.randn(16, VOCABULARY, generator=generator, dtype=torch.float64) * sharpness
        )
        self.attention_BS = attention_BS
        self.calls = []

    def dense(self, ids_BS, attention_BS):
        place_BS = (attention_BS.cumsum(1) - 1).clamp(min=0)
        hidden_BSD = self.token_VD[ids_BS] + self.place_SD[place_BS]
        score_BSS = (hidden_BSD @ hidden_BSD.mT / 16).masked_fill(
            ~attention_BS[:, None], -torch.inf
        )
        return (hidden_BSD + score_BSS.softmax(-1) @ hidden_BSD) @ self.head_DV / 4

    def logits(self, ids_BS, at):
        return self(ids_BS, at.wanted_BS)

    def __call__(self, ids_BS, wanted_BS):
        self.calls.append((ids_BS.clone(), wanted_BS.clone()))
        return self.dense(ids_BS, self.attention_BS)[wanted_BS]
