"""A one-layer bidirectional attention model in float64, and the decoding loop written out plainly:
the slow twin.
"""

from __future__ import annotations

import torch
from torch import Tensor

# B batch rows, S positions, M wanted positions, V vocabulary, D width

VOCABULARY, MASK, PAD = 23, 20, 21


class ToyDenoiser:
    """Rows do not see one another, padding is seen by nobody and does not shift positions. Keeps
    what it was asked.
    """

    def __init__(
        self, attention_BS: Tensor, seed: int = 0, bias_to_mask: float = 0.0, sharpness: float = 1.0
    ):
        generator = torch.Generator().manual_seed(seed)
        self.token_VD = torch.randn(VOCABULARY, 16, generator=generator, dtype=torch.float64)
        self.place_SD = torch.randn(64, 16, generator=generator, dtype=torch.float64)
        self.head_DV = (
            torch.randn(16, VOCABULARY, generator=generator, dtype=torch.float64) * sharpness
        )
        self.attention_BS = attention_BS
        self.bias_to_mask = bias_to_mask
        self.calls: list[tuple[Tensor, Tensor]] = []

    def dense(self, ids_BS: Tensor, attention_BS: Tensor) -> Tensor:
        place_BS = (attention_BS.cumsum(1) - 1).clamp(min=0)
        hidden_BSD = self.token_VD[ids_BS] + self.place_SD[place_BS]
        score_BSS = (hidden_BSD @ hidden_BSD.mT / 16).masked_fill(
            ~attention_BS[:, None], -torch.inf
        )
        logits_BSV = (hidden_BSD + score_BSS.softmax(-1) @ hidden_BSD) @ self.head_DV / 4
        logits_BSV[..., MASK] += self.bias_to_mask
        return logits_BSV

    def __call__(self, ids_BS: Tensor, wanted_BS: Tensor) -> Tensor:
        self.calls.append((ids_BS.clone(), wanted_BS.clone()))
        return self.dense(ids_BS, self.attention_BS)[wanted_BS]


def plain_llada_row(
    toy: ToyDenoiser, ids: list[int], block_length: int, block_steps: list[int]
) -> list[list[int]]:
    """One row without padding, one position at a time; returns the canvas before the first step and
    after each.
    """
    ids, canvases = list(ids), [list(ids)]
    to_fill = [position for position, token in enumerate(ids) if token == MASK]
    blocks = [
        to_fill[start : start + block_length] for start in range(0, len(to_fill), block_length)
    ]
    for block, steps in zip(blocks, block_steps, strict=True):
        quotas = [len(block) // steps + (step < len(block) % steps) for step in range(steps)]
        for quota in quotas:
            row = torch.tensor([ids])
            logits_SV = toy.dense(row, torch.ones_like(row, dtype=torch.bool))[0]
            found = []
            for position in block:
                if ids[position] == MASK:
                    allowed = [token for token in range(VOCABULARY) if token != MASK]
                    token = max(allowed, key=lambda token: logits_SV[position, token].item())
                    found.append((logits_SV[position].softmax(-1)[token].item(), position, token))
            for _, position, token in sorted(found, reverse=True)[:quota]:
                ids[position] = token
            canvases.append(list(ids))
    return canvases
