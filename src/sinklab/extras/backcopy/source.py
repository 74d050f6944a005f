"""Bigram-Backcopy (Guo et al., arXiv 2410.13835, section 3): a source that makes a causal model
grow a sink, and its entropy.

A row is a start token and a Markov chain with a memory of one token: after a trigger comes the
token before it, after any other token a draw from that token's row of a transition matrix. All
chances are known, so that the best loss that a model can have is, too.
"""

# B batch, S columns of a row (the start token in the first), T = S − 1 drawn tokens, X tokens, N
# those that are no triggers, H hidden states
import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Source:
    """A Bigram-Backcopy source; its transition matrix is drawn from the seed.

    Args:
        seed: of the transition matrix.
        tokens: X; the first ones, 0 … triggers − 1, are the triggers.
        triggers: tokens that are followed by the token before them.
        concentration: of the Dirichlet distribution of which each row of the matrix is a draw;
            small ones make rows of few likely successors.
        length: S.
    """

    seed: int = 0
    tokens: int = 32
    triggers: int = 4
    concentration: float = 0.3
    length: int = 48

    @property
    def start_id(self) -> int:
        """The token in the first column of every row, and nowhere else."""
        return self.tokens

    @property
    def mask_id(self) -> int:
        """[MASK], which the source never gives."""
        return self.tokens + 1

    @cached_property
    def chances_XX(self) -> Tensor:
        """Chance of the next token (column) after a token (row), float64; the rows of the triggers
        are not used.
        """
        generator = torch.Generator().manual_seed(self.seed)
        shape = torch.full((self.tokens, self.tokens), self.concentration, dtype=torch.float64)
        drawn_XX = torch._standard_gamma(shape, generator=generator)
        return drawn_XX / drawn_XX.sum(1, keepdim=True)

    def rows(self, count: int, generator: torch.Generator) -> Tensor:
        """Rows of the source, int64 (count, S). The first token drawn is never a trigger: all
        others are as likely.
        """
        ids_BS = torch.full((count, self.length), self.start_id)
        ids_BS[:, 1] = torch.randint(self.triggers, self.tokens, (count,), generator=generator)
        for place in range(2, self.length):
            before_B, last_B = ids_BS[:, place - 2], ids_BS[:, place - 1]
            next_B = torch.multinomial(self.chances_XX[last_B], 1, generator=generator)[:, 0]
            ids_BS[:, place] = torch.where(last_B < self.triggers, before_B, next_B)
        return ids_BS

    @cached_property
    def moves_HH(self) -> Tensor:
        """This source as a Markov chain of H = N + N · triggers states, float64: a token that is no
        trigger, or a trigger with the token that it follows, in this order. No trigger follows
        another.
        """
        triggers, plain = self.triggers, self.tokens - self.triggers
        moves_HH = torch.zeros(plain * (1 + triggers), plain * (1 + triggers), dtype=torch.float64)
        rows_NX = self.chances_XX[triggers:]
        moves_HH[:plain, :plain] = rows_NX[:, triggers:]
        for token in range(plain):
            own = slice(plain + token * triggers, plain + (token + 1) * triggers)
            moves_HH[token, own] = rows_NX[token, :triggers]
            moves_HH[own, token] = 1
        return moves_HH

    @cached_property
    def shown_H(self) -> Tensor:
        """The token that each state of `moves_HH` shows."""
        plain = self.tokens - self.triggers
        return torch.cat(
            [torch.arange(self.triggers, self.tokens), torch.arange(self.triggers).repeat(plain)]
        )

    @cached_property
    def floor(self) -> float:
        """Entropy of the drawn tokens, nats a token: the least expected loss of both objectives.

        Of a causal model by the chain rule from left to right; of a diffusion model since its
        bound, over times that are uniform in (0, 1], is the chain rule averaged over all orders
        (arXiv 2406.03736).
        """
        plain = self.tokens - self.triggers
        state_H = torch.zeros(len(self.shown_H), dtype=torch.float64)
        state_H[:plain] = 1 / plain
        entropy_H, total = torch.special.entr(self.moves_HH).sum(1), math.log(plain)
        for _ in range(self.length - 2):
            total += float(state_H @ entropy_H)
            state_H = state_H @ self.moves_HH
        return total / (self.length - 1)

    def nats(self, ids_BS: Tensor) -> Tensor:
        """Mean negative log-likelihood of the drawn tokens of each row under the source itself,
        nats a token, float64 (B,).
        """
        last_BT, next_BT = ids_BS[:, 1:-1], ids_BS[:, 2:]
        chances_BT = torch.where(last_BT < self.triggers, 1, self.chances_XX[last_BT, next_BT])
        return (math.log(self.tokens - self.triggers) - chances_BT.log().sum(1)) / (self.length - 1)

    def posterior(self, noisy_BS: Tensor) -> Tensor:
        """Chance of every token at every column given all that is not masked, float64 (B, S, X):
        the best answer.

        By the forward-backward algorithm over the states. Zeros in the start token's column.
        """
        plain = self.tokens - self.triggers
        drawn_BT = noisy_BS[:, 1:]
        fits_BTH = (
            (drawn_BT[..., None] == self.shown_H) | (drawn_BT[..., None] == self.mask_id)
        ).double()
        ahead_BTH, behind_BTH = torch.zeros_like(fits_BTH), torch.ones_like(fits_BTH)
        ahead_BTH[:, 0, :plain] = fits_BTH[:, 0, :plain]
        for place in range(1, self.length - 1):
            found_BH = ahead_BTH[:, place - 1] @ self.moves_HH * fits_BTH[:, place]
            ahead_BTH[:, place] = found_BH / found_BH.sum(1, keepdim=True)
        for place in range(self.length - 3, -1, -1):
            found_BH = (behind_BTH[:, place + 1] * fits_BTH[:, place + 1]) @ self.moves_HH.T
            behind_BTH[:, place] = found_BH / found_BH.sum(1, keepdim=True)
        states_BTH = ahead_BTH * behind_BTH
        states_BTH /= states_BTH.sum(-1, keepdim=True)
        chances_BSX = torch.zeros(*noisy_BS.shape, self.tokens, dtype=torch.float64)
        chances_BSX[:, 1:].index_add_(2, self.shown_H, states_BTH)
        return chances_BSX
