"""Loss of each row of text while columns are hidden that a clean pass over the same row has chosen; for any model."""

# R rows, B batch, H query heads, S sequence, M masked positions or columns taken away, V vocabulary
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from sinklab.diffusion import corrupt, masked_token_loss, sample_times
from sinklab.models import Loaded
from sinklab.probing import AttentionCall, InterventionLog, Listener, MaskSinks, intervene
from sinklab.probing.choosing import Chooser, Standing, flags
from sinklab.probing.removing import restricted

BATCH = 16
Choice = tuple[int, str]
"""k columns and the control of `MaskSinks` that says which; k = 0 hides nothing."""


@dataclass(frozen=True)
class HiddenLosses:
    """What rows of text cost, and what was hidden."""

    losses_R: Tensor
    """Nats per token, float32."""
    mass: float
    """Share of attention (0 to 1) that the hidden columns held in the clean pass: mean over rows, layers and heads; 0
    where nothing was hidden."""


@torch.inference_mode()
def hidden_losses(
    loaded: Loaded,
    ids_RS: Tensor,
    choices: Sequence[Choice],
    *,
    seed: int = 0,
    batch: int = BATCH,
    progress: Callable[[], object] | None = None,
) -> list[HiddenLosses]:
    """Loss of each row for each choice of columns to hide per row, layer and query head.

    A diffusion model is scored by its bound (arXiv 2601.19657, Eq. 3–4) under noise that depends on the seed alone, an
    autoregressive one by the mean of its next-token losses (the first token of a row is given). One clean pass over a
    row finds how much attention its columns receive; then each choice is scored with its columns hidden from all
    queries. In a causal model a column is hidden from later queries only: its own position goes on seeing it, so no
    query is left without a key.

    Args:
        loaded: the model.
        ids_RS: rows of text, all of one length.
        choices: what to hide.
        seed: of the noise and of the random control, which draws new columns for every batch.
        batch: rows per forward.
        progress: called after every scored batch of every choice.

    Raises:
        ValueError: for a k that the rows have not enough keys for, and a control that is not known.
    """
    columns = _Columns(is_causal=loaded.family != "diffusion")
    losses: list[list[Tensor]] = [[] for _ in choices]
    masses = [0.0] * len(choices)
    parts = _noisy_parts if loaded.family == "diffusion" else _whole_parts
    # without columns to hide nobody has to watch
    edits = [columns] if any(k for k, _ in choices) else []
    for start, score in parts(loaded, ids_RS, seed, batch):
        with intervene(loaded.model, *edits, measure=False) as log:
            with log.probing():
                clean_B = score()
            for index, (k, control) in enumerate(choices):
                if k == 0:
                    losses[index].append(clean_B)
                else:
                    columns.choose(MaskSinks(k=k, source="clean_pass", control=control, seed=seed + start))
                    losses[index].append(score())
                    masses[index] += columns.mass * len(clean_B) / len(ids_RS)
                if progress is not None:
                    progress()
    return [HiddenLosses(torch.cat(rows), mass) for rows, mass in zip(losses, masses, strict=True)]


def _noisy_parts(loaded: Loaded, ids_RS: Tensor, seed: int, batch: int) -> Iterator[tuple[int, Callable[[], Tensor]]]:
    """Number of the first row of each batch, and what scores the batch: the masked-token bound of each row."""
    model: Any = loaded.model
    generator = torch.Generator().manual_seed(seed)
    t_R = sample_times(ids_RS.shape[0], sampler="low_discrepancy", generator=generator)
    noisy_RS, masked_RS = corrupt(ids_RS, t_R, mask_id=model.config.mask_token_id, generator=generator)
    for start in range(0, ids_RS.shape[0], batch):
        part = slice(start, start + batch)

        def score(part: slice = part) -> Tensor:
            noisy_BS, masked_BS = noisy_RS[part].to(model.device), masked_RS[part].to(model.device)
            logits_MV = model(noisy_BS, logits_to_keep=masked_BS).logits
            return masked_token_loss(logits_MV.cpu(), ids_RS[part], masked_RS[part], t_R[part], reduction="row")

        yield start, score


def _whole_parts(loaded: Loaded, ids_RS: Tensor, seed: int, batch: int) -> Iterator[tuple[int, Callable[[], Tensor]]]:
    """The same for a causal model: the mean next-token loss of each row; it has no noise to seed."""
    model: Any = loaded.model
    for start in range(0, ids_RS.shape[0], batch):

        def score(start: int = start) -> Tensor:
            ids_BS = ids_RS[start : start + batch].to(model.device)
            logits_BSV = model(ids_BS, use_cache=False).logits
            # row by row: float32 logits of the whole batch would double the memory
            rows = zip(logits_BSV, ids_BS, strict=True)
            return torch.stack([cross_entropy(row_SV[:-1].float(), ids_S[1:]) for row_SV, ids_S in rows]).cpu()

        yield start, score


class _Columns(Listener):
    """An edit that remembers how keys stood in the clean pass and then hides what is chosen from that, again and again.

    What `MaskSinks(source="clean_pass")` hides, without a clean pass for each choice; in a causal model every query
    goes on seeing its own position.
    """

    def __init__(self, *, is_causal: bool) -> None:
        self.is_causal = is_causal
        self.mass = 0.0

    def editor(self, log: InterventionLog, forwards_per_step: int) -> Listener:
        self.log = log
        self.standings: dict[str, Standing] = {}
        self.gone: dict[str, Tensor] = {}
        return self

    def observe(self, call: AttentionCall) -> None:
        if self.log.is_probing:
            heads = list(range(call.query_BHQD.shape[1]))
            self.standings[call.layer] = Standing.of(call, "received", heads, self.log.note_prefix(call))

    def choose(self, options: MaskSinks) -> None:
        """Hide these from now on. Raises ValueError where there are too few keys."""
        chooser = Chooser(options, self.log)
        masses = []
        for layer, standing in self.standings.items():
            columns_BHM, mass_BH = chooser.choose(standing, None)
            self.gone[layer] = flags(columns_BHM, standing.received_BHS.shape[-1])
            masses.append(mass_BH.float().mean())
        self.mass = float(torch.stack(masses).mean())

    def edit(self, call: AttentionCall) -> AttentionCall:
        if self.log.is_probing:
            return call
        keep_BHQS = ~self.gone[call.layer].unsqueeze(2)
        if self.is_causal:
            keep_BHQS = keep_BHQS | torch.eye(keep_BHQS.shape[-1], dtype=torch.bool, device=keep_BHQS.device)
        return restricted(call, keep_BHQS)[0]
