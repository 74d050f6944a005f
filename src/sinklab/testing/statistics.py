"""The conformance suite of statistics."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from sinklab.attention.received import attention_statistics
from sinklab.checkpoints.loading import load
from sinklab.probing.recording import Recording
from sinklab.probing.statistics import Statistic
from sinklab.probing.tracing import trace
from sinklab.registry import statistics
from sinklab.sampling.canvas import Canvas
from sinklab.testing.values import check_text_and_json


def check_statistic(statistic: Statistic | str, model: Any = None) -> None:
    """Hold a registered statistic to what traces and run folders rely on.

    It is written as text and JSON and read again; its array has the announced axes, with numbers wherever a query ran;
    they depend neither on the chunks that attention is computed in nor on the other heads that are recorded; a trace
    changes no output.

    Args:
        statistic: a value or its text.
        model: a `DiffusionLM`; None for the packaged "tiny".

    Raises:
        AssertionError: naming what does not hold.
        ValueError: if its class is not registered, or the tensor that it gives has other axes than it says.
    """
    statistic = statistics.parse(statistic)
    check_text_and_json(statistics, statistic)
    name, model = statistics.as_text(statistic), load("tiny").model.eval() if model is None else model
    mask_id = model.config.mask_token_id
    canvas = Canvas.from_prompts([[5, 6, 7], [8, 9, 10, 11, 12]], new_tokens=11, mask_id=mask_id, pad_id=0)
    logits, recording = _traced(model, canvas, name)
    with torch.no_grad():
        plain = model(canvas.ids_BS, attention_mask=canvas.attention_BS.long()).logits
    assert torch.equal(plain, logits), f"{name} changes what the model gives"
    array, config = torch.from_numpy(recording.array(name)), model.config.backbone
    sizes = {"step": 1, "batch": 2, "layer": config.num_hidden_layers, "head": config.num_attention_heads}
    sizes |= {"state": 3, "key": recording.received[0].shape[-1], "position": canvas.ids_BS.shape[1]}
    dims = recording.dims(name)
    expected = [sizes.get(axis, size) for axis, size in zip(dims, array.shape, strict=True)]
    assert list(array.shape) == expected, f"{name} has the shape {tuple(array.shape)} for the axes {dims}"
    assert array.isfinite().all(), f"{name} has numbers that are not finite where every query runs"
    _, chunked = _traced(model, canvas, name, chunk=3)
    assert torch.allclose(torch.from_numpy(chunked.array(name)), array, rtol=1e-4, atol=1e-5), (
        f"{name} depends on chunks"
    )
    if "head" in dims:
        _, some = _traced(model, canvas, name, heads=(1, 0))
        chosen = array.index_select(dims.index("head"), torch.tensor([1, 0]))
        alike = torch.allclose(torch.from_numpy(some.array(name)), chosen, rtol=1e-4, atol=1e-5)
        assert alike, f"{name} of some heads differs from the same heads among all"


@torch.no_grad()
def _traced(
    model: Any, canvas: Canvas, name: str, *, chunk: int | None = None, heads: Any = None
) -> tuple[Tensor, Recording]:
    small = partial(attention_statistics, chunk=chunk)
    patch = mock.patch("sinklab.probing.statistics.attention_statistics", small) if chunk else nullcontext()
    with patch, trace(model, ("received", name), canvas=canvas, heads=heads) as recording:
        logits = model(canvas.ids_BS, attention_mask=canvas.attention_BS.long()).logits
    return logits, recording
