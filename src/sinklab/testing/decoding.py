"""The conformance suites of unmasking rules and caches."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import torch
from transformers import LlamaConfig

from sinklab.attention.context import watching
from sinklab.models.config import DiffusionLMConfig
from sinklab.models.diffusion_lm import DiffusionLM
from sinklab.registry import Registry, caches, unmasking_rules
from sinklab.sampling.canvas import Canvas
from sinklab.sampling.loop import Step, denoise


def check_unmasking_rule(rule: Any) -> None:
    """Hold an unmasking rule to what the denoising loop relies on, with a tiny model.

    Text and JSON of it make it again; every open position is committed exactly once, masked before and inside the
    block; a rule that draws nothing writes a row of a batch as it writes the row alone.

    Args:
        rule: a value of a registered class, or its text.

    Raises:
        AssertionError: for the first of these that does not hold.
    """
    rule = unmasking_rules.parse(rule)
    _check_texts(unmasking_rules, rule)
    model, prompts = _tiny_model(), [[5, 6, 7, 8, 9], [11, 12], []]
    canvas = Canvas.from_prompts(prompts, new_tokens=9, mask_id=_MASK, pad_id=0)
    times_BS = torch.zeros_like(canvas.ids_BS)
    for step in _steps(model, canvas, rule=rule):
        assert not (step.committed_BS & ~step.masked_BS).any(), f"{rule} commits what was no mask"
        assert (step.confidence_BS.isnan() <= ~step.committed_BS).all(), f"{rule} commits what was no candidate"
        times_BS += step.committed_BS
    assert torch.equal(times_BS, canvas.open_BS.long()), f"{rule} does not commit every open position exactly once"
    if not getattr(rule, "needs_generator", False):
        _check_rows(model, prompts, {"rule": rule})


def check_cache(cache: Any) -> None:
    """Hold a cache to what the denoising loop and a session of a model rely on, with a tiny model.

    Text and JSON of it make it again; the first evaluation of a block computes everything, so that one evaluation a
    block, or `refresh_every=1`, writes what is written without a cache; what runs holds the block; a row of a batch is
    written as the row alone, and a watched model writes what it writes unwatched.

    Args:
        cache: a value of a registered class, or its text.

    Raises:
        AssertionError: for the first of these that does not hold.
    """
    cache = caches.parse(cache)
    _check_texts(caches, cache)
    for nth in range(6):
        columns = cache.columns(4, 6, 9, nth)
        assert nth or columns is None, f"{cache} does not compute everything first"
        run = set(columns.tolist() if isinstance(columns, torch.Tensor) else range(9)[columns or slice(None)])
        assert {4, 5} <= run, f"{cache} leaves out columns of the block at evaluation {nth}: it runs {sorted(run)}"
    model, prompts = _tiny_model(), [[5, 6, 7, 8, 9], [11, 12], []]
    canvas = Canvas.from_prompts(prompts[:1], new_tokens=9, mask_id=_MASK)
    fresh = [cache] if not hasattr(cache, "refresh_every") else [dataclasses.replace(cache, refresh_every=1)]
    for one, how in [(cache, {"steps": 3}), *((one, {}) for one in fresh if one != cache)]:
        assert _written(model, canvas, cache=one, **how) == _written(model, canvas, **how), f"{one} is not no cache"
    with watching(model):
        watched = _written(model, canvas, cache=cache)
    assert watched == _written(model, canvas, cache=cache), f"{cache} writes something else while the model is watched"
    _check_rows(model, prompts, {"cache": cache})


_MASK = 40


def _tiny_model() -> DiffusionLM:
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "max_position_embeddings": 64,
    }
    backbone = LlamaConfig(vocab_size=41, num_attention_heads=4, num_key_value_heads=2, initializer_range=0.3, **sizes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = DiffusionLM(DiffusionLMConfig(backbone, mask_token_id=_MASK))
    return model.double().eval()


def _steps(model: DiffusionLM, canvas: Canvas, **settings: Any) -> Iterator[Step]:
    denoiser = model.denoiser(None if bool(canvas.attention_BS.all()) else canvas.attention_BS)
    return denoise(denoiser, canvas, block_length=3, generator=torch.Generator().manual_seed(0), **settings)


def _written(model: DiffusionLM, canvas: Canvas, **settings: Any) -> list[list[int]]:
    *_, last = _steps(model, canvas, **settings)
    return last.ids_BS[:, -9:].tolist()


def _check_rows(model: DiffusionLM, prompts: list[list[int]], settings: dict[str, Any]) -> None:
    canvases = [
        Canvas.from_prompts(rows, new_tokens=9, mask_id=_MASK, pad_id=0)
        for rows in (prompts, *([prompt] for prompt in prompts))
    ]
    together, *alone = (_written(model, canvas, **settings) for canvas in canvases)
    assert together == [row for rows in alone for row in rows], f"a row of a batch is not written as alone: {settings}"


def _check_texts(registry: Registry, value: Any) -> None:
    assert registry.parse(registry.as_text(value)) == value, f"the text {registry.as_text(value)!r} is another {value}"
    again = json.loads(json.dumps(registry.as_dict(value)))
    assert registry.parse(again) == value, f"the JSON object {again} is another {value}"
