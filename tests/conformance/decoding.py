"""The conformance suites of unmasking rules and caches."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from conformance.values import MASK_ID, check_text, tiny_model
from sinklab.core.attention.context import watching
from sinklab.core.registry import caches, unmasking_rules
from sinklab.core.sampling import Canvas, Step, denoise

PROMPTS = [[5, 6, 7, 8, 9], [11, 12], []]


def check_unmasking_rule(rule: Any) -> None:
    """Hold an unmasking rule to the contract of the denoising loop, with a tiny model.

    Text and JSON of it make it again; every open position is committed exactly once, masked before
    and inside the block; a rule that draws nothing writes a row of a batch as it writes the row
    alone.

    Args:
        rule: a value of a registered class, or its text.

    Raises:
        AssertionError: for the first of these that does not hold.
    """
    rule = check_text(unmasking_rules, rule)
    model = tiny_model().double()
    canvas = _canvas(PROMPTS)
    times_BS = torch.zeros_like(canvas.ids_BS)
    for step in _steps(model, canvas, rule=rule):
        assert not (step.committed_BS & ~step.masked_BS).any(), f"{rule} commits what was no mask"
        assert (step.confidence_BS.isnan() <= ~step.committed_BS).all(), (
            f"{rule} commits what was no candidate"
        )
        times_BS += step.committed_BS
    assert torch.equal(times_BS, canvas.open_BS.long()), (
        f"{rule} does not commit every open position exactly once"
    )
    if not rule.draws:
        _check_rows(model, rule=rule)


def check_cache(cache: Any) -> None:
    """Hold a cache to the contract of the denoising loop and of a session of a model, with a tiny
    model.

    Text and JSON of it make it again; the first evaluation of a block computes everything, so that
    one evaluation a block, or `refresh_every=1`, writes the same text as without a cache; the
    columns that run hold the block; a row of a batch is written as the row alone, and a watched
    model writes the same text as unwatched.

    Args:
        cache: a value of a registered class, or its text.

    Raises:
        AssertionError: for the first of these that does not hold.
    """
    cache = check_text(caches, cache)
    # an exact one is for attention in blocks
    blocks: dict[str, Any] = {}
    if cache.is_exact:
        blocks = {"block_length": 3}
    for nth in range(6):
        columns = cache.columns(4, 6, 9, nth)
        assert nth or columns is None, f"{cache} does not compute everything first"
        run = torch.arange(9)
        if isinstance(columns, Tensor):
            rising = columns.unique().tolist()
            assert columns.tolist() == rising, f"{cache}: columns rise, each is there once"
        if columns is not None:
            run = run[columns]
        assert {4, 5} <= {*run.tolist()}, (
            f"{cache} leaves out columns of the block at evaluation {nth}: it runs {run.tolist()}"
        )
    model = tiny_model(**blocks).double()
    canvas = _canvas(PROMPTS[:1])
    once = {"steps": 3}
    if blocks:
        once = {}
    cases = [(cache, once)]
    if "refresh_every" in {field.name for field in dataclasses.fields(cache)}:
        cases.append((dataclasses.replace(cache, refresh_every=1), {}))
    for one, how in cases:
        assert _written(model, canvas, cache=one, **how) == _written(model, canvas, **how), (
            f"{one} is not no cache"
        )
    with watching(model):
        watched = _written(model, canvas, cache=cache)
    assert watched == _written(model, canvas, cache=cache), (
        f"{cache} writes something else while the model is watched"
    )
    _check_rows(model, cache=cache)


def _canvas(prompts: list[list[int]]) -> Canvas:
    return Canvas.from_prompts(prompts, new_tokens=9, mask_id=MASK_ID, pad_id=0)


def _steps(model: Any, canvas: Canvas, **settings: Any) -> Iterator[Step]:
    attention_BS = None
    if not bool(canvas.attention_BS.all()):
        attention_BS = canvas.attention_BS
    denoiser = model.denoiser(attention_BS)
    return denoise(
        denoiser, canvas, block_length=3, generator=torch.Generator().manual_seed(0), **settings
    )


def _written(model: Any, canvas: Canvas, **settings: Any) -> list[list[int]]:
    *_, last = _steps(model, canvas, **settings)
    return last.ids_BS[:, -9:].tolist()


def _check_rows(model: Any, **settings: Any) -> None:
    together = _written(model, _canvas(PROMPTS), **settings)
    alone = [row for prompt in PROMPTS for row in _written(model, _canvas([prompt]), **settings)]
    assert together == alone, f"a row of a batch is not written as alone: {settings}"
