"""The logit lens: the model's own head applied to the residual stream of any layer."""

# B batch, S text positions, N states of any origin, D hidden size, V vocabulary, L layers
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sinklab.core.attention import is_observed
from sinklab.lab.training.snapshots import after_layers

MEASURES = (
    "entropy",
    "probability",
    "log10_rank",
    "frequent_probability",
    "frequent_log10_rank",
    "kl",
    "hidden",
)
"""Results of `LogitLens.measures`: nats, probabilities, base-10 logarithms of ranks (0 is the
first), nats, a probability.
"""


@dataclass(frozen=True, eq=False)
class LogitLens:
    """A model's final norm and head on states of any layer (nostalgebraist 2020; the question is
    arXiv 2510.15731's §7).

    At position i it reads the prediction of query i: the token at i, or at i + 1 if the model's
    logits are shifted.
    """

    norm: nn.Module
    head: nn.Module
    hidden_ids: tuple[int, ...] = ()
    """Ids that cannot be written ([MASK]); they are left out of the distribution."""
    vocabulary: int | None = None
    """Ids from here on are no text; None when all are."""

    @classmethod
    def of(
        cls, model: Any, *, hidden_ids: tuple[int, ...] = (), vocabulary: int | None = None
    ) -> LogitLens:
        """The lens of a transformers model with a decoder that ends in `norm`, and a head.

        Raises:
            ValueError: for a model without them.
        """
        norm: Any = getattr(getattr(model, "base_model", model), "norm", None)
        head = model.get_output_embeddings()
        absent = ""
        if head is None:
            absent = "the head"
        elif not isinstance(norm, nn.Module):
            absent = "the norm"
        if absent:
            raise ValueError(
                "the logit lens needs a decoder with a final `norm` and a head over the "
                f"vocabulary, but {type(model).__name__} lacks {absent}; pass a DiffusionLM or a "
                "Llama-like causal model"
            )
        return cls(norm, head, tuple(hidden_ids), vocabulary)

    @torch.inference_mode()
    def logits(self, states_ND: Tensor) -> Tensor:
        """float32 (N, V): logits of states that have not been normed."""
        weight = next(self.norm.parameters())
        states_ND = states_ND.to(weight.device, weight.dtype)
        return self.head(self.norm(states_ND))[:, : self.vocabulary].float()

    @torch.inference_mode()
    def measures(
        self,
        states_ND: Tensor,
        last_ND: Tensor,
        token_N: Tensor,
        frequent_N: Tensor,
        *,
        chunk: int = 256,
    ) -> dict[str, Tensor]:
        """Measures of the lens in each state; float32 (N,) on the CPU, by the names of `MEASURES`.

        Args:
            states_ND: states of any layer.
            last_ND: the states of the same places after the last layer.
            token_N: the token to give the probability and rank of (the one finally written); −1
                gives NaN.
            frequent_N: a second one (the most frequent of the text so far); −1 gives NaN.
            chunk: states with logits in memory at a time.

        Returns:
            entropy (nats); probability and log10_rank of token_N, frequent_probability and
            frequent_log10_rank of frequent_N; kl, KL(last layer ‖ this one) in nats; hidden, the
            probability of hidden_ids before they are left out.

        Raises:
            ValueError: for arguments of unequal lengths.
        """
        count = len(states_ND)
        if {len(last_ND), len(token_N), len(frequent_N)} != {count}:
            raise ValueError(
                f"a lens reads as many last states and tokens as states, but there are {count} "
                f"states, {len(last_ND)} last states, {len(token_N)} and {len(frequent_N)} tokens"
            )
        chunks = zip(
            *(given.split(chunk) for given in (states_ND, last_ND, token_N, frequent_N)),
            strict=True,
        )
        parts = [self._measured(*part) for part in chunks]
        return {name: torch.cat([part[name] for part in parts]) for name in MEASURES}

    def _measured(
        self, states_ND: Tensor, last_ND: Tensor, token_N: Tensor, frequent_N: Tensor
    ) -> dict[str, Tensor]:
        logits_NV = self.logits(states_ND)
        found = {"hidden": logits_NV.softmax(1)[:, list(self.hidden_ids)].sum(1)}
        log_NV = self.log_probabilities(logits_NV)
        last_NV = self.log_probabilities(self.logits(last_ND))
        found["entropy"] = torch.special.entr(log_NV.exp()).sum(1)
        found["kl"] = (last_NV.exp() * (last_NV - log_NV)).sum(1).clamp(min=0)
        for prefix, wanted_N in (("", token_N), ("frequent_", frequent_N)):
            wanted_N = wanted_N.to(log_NV.device)
            known_N = (wanted_N >= 0) & (wanted_N < log_NV.shape[1])
            own_N1 = log_NV.gather(1, wanted_N.where(known_N, 0)[:, None])
            rank_N = 1 + (log_NV > own_N1).sum(1)
            nothing = log_NV.new_tensor(torch.nan)
            found[f"{prefix}probability"] = own_N1[:, 0].exp().where(known_N, nothing)
            found[f"{prefix}log10_rank"] = rank_N.float().log10().where(known_N, nothing)
        return {name: found[name].cpu() for name in MEASURES}

    def log_probabilities(self, logits_NV: Tensor) -> Tensor:
        if self.hidden_ids:
            logits_NV = logits_NV.clone()
            # finite, so that no difference of two of them is NaN
            logits_NV[:, list(self.hidden_ids)] = torch.finfo(logits_NV.dtype).min
        return logits_NV.log_softmax(1)


class ResidualStates:
    """The residual stream of one forward: the inputs of layers 0, 1, …, and the output of the last
    one.
    """

    def __init__(self) -> None:
        self.layers = 0
        self.depths_BSD: list[Tensor] = []
        """One tensor a depth, L + 1 in all: the one at l enters layer l, the last leaves the last
        layer.
        """
        self.added_ND: list[Tensor] = []
        """States of the added sinks, by depth, which models run apart; empty if they have none or
        did not run again.
        """

    def _see(self, depth: int, states_BSD: Tensor) -> None:
        if not is_observed():
            if depth == 0:
                self.added_ND.clear()
            self.added_ND.append(states_BSD.detach()[:, 0].float())
        # the first of several forwards (guidance) is kept
        elif depth == len(self.depths_BSD):
            self.depths_BSD.append(states_BSD.detach())


@contextmanager
def residual_states(model: Any) -> Iterator[ResidualStates]:
    """Watch the states between the decoder layers of a transformers model; one forward is held at a
    time, (L + 1)·B·S·D numbers.

    Raises:
        ValueError: if the model has no decoder with a list of layers.
    """
    seen = ResidualStates()

    def before(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        seen._see(0, args[0] if args else kwargs["hidden_states"])

    with after_layers(model, lambda layer, states_BSD: seen._see(layer + 1, states_BSD)) as layers:
        seen.layers = len(layers)
        with layers[0].register_forward_pre_hook(before, with_kwargs=True):
            yield seen
