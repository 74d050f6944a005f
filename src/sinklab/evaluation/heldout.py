"""Masked-token loss on held-out text while sinks, or as many random columns, are hidden from every head."""

# R rows, S sequence
from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from sinklab.data import pack, read_corpus
from sinklab.evaluation.hidden_columns import BATCH, Choice, hidden_losses
from sinklab.models import Loaded


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
    tokens = text.ids_RS.numel()
    choices: list[Choice] = [
        (k, control) for k in sorted({0, *ks}) for control in (("sinks", "random") if k else ("none",))
    ]
    scored = hidden_losses(loaded, text.ids_RS, choices, seed=seed, progress=_thinned(progress, text.ids_RS))
    clean_R = scored[0].losses_R
    columns: dict[str, list[Any]] = {
        key: [] for key in ("k", "control", "loss", "stderr", "delta", "delta_stderr", "tokens", "bits_per_byte")
    }
    for (k, control), one in zip(choices, scored, strict=True):
        delta_R = one.losses_R - clean_R
        mean = one.losses_R.mean().item()
        values = (k, control, mean, _stderr(one.losses_R), delta_R.mean().item(), _stderr(delta_R), tokens)
        for key, value in zip(columns, values, strict=False):
            columns[key].append(value)
        columns["bits_per_byte"].append(mean * tokens / math.log(2) / text.size if k == 0 else math.nan)
    return columns


def _thinned(progress: Callable[[], object] | None, ids_RS: Tensor) -> Callable[[], object]:
    """Called for every batch of a choice; tells as often as there are choices."""
    batches, calls = math.ceil(len(ids_RS) / BATCH), itertools.count(1)
    return lambda: progress() if next(calls) % batches == 0 and progress is not None else None


def _stderr(values_R: Tensor) -> float:
    return values_R.std().item() / math.sqrt(values_R.numel()) if values_R.numel() > 1 else math.nan
