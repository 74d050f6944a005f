"""A one-layer bidirectional attention model in float64, that tests decode with."""

import torch

# B batch rows, S positions, M wanted positions, V vocabulary, D width

VOCABULARY, MASK, PAD = 23, 20, 21


class ToyDenoiser:
    """Rows do not see one another, padding is seen by nobody and does not shift positions. Keeps
    what it was asked.
    """

    def __init__(self, attention_BS, seed=0, sharpness=1.0):
        generator = torch.Generator().manual_seed(seed)
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

    def __call__(self, ids_BS, wanted_BS):
        self.calls.append((ids_BS.clone(), wanted_BS.clone()))
        return self.dense(ids_BS, self.attention_BS)[wanted_BS]
