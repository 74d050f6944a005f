"""Masked-token loss on held-out text while sinks, or as many random columns, are hidden from every head."""

# R rows, B batch, H query heads, S sequence, M masked positions or columns taken away, V vocabulary
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from sinklab.checkpoints.loading import Loaded
from sinklab.data.corpora import read_corpus
from sinklab.data.rows import pack, row_start
from sinklab.diffusion import corrupt, masked_token_loss, sample_times
from sinklab.probing.call import AttentionCall
from sinklab.probing.intervention import InterventionLog, intervene
from sinklab.probing.interventions.base import CallSite
from sinklab.probing.interventions.keys import KeyScores, choose, seeded_draw
from sinklab.probing.interventions.mask_sinks import MaskSinks
from sinklab.probing.interventions.removal import as_flags, restricted
from sinklab.probing.tap import Listener

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
    queries. In a causal model a column is hidden from later queries only: its own position still sees it, so no
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
    score = (_bound_of if loaded.family == "diffusion" else _next_token_loss_of)(loaded, ids_RS, seed)
    # without columns to hide no hook is needed
    edits = [columns] if any(k for k, _ in choices) else []
    for start in range(0, len(ids_RS), batch):
        part = slice(start, start + batch)
        with intervene(loaded.model, *edits, measure=False) as log:
            with log.probing():
                clean_B = score(part)
            for index, (k, control) in enumerate(choices):
                if k == 0:
                    losses[index].append(clean_B)
                else:
                    columns.choose(MaskSinks(k=k, source="clean_pass", control=control, seed=seed + start))
                    losses[index].append(score(part))
                    masses[index] += columns.mass * len(clean_B) / len(ids_RS)
                if progress is not None:
                    progress()
    return [HiddenLosses(torch.cat(rows), mass) for rows, mass in zip(losses, masses, strict=True)]


def _bound_of(loaded: Loaded, ids_RS: Tensor, seed: int) -> Callable[[slice], Tensor]:
    """What gives the masked-token bound of each of some rows."""
    model: Any = loaded.model
    generator = torch.Generator().manual_seed(seed)
    t_R = sample_times(ids_RS.shape[0], sampler="low_discrepancy", generator=generator)
    # the start token of a row is given, as it was in training
    start = len(row_start(loaded.tokenizer)) if loaded.tokenizer else 0
    maskable_RS = (torch.arange(ids_RS.shape[1]) >= start).expand(ids_RS.shape)
    noisy_RS, masked_RS = corrupt(
        ids_RS, t_R, mask_id=model.config.mask_token_id, maskable_BS=maskable_RS, generator=generator
    )
    denoiser = model.denoiser()

    def score(part: slice) -> Tensor:
        logits_MV = denoiser(noisy_RS[part].to(model.device), masked_RS[part].to(model.device))
        return masked_token_loss(
            logits_MV.cpu(), ids_RS[part], masked_RS[part], t_R[part], maskable_BS=maskable_RS[part], reduction="row"
        )

    return score


def _next_token_loss_of(loaded: Loaded, ids_RS: Tensor, seed: int) -> Callable[[slice], Tensor]:
    """The same for a causal model: the mean next-token loss of each row; it has no noise to seed."""
    model: Any = loaded.model

    def score(part: slice) -> Tensor:
        ids_BS = ids_RS[part].to(model.device)
        logits_BSV = model(ids_BS, use_cache=False).logits
        # row by row: float32 logits of the whole batch would double the memory
        rows = zip(logits_BSV, ids_BS, strict=True)
        return torch.stack([cross_entropy(row_SV[:-1].float(), ids_S[1:]) for row_SV, ids_S in rows]).cpu()

    return score


class _Columns(Listener):
    """An edit that remembers how keys stood in the clean pass and then hides what is chosen from that, again and again.

    What `MaskSinks(source="clean_pass")` hides, without a clean pass for each choice; in a causal model every query
    still sees its own position.
    """

    def __init__(self, *, is_causal: bool) -> None:
        self.is_causal = is_causal
        self.mass = 0.0

    def handler(self, log: InterventionLog, forwards_per_step: int) -> Listener:
        self.log, self.standings, self.gone = log, dict[str, KeyScores](), dict[str, Tensor]()
        return self

    def observe(self, call: AttentionCall, out: Tensor) -> None:
        if self.log.is_probing:
            heads = list(range(call.query_BHQD.shape[1]))
            self.standings[call.layer] = KeyScores.of(call, "received", CallSite(heads, self.log.prefix or 0, 0))

    def choose(self, options: MaskSinks) -> None:
        """Hide these from now on. Raises ValueError where there are too few keys."""
        draw = seeded_draw(options.seed)
        masses = []
        for layer, standing in self.standings.items():
            choice = choose(options, replace(standing, draw=draw))
            self.gone[layer] = as_flags(choice.columns_BHM, standing.received_BHS.shape[-1])
            masses.append(choice.mass_BH.float().mean())
        self.mass = float(torch.stack(masses).mean())

    def edit(self, call: AttentionCall) -> AttentionCall:
        if self.log.is_probing:
            return call
        keep_BHQS = ~self.gone[call.layer].unsqueeze(2)
        if self.is_causal:
            keep_BHQS = keep_BHQS | torch.eye(keep_BHQS.shape[-1], dtype=torch.bool, device=keep_BHQS.device)
        return restricted(call, keep_BHQS)[0]


@dataclass(frozen=True)
class HeldoutRows:
    """Rows of text the model has not seen, and how many bytes they stand for."""

    ids_RS: Tensor
    size: int
    """Bytes of UTF-8 text."""


def heldout_rows(loaded: Loaded, source: str | Path, *, rows: int = 48, length: int = 256) -> HeldoutRows:
    """The first rows of a corpus, packed with the model's tokenizer.

    Raises:
        ValueError: if the corpus cannot be read or does not fill one row.
    """
    ids_RS = pack(read_corpus(source), loaded.needed_tokenizer(), length)[:rows].long()
    texts = loaded.needed_tokenizer().batch_decode(ids_RS.tolist(), skip_special_tokens=True)
    return HeldoutRows(ids_RS, sum(len(text.encode()) for text in texts))


def check_heldout(loaded: Loaded, *, rows: int, length: int, ks: Iterable[int]) -> None:
    """What can be wrong with a held-out curve, before any text is read.

    Raises:
        ValueError: for no rows, rows longer than the model's context, and a k for which k sinks and k other columns do
            not both fit a row.
    """
    config: Any = loaded.model.config
    if rows < 1:
        raise ValueError(f'heldout_rows must be at least 1, but is {rows}; heldout="" skips the held-out loss')
    context = config.text_positions
    if not 1 <= length <= context:
        raise ValueError(f"heldout_length must be 1 to {context}, the context of {loaded.name}, but is {length}")
    keys = length + config.sink_count
    if wrong := [k for k in ks if k < 0 or 2 * k > keys]:
        raise ValueError(
            f"ks are numbers of hidden sinks, and as many other columns must be left as controls: {wrong[0]} does not "
            f"fit {keys} keys; choose 0 to {keys // 2}"
        )


def row_losses(
    loaded: Loaded, ids_RS: Tensor, *, k: int = 0, control: str = "sinks", seed: int = 0, batch: int = BATCH
) -> Tensor:
    """The loss of each row in nats per token, under the same noise whatever k and control are; see `hidden_losses`.

    With k > 0 a clean pass over the same noisy text first finds, per row, layer and head, the k columns that receive
    most attention; the scored pass runs with them (or k random others) hidden from all queries.

    Returns:
        losses of shape (R,), float32.
    """
    return hidden_losses(loaded, ids_RS, [(k, control)], seed=seed, batch=batch)[0].losses_R


def heldout_curve(
    loaded: Loaded,
    text: HeldoutRows,
    *,
    ks: Iterable[int] = (0, 1, 5, 10),
    seed: int = 0,
    progress: Callable[[], object] | None = None,
) -> dict[str, list[Any]]:
    """Held-out loss over the number of hidden sinks, with random columns as control, as columns of the table
    ``heldout``.

    ``loss`` is in nats per token and ``stderr`` its standard error over rows; ``delta`` is the paired difference to k
    = 0 with ``delta_stderr`` (the noise is the same, so it is much smaller). ``bits_per_byte`` is given for k = 0.

    Raises:
        ValueError: if a k is not smaller than the number of keys, or the model is no diffusion model.
    """
    if loaded.family != "diffusion":
        raise ValueError(f"the masked-token loss is defined for diffusion models, but {loaded.name} is {loaded.family}")
    tokens, batches, calls = text.ids_RS.numel(), math.ceil(len(text.ids_RS) / BATCH), itertools.count(1)

    def told() -> None:
        if next(calls) % batches == 0 and progress is not None:
            progress()

    choices: list[Choice] = [
        (k, control) for k in sorted({0, *ks}) for control in (("sinks", "random") if k else ("none",))
    ]
    scored = hidden_losses(loaded, text.ids_RS, choices, seed=seed, progress=told)
    rows = []
    for (k, control), one in zip(choices, scored, strict=True):
        delta_R = one.losses_R - scored[0].losses_R
        mean = one.losses_R.mean().item()
        row = {"k": k, "control": control, "loss": mean, "stderr": _stderr(one.losses_R)}
        row |= {"delta": delta_R.mean().item(), "delta_stderr": _stderr(delta_R), "tokens": tokens}
        rows.append(row | {"bits_per_byte": mean * tokens / math.log(2) / text.size if k == 0 else math.nan})
    return {name: [row[name] for row in rows] for name in rows[0]}


def _stderr(values_R: Tensor) -> float:
    return values_R.std().item() / math.sqrt(values_R.numel()) if values_R.numel() > 1 else math.nan
