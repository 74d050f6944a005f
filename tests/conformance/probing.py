"""The conformance suites of sink rules, interventions and statistics."""

# B batch, L layers, H query heads, S keys, M keys taken away
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from sinklab.core.attention.received import attention_statistics
from sinklab.core.instrument import (
    BlockKeys,
    Intervention,
    InterventionLog,
    Recording,
    Statistic,
    intervene,
    trace,
)
from sinklab.core.registry import interventions, rules, statistics
from sinklab.core.sinks import Rule, find_sinks
from sinklab.core.subject.canvas import Canvas
from sinklab.lab.checkpoints.loading import load
from sinklab.lab.checks import check_text
from sinklab.lab.scoring.hidden_states import state_records


def check_rule(rule: Rule | str) -> None:
    """Hold a registered sink rule to the contract that every part of the lab relies on.

    The answer is boolean, of the same kind (array or tensor) and shape as the received attention;
    heads and steps are judged each by itself; a key that is padding, or seen by no query, is never
    a sink and changes nothing; ``threshold``, if there is one and it does not refuse, is the value
    a sink exceeds; the rule is written as text and as JSON and read again.

    Args:
        rule: a value, such as ``Excess(3.0)``, or its text; one that needs at most 24 keys.

    Raises:
        AssertionError: naming the part that does not hold.
        ValueError: if the rule's class is not registered.
    """
    judge: Rule = check_text(rules, rule)
    keys, random = 24, np.random.default_rng(0)
    received = random.dirichlet(np.full(keys, 0.1), size=(2, 3, 4, keys)).sum(-2)
    given = received.copy()
    whole = find_sinks(received, judge, keys)
    np.testing.assert_array_equal(received, given, "the rule changes what it is given")
    _same_answer(
        whole,
        find_sinks(torch.from_numpy(received), judge, keys).numpy(),
        "numpy and torch disagree",
    )
    half = torch.from_numpy(received).half()
    answer = find_sinks(half.double().numpy(), judge, keys)
    _same_answer(find_sinks(half, judge, keys).numpy(), answer, "half precision is not widened")

    turned = find_sinks(received.transpose(2, 0, 1, 3), judge, keys)
    _same_answer(turned, whole.transpose(2, 0, 1, 3), "the order of the leading axes matters")
    alone = np.array([find_sinks(row, judge, keys) for row in received.reshape(-1, keys)])
    _same_answer(alone.reshape(whole.shape), whole, "a head is judged by what other heads receive")

    padded = np.concatenate([received, np.full((*whole.shape[:-1], 3), np.nan)], -1)
    _same_answer(
        find_sinks(padded, judge, keys)[..., :keys], whole, "padding (NaN) changes the answer"
    )
    unseen = np.concatenate([received, np.full((*whole.shape[:-1], 3), 2.0 * keys)], -1)
    found = find_sinks(unseen, judge, np.array([keys] * keys + [0, 0, np.nan]))
    _same_answer(found[..., :keys], whole, "keys that no query sees change the answer")
    assert not found[..., keys:].any(), "a key that no query sees is a sink"
    assert not find_sinks(np.full_like(padded, np.nan), judge, keys).any(), (
        "padding (NaN) is a sink"
    )

    _check_threshold(judge, received, whole)


def _same_answer(found: Any, expected: Any, message: str) -> None:
    assert found.dtype == bool and found.shape == expected.shape, (
        f"{message}: {found.dtype}, {found.shape}"
    )
    np.testing.assert_array_equal(found, expected, message)


def _check_threshold(rule: Any, received: np.ndarray, whole: np.ndarray) -> None:
    try:
        limit = rule.threshold(received.shape[-1])
    except (AttributeError, ValueError):
        # there is none, or it depends on the scores
        return
    _same_answer(received > limit, whole, "the sinks are not those above the threshold")


@torch.no_grad()
def check_intervention(edit: Intervention | str, model: Any = None) -> None:
    """Hold a registered intervention to the contract of traces, studies and run folders.

    It is written as text and read again; it changes the model's outputs inside the block, twice the
    same way, measured or not; afterwards weights, outputs and hooks are as before; its log names
    it, counts the affected keys, and a key that it blocks for all queries receives nothing.

    Args:
        edit: a value such as ``MaskSinks(k=2)``, or its text, that acts within three forwards of 16
            tokens.
        model: a `DiffusionLM`; None for the packaged "tiny".

    Raises:
        AssertionError: naming the part that does not hold.
        ValueError: if its class is not registered.
    """
    edit = check_text(interventions, edit)
    name, model = interventions.as_text(edit), load("tiny").model.eval() if model is None else model
    hooks = _hooks(model)
    weights = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    plain = [model(ids_BS).logits for ids_BS in _three_texts(model)]
    logits, recording, log = _edited(model, edit)
    assert all(one.isfinite().all() for one in logits), f"{name} gives logits that are not finite"
    for measure in (True, False):
        again, *_ = _edited(model, edit, measure=measure)
        assert all(map(torch.equal, again, logits)), (
            f"{name}: outputs differ from run to run, with measure={measure}"
        )
    after = [model(ids_BS).logits for ids_BS in _three_texts(model)]
    assert all(map(torch.equal, plain, after)), (
        f"{name} changes what the model gives after the block"
    )
    kept = all(torch.equal(tensor, weights[key]) for key, tensor in model.state_dict().items())
    assert kept, f"{name} changes the weights"
    assert _hooks(model) == hooks, f"{name} leaves a hook"
    assert not all(map(torch.equal, plain, logits)), f"{name} changes no output"
    _check_log(name, edit, log, recording)


def _three_texts(model: Any) -> list[Tensor]:
    """Ids (2, 16) of three steps, among them masks and one row of its own, the same every time."""
    generator = torch.Generator().manual_seed(0)
    whole_BS = torch.randint(1, model.config.vocab_size - 2, (2, 16), generator=generator)
    return [
        whole_BS.masked_fill(
            torch.rand(whole_BS.shape, generator=generator) < share, model.config.mask_token_id
        )
        for share in (0.7, 0.5, 0.3)
    ]


def _hooks(model: Any) -> int:
    return sum(
        len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules()
    )


def _edited(
    model: Any, edit: Any, *, measure: bool = True
) -> tuple[list[Tensor], Recording, InterventionLog]:
    """Logits, recording and log of three forwards under an edit."""
    logits = []
    with intervene(model, edit, measure=measure) as log, trace(model) as recording:
        for ids_BS in _three_texts(model):
            if getattr(edit, "when", "") == "clean":
                with log.probing():
                    model(ids_BS)
            logits.append(model(ids_BS).logits)
    return logits, recording, log


def _check_log(name: str, edit: Any, log: InterventionLog, recording: Recording) -> None:
    entries = [*log.removals, *state_records(log)]
    assert log.forwards == 3 and entries, (
        f"{name}: {len(entries)} entries in the log of {log.forwards} steps"
    )
    # an edit that leaves open when keys are chosen is logged with what was used
    given = replace(edit, when="previous") if getattr(edit, "when", "") is None else edit
    for entry in log.removals:
        assert entry.edit == given and entry.label == interventions.name_of(edit), (
            f"{name}: logged as {entry.label}"
        )
        columns_BLHM, keys_BLH = entry.columns_BLHM, entry["keys"]
        rows = (len(columns_BLHM), len(entry.layers), len(entry.heads))
        shares = [entry["held"], entry["removed"], entry["overlap"]]
        for part in (*shares, entry["left"], keys_BLH, columns_BLHM.sum(-1)):
            assert part.shape == rows, f"{name}: shapes in the log"
        for share_BLH in shares:
            known = share_BLH[~share_BLH.isnan()]
            assert ((known > -1e-4) & (known < 1 + 1e-4)).all(), (
                f"{name}: a share in the log outside 0 to 1"
            )
        if columns_BLHM.shape[-1]:
            assert torch.equal((columns_BLHM >= 0).sum(-1), keys_BLH.long()), (
                f"{name}: columns and counts differ"
            )
            if isinstance(edit, BlockKeys) and edit.how.blocks and not edit.by_query:
                received_BLHS = recording.received[entry.forward][:, list(entry.layer_numbers)][
                    :, :, list(entry.heads)
                ]
                left_BLHM = received_BLHS.gather(-1, columns_BLHM.clamp(min=0))
                assert not left_BLHM[columns_BLHM >= 0].any(), (
                    f"{name}: keys that are logged as gone receive attention"
                )


@torch.no_grad()
def check_statistic(statistic: Statistic | str, model: Any = None) -> None:
    """Hold a registered statistic to the contract of traces and run folders.

    It is written as text and read again; its array has the announced axes, with numbers for every
    query that ran; they depend neither on the chunks that attention is computed in nor on the other
    heads and statistics that are recorded, nor do these on them; a trace changes no output.

    Args:
        statistic: a value or its text.
        model: a `DiffusionLM`; None for the packaged "tiny".

    Raises:
        AssertionError: naming the part that does not hold.
        ValueError: if its class is not registered, or the tensor that it gives has other axes than
            it says.
    """
    value = check_text(statistics, statistic)
    name, model = (
        statistics.as_text(value),
        load("tiny").model.eval() if model is None else model,
    )
    mask_id = model.config.mask_token_id
    canvas = Canvas.from_prompts(
        [[5, 6, 7], [8, 9, 10, 11, 12]], new_tokens=11, mask_id=mask_id, pad_id=0
    )
    logits, recording = _traced(model, canvas, name)
    plain = model(canvas.ids_BS, attention_mask=canvas.attention_BS.long()).logits
    assert torch.equal(plain, logits), f"{name} changes what the model gives"
    array, config = torch.from_numpy(recording.array(name)), model.config.backbone
    received = _traced(model, canvas, "value_norm")[1].array("received")
    assert np.allclose(recording.array("received"), received, 1e-4, 1e-5), (
        f"{name} changes in place what other statistics read"
    )
    sizes = {
        "step": 2,
        "batch": 2,
        "layer": config.num_hidden_layers,
        "head": config.num_attention_heads,
        "state": 3,
        "key": recording.received[0].shape[-1],
        "position": canvas.ids_BS.shape[1],
    }
    dims = recording.dims(name)
    expected = [sizes.get(axis, size) for axis, size in zip(dims, array.shape, strict=True)]
    assert list(array.shape) == expected, (
        f"{name} has the shape {tuple(array.shape)} for the axes {dims}"
    )
    # nothing comes before the first step
    told = array[1:] if name.startswith("drift") else array
    assert told.isfinite().all(), f"{name} has numbers that are not finite where every query runs"
    others: dict[str, tuple[Tensor, dict[str, Any]]] = {
        "depends on chunks": (array, {"chunk": 3}),
        "depends on other statistics": (array, {"others": ()}),
    }
    if "head" in dims:
        swapped = array.index_select(dims.index("head"), torch.tensor([1, 0]))
        what = "of some heads differs from the same heads among all"
        others[what] = swapped, {"heads": (1, 0)}
    for what, (alike, how) in others.items():
        found = torch.from_numpy(_traced(model, canvas, name, **how)[1].array(name))
        assert torch.allclose(found, alike, rtol=1e-4, atol=1e-5, equal_nan=True), f"{name} {what}"


def _traced(
    model: Any,
    canvas: Canvas,
    name: str,
    *,
    chunk: int | None = None,
    heads: Any = None,
    others: tuple[str, ...] = ("received",),
) -> tuple[Tensor, Recording]:
    small = partial(attention_statistics, chunk=chunk)
    patch = (
        mock.patch("sinklab.core.instrument.call.attention_statistics", small)
        if chunk
        else nullcontext()
    )
    with patch, trace(model, (name, *others), canvas=canvas, heads=heads) as recording:
        logits = model(canvas.ids_BS, attention_mask=canvas.attention_BS.long()).logits
        # a second step, in which one position is written
        written_BS = canvas.ids_BS.clone()
        written_BS[:, -1] = 5
        model(written_BS, attention_mask=canvas.attention_BS.long())
    return logits, recording
