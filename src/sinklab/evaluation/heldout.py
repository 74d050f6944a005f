"""Masked-token loss on held-out text while sinks, or as many random columns, are hidden from every head."""

# R rows, B batch, S sequence, M masked positions
from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sinklab.data import pack, read_corpus
from sinklab.diffusion import corrupt, masked_token_loss, sample_times
from sinklab.models import Loaded
from sinklab.probing import MaskSinks, intervene


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


@contextmanager
def _edited(model: torch.nn.Module, k: int, control: str, seed: int) -> Iterator[Any]:
    if k == 0:
        yield None
        return
    # what was really taken away is not read here, and would cost a pass over the scores
    with intervene(model, MaskSinks(k=k, source="clean_pass", control=control, seed=seed), measure=False) as log:
        yield log


@torch.inference_mode()
def row_losses(
    loaded: Loaded, ids_RS: Tensor, *, k: int = 0, control: str = "sinks", seed: int = 0, batch: int = 16
) -> Tensor:
    """The masked-diffusion bound of each row, in nats per token (Eq. 3–4), under the same noise whatever k and control
    are.

    With k > 0 a clean pass over the same noisy text first finds, per row, layer and head, the k columns that receive
    most attention; the scored pass runs with them (or k random others) hidden from all queries.

    Returns:
        losses of shape (R,), float32.
    """
    model: Any = loaded.model
    generator = torch.Generator().manual_seed(seed)
    t_R = sample_times(ids_RS.shape[0], sampler="low_discrepancy", generator=generator)
    noisy_RS, masked_RS = corrupt(ids_RS, t_R, mask_id=model.config.mask_token_id, generator=generator)
    losses = []
    for start in range(0, ids_RS.shape[0], batch):
        part = slice(start, start + batch)
        noisy_BS, masked_BS = noisy_RS[part].to(model.device), masked_RS[part].to(model.device)
        # the seed moves on: the random control draws new columns for every batch
        with _edited(model, k, control, seed + start) as log:
            if log is not None:
                with log.probing():
                    model(noisy_BS, logits_to_keep=torch.zeros_like(masked_BS))
            logits_MV = model(noisy_BS, logits_to_keep=masked_BS).logits
        losses.append(masked_token_loss(logits_MV.cpu(), ids_RS[part], masked_RS[part], t_R[part], reduction="row"))
    return torch.cat(losses)


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
    tokens = text.ids_RS.numel()
    clean_R = row_losses(loaded, text.ids_RS, seed=seed)
    columns: dict[str, list[Any]] = {
        key: [] for key in ("k", "control", "loss", "stderr", "delta", "delta_stderr", "tokens", "bits_per_byte")
    }
    for k in sorted(set(ks) | {0}):
        for control in ("none",) if k == 0 else ("sinks", "random"):
            losses_R = clean_R if k == 0 else row_losses(loaded, text.ids_RS, k=k, control=control, seed=seed)
            delta_R = losses_R - clean_R
            mean = losses_R.mean().item()
            values = (k, control, mean, _stderr(losses_R), delta_R.mean().item(), _stderr(delta_R), tokens)
            for key, value in zip(columns, values, strict=False):
                columns[key].append(value)
            columns["bits_per_byte"].append(mean * tokens / math.log(2) / text.size if k == 0 else math.nan)
            (progress or nullcontext)()
    return columns


def _stderr(values_R: Tensor) -> float:
    return values_R.std().item() / math.sqrt(values_R.numel()) if values_R.numel() > 1 else math.nan
