"""Exact scores of continuations by an autoregressive model: one forward over context and continuation."""

# B rows of a forward, S their longest text, Q columns with a wanted position, M wanted positions, V vocabulary
from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from sinklab.evaluation.clean_pass import asks_clean_pass
from sinklab.evaluation.likelihood_requests import Request
from sinklab.evaluation.masked_scores import MOST_LOGITS, at_least_float32, check_numbers
from sinklab.evaluation.scoring_edits import edited
from sinklab.models import Loaded
from sinklab.probing import Edit


def causal_scores(
    loaded: Loaded, requests: Sequence[Request], batch: int, *, edits: Sequence[Edit] = (), seed: int = 0
) -> Iterator[tuple[Request, float, bool]]:
    """Requests in the order given, Σ log p (nats), and whether each token is the likeliest one.

    The last token of a text is not read, as nothing follows it. With edits a clean pass over the same row comes first.
    """
    model: Any = loaded.model
    rows: list[Request] = []
    for request in requests:
        if rows and (len(rows) == batch or _logits([*rows, request], model.config.vocab_size) > MOST_LOGITS):
            yield from _scored(loaded, rows, edits, seed)
            rows = []
        rows.append(request)
    if rows:
        yield from _scored(loaded, rows, edits, seed)


def _columns(rows: Sequence[Request]) -> range:
    """Columns among which all wanted positions lie: position i predicts token i + 1."""
    return range(min(len(row.context) for row in rows) - 1, max(row.length for row in rows) - 1)


def _logits(rows: Sequence[Request], vocabulary: int) -> int:
    return len(rows) * len(_columns(rows)) * vocabulary


@torch.inference_mode()
def _scored(
    loaded: Loaded, rows: Sequence[Request], edits: Sequence[Edit], seed: int
) -> Iterator[tuple[Request, float, bool]]:
    model: Any = loaded.model
    shape = len(rows), max(row.length for row in rows) - 1
    ids_BS, next_BS = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
    wanted_BS, real_BS = torch.zeros(shape, dtype=torch.bool), torch.zeros(shape, dtype=torch.bool)
    for number, row in enumerate(rows):
        text, end = torch.tensor(row.context + row.continuation), row.length - 1
        ids_BS[number, :end], next_BS[number, :end] = text[:-1], text[1:]
        wanted_BS[number, len(row.context) - 1 : end] = True
        real_BS[number, :end] = True
    columns_Q = torch.tensor(_columns(rows))
    logits_BQV = _evaluate(model, ids_BS, real_BS, columns_Q, edits, [(seed, row.group, 0) for row in rows])
    wanted_BQ, labels_BQ = wanted_BS[:, columns_Q], next_BS[:, columns_Q]
    for number, row in enumerate(rows):
        logits_LV = at_least_float32(logits_BQV[number, wanted_BQ[number].to(logits_BQV.device)])
        labels_L = labels_BQ[number, wanted_BQ[number]].to(logits_LV.device)
        logp_L = logits_LV.log_softmax(-1).gather(1, labels_L[:, None])[:, 0]
        check_numbers(loaded, logp_L)
        yield row, float(logp_L.double().sum()), bool((logits_LV.argmax(-1) == labels_L).all())


def _evaluate(
    model: Any,
    ids_BS: Tensor,
    real_BS: Tensor,
    columns_Q: Tensor,
    edits: Sequence[Edit],
    places: Sequence[tuple[int, ...]],
) -> Tensor:
    given: dict[str, Any] = {"input_ids": ids_BS.to(model.device), "use_cache": False}
    if not bool(real_BS.all()):
        given["attention_mask"] = real_BS.long().to(model.device)
    with edited(model, edits, places) as log:
        if log is not None and asks_clean_pass(edits):
            with log.probing():
                model(**given, logits_to_keep=1)
        return model(**given, logits_to_keep=columns_Q).logits
