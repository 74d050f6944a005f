"""A sink by itself, in a file of a few kB: its form, the weights it was trained on, and putting it
on a model.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from sinklab.core.registry import sinks
from sinklab.core.subject.config import DiffusionLMConfig
from sinklab.core.subject.sinks import tensors_of
from sinklab.lab.files import ordinary, refused, writing

FORMAT = "sinklab-sink"
VERSION = 1
# at a time, when weights are hashed
PIECE = 2**22


@dataclass(frozen=True)
class SinkFile:
    """Facts in a sink file."""

    kind: str
    """Kind, named as in `DiffusionLMConfig`: ``token``, ``zero``,
    ``kv`` or another that is registered.
    """
    count: int
    side: str
    backbone: str
    """The decoder it was trained on, by transformers' name: llama, qwen2, qwen3_moe, …"""
    hidden_size: int
    layers: int
    kv_heads: int
    head_dim: int
    name: str
    """Name of the model that it was trained on; empty if that is not known."""
    weights_sha256: str
    """Hash of the weights, from :func:`backbone_hash`."""
    version: int = VERSION

    @classmethod
    def of(cls, config: DiffusionLMConfig, name: str = "", weights_sha256: str = "") -> SinkFile:
        """The facts of a model with a sink."""
        return cls(
            kind=config.sink_kind,
            count=config.sink_count,
            side=config.sink_side,
            backbone=config.backbone.model_type,
            hidden_size=config.backbone.hidden_size,
            layers=config.backbone.num_hidden_layers,
            kv_heads=config.backbone.num_key_value_heads,
            head_dim=config.head_dim,
            name=name,
            weights_sha256=weights_sha256,
        )


_SHAPE = ("backbone", "hidden_size", "layers", "kv_heads", "head_dim")
"""Facts that must be equal for a sink to be attached."""


def backbone_hash(model: Any) -> str:
    """SHA-256 (hex) of a model's weights without its sink, rounded to bfloat16: the same in float32
    and bfloat16.

    Reads every weight once.
    """
    state = model.state_dict()
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    for name in tensors_of(model.config):
        del state[name]
    return hash_of(state)


def hash_of(state: Mapping[str, Tensor]) -> str:
    """SHA-256 (hex) of tensors, their names and their shapes, rounded to bfloat16; their order does
    not matter.
    """
    digest = hashlib.sha256()
    for name in sorted(state):
        digest.update(json.dumps([name, list(state[name].shape)]).encode())
        tensor = state[name].detach()
        for piece in tensor.reshape(-1).split(PIECE):
            digest.update(piece.bfloat16().cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def save_sink(model: Any, file: str | Path, *, name: str = "") -> Path:
    """Write the sink of a model, and nothing else, into a safetensors file that ``load(…,
    sink=FILE)`` attaches.

    Args:
        model: a `DiffusionLM` with a sink, without adapters.
        file: path to write; it is replaced when the new one is whole.
        name: of the model that the sink was trained on, for later readers.

    Raises:
        ValueError: if the model has no sink, or adapters.
    """
    names = tensors_of(model.config)
    if not names:
        raise ValueError(
            "this model has no sink that could be saved; give it one with sink_kind and sink_count"
        )
    tensors = {one: model.get_parameter(one).detach().cpu().contiguous() for one in names}
    if any(".lora_" in one for one in model.state_dict()):
        raise ValueError(
            "the sink of a model with adapters would be tied to them; merge_lora(model) first"
        )
    facts = SinkFile.of(model.config, name, backbone_hash(model))
    metadata = {"format": FORMAT, **{key: str(value) for key, value in asdict(facts).items()}}
    return write_tensors(file, tensors, metadata)


def write_tensors(
    file: str | Path, tensors: Mapping[str, Tensor], metadata: dict[str, str]
) -> Path:
    """Write a safetensors file, which is replaced when the new one is whole; return its path."""
    file = Path(file)
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f".{file.name}.{secrets.token_hex(4)}.partial")
    try:
        # not save_file: it makes a file that only its owner may read
        with writing(file):
            partial.write_bytes(save(dict(tensors), metadata=metadata))
        os.replace(partial, file)
    finally:
        partial.unlink(missing_ok=True)
    return file


def read_tensors(file: str | Path, holds: str) -> tuple[Mapping[str, str], dict[str, Tensor]]:
    """Metadata and tensors of a safetensors file. Raises ValueError for one that is damaged, by the
    contents that it should hold.
    """
    fault = f"no {holds} can be read from {file}, which is absent, cut short or damaged"
    with refused(fault, SafetensorError, OSError), safe_open(ordinary(file), "pt") as opened:
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (no mapping)
        return opened.metadata() or {}, tensors


def sink_file_of(file: str | Path) -> SinkFile:
    """Read the facts in a sink file.

    Raises:
        ValueError: if it is no sink file, damaged, or of another version.
    """
    return _read(file)[0]


def _read(file: str | Path) -> tuple[SinkFile, dict[str, Tensor]]:
    metadata, tensors = read_tensors(file, "sink")
    if metadata.get("format") != FORMAT:
        raise ValueError(
            f"{file} holds no sink: save_sink writes one, with format {FORMAT!r} in its metadata"
        )
    if metadata.get("version") != str(VERSION):
        raise ValueError(
            f"the sink file {file} has version {metadata.get('version')}, and this sinklab reads "
            f"version {VERSION}; write it again with save_sink"
        )
    kinds: dict[str, Callable[[str], Any]] = {"int": int, "str": str}
    with refused(f"the sink file {file} is damaged", KeyError, ValueError):
        facts = SinkFile(
            **{one.name: kinds[str(one.type)](metadata[one.name]) for one in fields(SinkFile)}
        )
        named = sinks.parse(facts.kind).tensors
        if {*named} != tensors.keys():
            held = ", ".join(sorted(tensors)) or "nothing"
            raise ValueError(
                f"a {facts.kind} sink is {', '.join(sorted(named))}, but it holds {held}"
            )
    return facts, tensors


def attach_sink(model: Any, file: str | Path) -> tuple[str, ...]:
    """Give a model without a sink that of a file, in place; its other weights keep every bit.

    Returns:
        notes: the sink that was attached, and a warning if the sink was trained on other weights.

    Raises:
        ValueError: as :func:`sink_file_of`; if the model is no diffusion model, has a sink or is
            offloaded; if the sink was trained on a backbone of another shape.
    """
    facts, tensors = _read(file)
    config = model.config
    if not isinstance(config, DiffusionLMConfig):
        raise ValueError(
            f"a sink file is for a DiffusionLM, and this one is a {config.model_type}; a causal "
            "model becomes one with as_diffusion=True"
        )
    if config.sink_count:
        raise ValueError(
            f"the model has a sink of its own ({config.sink_count} {config.sink_kind}); leave that "
            "out with sink_kind='none' and sink_count=0"
        )
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ValueError(
            "a sink file is compared with all weights, but some of this model are offloaded to the "
            "host; load it with a smaller dtype, or where its devices hold it"
        )
    here = asdict(SinkFile.of(config))
    there = asdict(facts)
    wrong = [
        f"{key.replace('_', ' ')} {there[key]} there and {here[key]} here"
        for key in _SHAPE
        if there[key] != here[key]
    ]
    if wrong:
        raise ValueError(
            f"the sink in {file} was trained on another backbone ({facts.name or 'not named'}): "
            f"{', '.join(wrong)}; load the model it belongs to"
        )
    settings: dict[str, Any] = {
        "sink_kind": facts.kind,
        "sink_count": facts.count,
        "sink_side": facts.side,
    }
    # checks the three together
    wanted: Any = DiffusionLMConfig(backbone=config.backbone, **settings)
    for name, tensor in tensors.items():
        shape = wanted.sink.shape(wanted, name)
        if tuple(tensor.shape) != shape:
            fact = f"{name} has shape {tuple(tensor.shape)}, but its metadata ask for {shape}"
            raise ValueError(f"the sink file {file} is damaged: {fact}")
    vars(config).update(settings)
    config.sink.attach(model.model)
    like = model.get_input_embeddings().weight
    for name, tensor in tensors.items():
        model.register_parameter(
            name, nn.Parameter(tensor.to(device=like.device, dtype=like.dtype))
        )
    attached = f"sink attached: {facts.count} {facts.kind} of {file}"
    if backbone_hash(model) == facts.weights_sha256:
        return (attached,)
    return attached, (
        f"the sink was trained on other weights of this shape ({facts.name or 'not named'}, "
        f"SHA-256 {facts.weights_sha256[:12]}…): its effect here is untested"
    )
