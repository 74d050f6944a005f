"""Whether what a plug-in registers keeps the promises that every part of the package relies on:
`sinklab check FILE.py`. The suites are short and need nothing but the package; what the package
registers itself is held to more by its tests.
"""

# B rows, S positions
import dataclasses
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sinklab.core import registry
from sinklab.core.instrument import BlockKeys, TopKeys, intervene, trace
from sinklab.core.sinks import find_sinks
from sinklab.core.subject import Canvas, DiffusionLM, DiffusionLMConfig, denoise
from sinklab.lab.checkpoints import load
from sinklab.lab.records import open_run
from sinklab.lab.registry import studies

PROMPTS = [[5, 6, 7, 8, 9], [11, 12], []]


def check_text(known: registry.Registry, value: Any) -> Any:
    """Hold a registered value, or the one that a text stands for, to what run folders and the
    command line need, and return it: a frozen dataclass with a docstring, whose text is read as it
    is. AssertionError says which of these does not hold.
    """
    value = known.parse(value)
    kind: Any = type(value)
    assert dataclasses.is_dataclass(value) and kind.__doc__, "it is no dataclass with a docstring"
    assert kind.__dataclass_params__.frozen, "it can be changed; write @dataclass(frozen=True)"
    text = known.as_text(value)
    assert known.parse(text) == value, f"{text!r} is read as another value"
    return value


def check_rule(rule: Any) -> None:
    """A head is judged by itself, from arrays and tensors alike; padding is no sink."""
    received = np.random.default_rng(0).dirichlet(np.full(24, 0.1), size=(3, 4, 24)).sum(-2)
    whole = find_sinks(received, rule, 24)
    assert whole.dtype == bool and whole.shape == received.shape, "its answer is not key by key"
    unseen = np.full((3, 4, 2), np.nan)
    padded = find_sinks(np.concatenate([received, unseen], -1), rule, 24)
    same: dict[str, Any] = {
        "arrays and tensors get different answers": find_sinks(torch.tensor(received), rule, 24),
        "a head is judged by what other heads receive": [
            *(find_sinks(one[None], rule, 24)[0] for one in received)
        ],
        "padding (NaN) changes the answer": padded[..., :24],
    }
    for fault, found in same.items():
        assert np.array_equal(found, whole), fault
    assert not padded[..., 24:].any(), "padding (NaN) is a sink"


def _logits(model: Any) -> list[Tensor]:
    """Logits of three texts (2, 16), the same every time, with more and more of them masked."""
    generator = torch.Generator().manual_seed(0)
    ids_BS = torch.randint(3, model.config.vocab_size - 2, (2, 16), generator=generator)
    drawn_BS = torch.rand(ids_BS.shape, generator=generator)
    mask_id = model.config.mask_token_id
    return [
        model(ids_BS.masked_fill(drawn_BS < share, mask_id)).logits for share in (0.3, 0.5, 0.7)
    ]


@torch.no_grad()
def check_edit(edit: Any) -> None:
    """An edit changes what the model gives, the same each time, inside the block alone."""
    model = load("tiny").model
    before = _logits(model)
    with intervene(model, edit):
        edited = _logits(model)
    with intervene(model, edit), trace(model):
        again = _logits(model)
    assert all(map(torch.equal, edited, again)), "it does something else when it is recorded"
    assert all(map(torch.equal, before, _logits(model))), "the model stays edited after the block"
    assert not all(map(torch.equal, before, edited)), "it changes nothing"


def check_keys(field: str, value: Any) -> None:
    """A selector of keys, or their removal, as the edit that blocks keys uses it."""
    check_edit(dataclasses.replace(BlockKeys(TopKeys(1), when="now"), **{field: value}))


@torch.no_grad()
def check_statistic(statistic: Any) -> None:
    """Its array has the axes that it says, and a trace changes no output."""
    model, text = load("tiny").model, registry.statistics.as_text(statistic)
    with trace(model, ("received", text)) as recording:
        traced = _logits(model)
    assert all(map(torch.equal, traced, _logits(model))), "a trace changes what the model gives"
    array, dims = recording.array(text), recording.dims(text)
    heads = model.config.backbone.num_attention_heads
    sizes = {"step": 3, "batch": 2, "layer": len(model.model.layers), "head": heads, "key": 16}
    known = tuple(sizes.get(axis, size) for axis, size in zip(dims, array.shape, strict=True))
    assert array.shape == known, f"its shape is {array.shape} for the axes {dims}"


@torch.inference_mode()
def _check_saved(model: Any) -> None:
    ids_BS = torch.arange(8)[None]
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        again = load(folder).model(ids_BS).logits
    assert torch.equal(again, model(ids_BS).logits), "saved and loaded again it gives other logits"


def check_sink(kind: str) -> None:
    """Every tensor of it is trained, saved and loaded."""
    config = load("tiny").model.config
    config = DiffusionLMConfig(config.backbone, mask_token_id=2, sink_kind=kind, sink_count=2)
    model = DiffusionLM(config).eval()
    ids_BS = torch.arange(12)[None]
    model(ids_BS.masked_fill(ids_BS > 5, 2), labels=ids_BS).loss.backward()
    for name in config.sink.tensors:
        gradient = model.get_parameter(name).grad
        assert gradient is not None and gradient.any(), f"{name} gets no gradient"
    _check_saved(model)


def _written(model: Any, prompts: list[list[int]], **how: Any) -> tuple[Any, Tensor]:
    """Ids of nine new tokens, and how often each was committed."""
    mask_id, source = model.config.mask_token_id, torch.Generator().manual_seed(0)
    canvas = Canvas.from_prompts(prompts, new_tokens=9, mask_id=mask_id, pad_id=0)
    denoiser = model.denoiser(canvas.attention_mask)
    times_BS = torch.zeros_like(canvas.ids_BS)
    for step in denoise(denoiser, canvas, block_length=3, generator=source, **how):
        times_BS += step.committed_BS
    return step.ids_BS[:, -9:].tolist(), times_BS[:, -9:]


def check_decoding(option: str, value: Any) -> None:
    """An unmasking rule or a schedule commits each position once, a cache writes the same text if
    everything is computed at each step; without draws a row does not depend on the others.
    """
    model = load("tiny").model.double()
    if option == "cache" and value.is_exact:
        # a cache for attention in blocks
        model.config.block_length = 3
    elif option == "cache":
        whole = _written(model, PROMPTS, cache=value, steps=3)[0]
        assert whole == _written(model, PROMPTS, steps=3)[0], (
            "with one evaluation a block it writes another text than no cache"
        )
    rows, times_BS = _written(model, PROMPTS, **{option: value})
    assert (times_BS == 1).all(), "it does not commit each position once"
    if not getattr(value, "draws", False):
        alone = [_written(model, [prompt], **{option: value})[0][0] for prompt in PROMPTS]
        assert alone == rows, "a row of a batch depends on the others"


def check_study(name: str) -> None:
    """A run has tables, and what is lost of it is made again."""
    study = studies[name]()
    loaded = load("tiny") if study.model else None
    with tempfile.TemporaryDirectory() as place:
        run = open_run(study(loaded, Path(place, "run")))
        before = {one: run.table(one) for one in run.tables}
        assert before, "it writes no table"
        for file in run.info.files:
            (run.path / file).write_bytes(b"lost")
        again = open_run(study(loaded, run.path))
        for one, table in before.items():
            assert again.table(one).equals(table), f"what is lost of {one} is not made again"


SUITES: dict[str, Callable[..., None]] = {
    "rules": check_rule,
    "statistics": check_statistic,
    "interventions": check_edit,
    "selectors": partial(check_keys, "keys"),
    "removals": partial(check_keys, "how"),
    "unmasking_rules": partial(check_decoding, "rule"),
    "schedules": partial(check_decoding, "schedule"),
    "caches": partial(check_decoding, "cache"),
    "sinks": check_sink,
    "studies": check_study,
}
"""Registry to the suite of what is registered in it."""
NAMED = ("sinks", "studies")
"""Registries of classes that are checked by name; of the others a value is."""


def verdicts(file: Path, values: Sequence[str] = ()) -> Iterator[str]:
    """A line for each class that a file registers: it holds, or why not.

    Args:
        file: the plug-in, loaded already.
        values: texts of values to check with other options than the defaults.
    """
    asked = {text.partition(":")[0]: text for text in values}
    for group, suite in SUITES.items():
        known = registry.REGISTRIES[group]
        for name, kind in known.items():
            if getattr(sys.modules.get(kind.__module__), "__file__", "") != str(file.resolve()):
                continue
            given: Any = asked.get(name, name)
            verdict = "holds"
            try:
                if group not in NAMED:
                    given = check_text(known, given)
                suite(given)
            except Exception as error:  # a plug-in may fail in any way
                verdict = f"FAILS: {type(error).__name__}: {error}"
            yield f"{known.what} {name}: {verdict}"
