"""What a rule sees: the masked positions of the current block, their logits and the tokens proposed there."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from sinklab.sampling.tokens import TokenSampling, proposals, shaped

# B batch rows, C places in a block, M candidate positions in row-major order, V vocabulary


@dataclass(frozen=True, eq=False)
class Candidates:
    """The candidates of one evaluation. What costs a pass over the vocabulary is computed when first asked for."""

    logits_MV: Tensor
    """As the denoiser gave them, [MASK] included."""
    sampling: TokenSampling
    """Temperature, top-p and top-k."""
    mask_id: int
    """The id that is never proposed."""
    todo_BC: Tensor
    """bool, the places of the block that are candidates."""
    columns_BC: Tensor
    """int64, the canvas column of each place."""
    generator: torch.Generator | None = None
    """The one source of randomness, None when the caller gave none."""

    @cached_property
    def shaped_MV(self) -> Tensor:
        """Logits after temperature, top-p and top-k, float32 or better; -inf where a token was cut away."""
        return shaped(_at_least_float32(self.logits_MV), self.sampling)

    @cached_property
    def probability_MV(self) -> Tensor:
        """softmax(logits_MV), float32 or better."""
        return torch.softmax(_at_least_float32(self.logits_MV), -1)

    @cached_property
    def shaped_probability_MV(self) -> Tensor:
        """softmax(shaped_MV)."""
        return torch.softmax(self.shaped_MV, -1) if self.sampling.shapes else self.probability_MV

    @cached_property
    def drawn(self) -> tuple[Tensor, Tensor]:
        """What each proposal was chosen by (NaN where logits are NaN), and the proposals."""
        cut_MV = self.shaped_MV if self.sampling.temperature > 0 and self.sampling.cuts else None
        return proposals(self.logits_MV, cut_MV, self.sampling, self.mask_id, self.generator)

    @property
    def tokens_M(self) -> Tensor:
        """int64, the token that would be committed at each candidate."""
        return self.drawn[1]

    @cached_property
    def columns_M(self) -> Tensor:
        """int64, the canvas column of each candidate."""
        return self.columns_BC[self.todo_BC]

    @cached_property
    def rows_M(self) -> Tensor:
        """int64, the batch row of each candidate."""
        return self.todo_BC.nonzero()[:, 0]


def _at_least_float32(logits_MV: Tensor) -> Tensor:
    return logits_MV if logits_MV.dtype == torch.float64 else logits_MV.float()
