"""The conformance suite of checkpoint families."""

from __future__ import annotations

import dataclasses
import json
import shutil
import tempfile
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from sinklab.attention.received import attention_statistics
from sinklab.checkpoints import families as readers
from sinklab.checkpoints.loading import load
from sinklab.checkpoints.materialize import empty_model, names_to_fill, tensor_plan
from sinklab.checkpoints.model_card import describe
from sinklab.checkpoints.weights import open_weights
from sinklab.probing.intervention import Intervention, intervene
from sinklab.probing.log import InterventionLog
from sinklab.probing.recording import Recording
from sinklab.probing.statistics import Statistic
from sinklab.probing.tracing import trace
from sinklab.registry import Registry, families, interventions, statistics
from sinklab.sampling.canvas import Canvas


def check_family(name: str, folder: str | Path) -> None:
    """Hold a checkpoint family to what the loader relies on, with a tiny checkpoint of it.

    The config is read without weights; a field that is absent, of another kind or that cannot be represented is refused
    by name; every tensor of the model comes from exactly one of the checkpoint, and none is left over; what is saved
    loads again, bit for bit; no Python file of the checkpoint is run.

    Args:
        name: of the family in :data:`sinklab.registry.families`.
        folder: a checkpoint of that family with safetensors, which stays as it is.

    Raises:
        AssertionError: for the first of these that does not hold.
    """
    with tempfile.TemporaryDirectory() as temporary:
        here = Path(shutil.copytree(folder, Path(temporary, "checkpoint")))
        config = readers.read_config(here / "config.json", name)
        assert describe(here / "config.json").published_family == name, f"the config is not recognised as {name}"
        _check_fields(name, here, config)
        _check_tensors(here, config)
        _check_no_code(here, config)
        loaded, again = load(here), Path(temporary, "again")
        loaded.model.save_pretrained(again)
        ids = torch.arange(min(8, loaded.model.config.vocab_size))[None]
        with torch.inference_mode():
            same = torch.equal(load(again).model(ids).logits, loaded.model(ids).logits)
        assert same, "a model that was saved and loaded again has other logits"


def _check_fields(name: str, folder: Path, config: dict) -> None:
    """Every field, absent or of another kind, is read all the same or refused with a ValueError."""
    for field in families[name].represented:
        refused = _refusal(folder, {**config, field: "a value that no checkpoint has"})
        assert field in refused, f"a value of {field} that cannot be represented is not refused by name: {refused!r}"
    for field in config:
        _refusal(folder, {key: value for key, value in config.items() if key != field})
        _refusal(folder, {**config, field: {"of": "another kind"}})


def _refusal(folder: Path, config: dict) -> str:
    """What a config is refused with; empty where it is read."""
    try:
        readers.configured(readers.read(config, str(folder)), {}, str(folder))
    except ValueError as error:
        return str(error)
    return ""


def _check_tensors(folder: Path, config: dict) -> None:
    weights = open_weights(folder, str(folder))
    plan = readers.read(config, str(folder), weights.shapes)
    model = empty_model(readers.configured(plan, {}, str(folder)), str(folder))
    tensors, new = tensor_plan(plan, model, weights, {}, str(folder))
    targets = [part.target for parts in tensors.values() for part in parts]
    assert sorted(targets) == sorted(names_to_fill(model)), "a tensor of the model is filled twice, or never"
    assert not new, f"tensors start anew that the checkpoint should have: {sorted(new)}"
    assert tensors.keys() == weights.shapes.keys(), "the plan names other tensors than the checkpoint has"
    for source, parts in tensors.items():
        numbers = torch.empty(weights.shapes[source], device="meta").numel()
        taken = sum(model.get_parameter(part.target).numel() for part in parts)
        assert taken == numbers, f"{taken} of the {numbers} numbers of {source} are used"


def _check_no_code(folder: Path, config: dict) -> None:
    """A Python file that the config names is not run."""
    ran = folder / "ran"
    (folder / "code_x.py").write_text(f"open({str(ran)!r}, 'w')\n")
    named = {one: "code_x.Thing" for one in ("AutoConfig", "AutoModel", "AutoModelForCausalLM")}
    (folder / "config.json").write_text(json.dumps({**config, "auto_map": named}))
    load(folder)
    assert not ran.exists(), "code of the checkpoint was run"
    (folder / "config.json").write_text(json.dumps(config))


def check_text_and_json(registry: Registry, value: Any) -> None:
    """Hold a registered value to what run folders and the command line rely on.

    Raises:
        AssertionError: unless its class is a documented frozen dataclass, and its text and its JSON are read as it is.
        ValueError: if its class is not registered.
    """
    kind, text, fields = type(value), registry.as_text(value), json.loads(json.dumps(registry.as_dict(value)))
    assert dataclasses.is_dataclass(kind) and kind.__doc__, f"{text}: {kind.__name__} is no dataclass with a docstring"
    assert kind.__dataclass_params__.frozen, f"{text}: {kind.__name__} can be changed; write @dataclass(frozen=True)"
    assert registry.parse(text) == value, f"{text!r} is read as {registry.parse(text)!r}"
    assert registry.parse(fields) == value, f"{fields} is read as {registry.parse(fields)!r}"
    assert hash(registry.parse(fields)) == hash(value), f"{text}: equal values have different hashes"


def _three_texts(model: Any) -> list[Tensor]:
    """Ids (2, 16) of three steps, among them masks and one row of its own, the same every time."""
    generator = torch.Generator().manual_seed(0)
    whole_BS = torch.randint(1, model.config.vocab_size - 2, (2, 16), generator=generator)
    masked = [torch.rand(whole_BS.shape, generator=generator) < share for share in (0.7, 0.5, 0.3)]
    return [whole_BS.masked_fill(masked_BS, model.config.mask_token_id) for masked_BS in masked]


@torch.no_grad()
def _edited(model: Any, edit: Any, *, measure: bool = True) -> tuple[list[Tensor], Recording, InterventionLog]:
    """Logits, recording and log of three forwards under an edit."""
    logits = []
    with intervene(model, edit, measure=measure) as log, trace(model) as recording:
        for ids_BS in _three_texts(model):
            if getattr(edit, "source", "") == "clean_pass":
                with log.probing():
                    model(ids_BS)
            logits.append(model(ids_BS).logits)
    return logits, recording, log


def check_intervention(edit: Intervention, model: Any = None) -> None:
    """Hold a registered intervention to what traces, studies and run folders rely on.

    It is written as text and JSON and read again; it changes the model's outputs inside the block, twice the same way,
    measured or not; afterwards weights, outputs and hooks are as before; its log names it, counts what is gone, and a
    key that it hides receives nothing.

    Args:
        edit: a value such as ``MaskSinks(k=2)`` that acts within three forwards of 16 tokens.
        model: a `DiffusionLM`; None for the packaged "tiny".

    Raises:
        AssertionError: naming what does not hold.
        ValueError: if its class is not registered.
    """
    check_text_and_json(interventions, edit)
    name, model = interventions.as_text(edit), load("tiny").model.eval() if model is None else model
    weights = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    with torch.no_grad():
        plain = [model(ids_BS).logits for ids_BS in _three_texts(model)]
    logits, recording, log = _edited(model, edit)
    for again, measure in ((_edited(model, edit), True), (_edited(model, edit, measure=False), False)):
        same = all(map(torch.equal, again[0], logits))
        assert same, f"{name}: the outputs differ from run to run" if measure else f"{name}: measuring changes outputs"
    with torch.no_grad():
        after = [model(ids_BS).logits for ids_BS in _three_texts(model)]
    assert all(map(torch.equal, plain, after)), f"{name} changes what the model gives after the block"
    kept = all(torch.equal(tensor, weights[key]) for key, tensor in model.state_dict().items())
    assert kept, f"{name} changes the weights"
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.model.modules()), f"{name} leaves a hook"
    assert not all(map(torch.equal, plain, logits)), f"{name} changes no output"
    _check_log(name, edit, log, recording)


def _check_log(name: str, edit: Any, log: InterventionLog, recording: Recording) -> None:
    assert log.forwards == 3 and log.removals, f"{name}: {len(log.removals)} entries in the log of {log.forwards} steps"
    for entry in log.removals:
        assert entry.edit == edit and entry.label == interventions.name_of(edit), f"{name}: logged as {entry.label}"
        columns_BLHM, removed_BLH = entry.columns_BLHM, entry.removed_BLH
        rows = (*columns_BLHM.shape[:1], len(entry.layers), len(entry.heads))
        shares = [entry.mass_BLH, entry.realised_BLH, entry.overlap_BLH, entry.left_BLH, removed_BLH]
        assert all(part.shape == rows for part in [*shares, columns_BLHM[..., 0:].sum(-1)]), (
            f"{name}: shapes in the log"
        )
        for share_BLH in shares[:3]:
            known = share_BLH[~share_BLH.isnan()]
            assert ((known > -1e-4) & (known < 1 + 1e-4)).all(), f"{name}: a share in the log outside 0 to 1"
        if columns_BLHM.shape[-1]:
            assert torch.equal((columns_BLHM >= 0).sum(-1), removed_BLH.long()), f"{name}: columns and counts differ"
            if getattr(edit, "removal", "zero_value") != "zero_value":
                received_BLHS = recording.received[entry.forward][:, list(entry.layer_numbers)][:, :, list(entry.heads)]
                left_BLHM = received_BLHS.gather(-1, columns_BLHM.clamp(min=0)).masked_fill(columns_BLHM < 0, 0.0)
                assert not left_BLHM.any(), f"{name}: keys that are logged as gone receive attention"


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
