"""Adapters and sinks by themselves: a small file that makes another model of a base, with a record
of their training and of the weights below. A sink alone is a file of adapters of rank 0.
"""

# A rank of the adapters, I inputs and O outputs of a layer
import hashlib
import json
import math
import os
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from sinklab.core.compat import stated
from sinklab.core.subject.sinks import tensors_of
from sinklab.lab.files import from_json, ordinary, refused, writing

FORMAT = "sinklab-adapters"
SCALE = 2.0
"""Factor of the product of both halves, whatever the rank."""
HALVES = ("lora_A", "lora_B")
SINK = ("sink_kind", "sink_count", "sink_side")
"""Fields of a config that say which sink it is."""
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
"""Linear layers of an attention that are adapted."""
PACKAGED = {"smollm2-diffusion": "smollm2", "smollm2-diffusion-sink": "smollm2"}
"""Name of packaged adapters -> the base that `load` knows by this name."""
ROWS_OF_TOKENS = ("model.embed_tokens.weight", "lm_head.weight")
# numbers at a time, when weights are hashed
PIECE = 2**22


@dataclass(frozen=True)
class AdapterFile:
    """Facts that a file of adapters states of itself."""

    base: str
    """Name of the model that was adapted."""
    base_sha256: str
    """Hash of its weights, rounded to bfloat16, without a row that was added for [MASK]."""
    base_rows: int
    """Rows of its embedding."""
    rank: int
    """0 for a sink alone."""
    objective: str
    """Objective of the training: diffusion or autoregressive."""
    mask_token_id: int | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    """Fields of `DiffusionLMConfig`: shift, form of attention, sink."""
    tokens: int = 0
    """Tokens of text that they were trained on, in all."""
    seed: int = 0
    version: int = 1


def adapter_tensors(state: Mapping[str, Tensor], sink: tuple[str, ...]) -> dict[str, Tensor]:
    """Both halves of each adapter and the sink, in bfloat16, from the state of a model that is
    being trained.
    """
    found: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if any(f".{half}." in name for half in HALVES):
            found[name.replace(".default.", ".")] = tensor
        elif name in sink:
            found[name] = tensor
    return {
        name: tensor.detach().to("cpu", torch.bfloat16).contiguous()
        for name, tensor in found.items()
    }


def base_hash(state: Mapping[str, Tensor], config: Any, rows: int) -> str:
    """SHA-256 (hex) of the weights below adapters and sink, their names and shapes, rounded to
    bfloat16: the same before training, during it, and in bfloat16. Reads every weight once.

    Args:
        state: of a model with or without adapters.
        config: of the model.
        rows: of the embedding of the base; later ones are not read.
    """
    base: dict[str, Tensor] = {}
    for name, tensor in state.items():
        plain = name.replace(".base_layer.", ".")
        is_added = name in tensors_of(config) or any(f".{half}." in name for half in HALVES)
        if is_added or (config.tie_word_embeddings and plain == "lm_head.weight"):
            continue
        if plain in ROWS_OF_TOKENS:
            tensor = tensor[:rows]
        base[plain] = tensor.detach()
    digest = hashlib.sha256()
    for name in sorted(base):
        digest.update(json.dumps([name, list(base[name].shape)]).encode())
        for piece in base[name].reshape(-1).split(PIECE):
            digest.update(piece.bfloat16().cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def save_adapters(facts: AdapterFile, tensors: Mapping[str, Tensor], file: str | Path) -> Path:
    """Write adapters and their facts into a safetensors file, which is replaced when the new one is
    whole.
    """
    file = Path(file)
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f".{file.name}.{secrets.token_hex(4)}.partial")
    metadata = {"format": FORMAT, "record": json.dumps(asdict(facts))}
    try:
        # not save_file: it makes a file that only its owner may read
        with writing(file):
            partial.write_bytes(save(dict(tensors), metadata=metadata))
        os.replace(partial, file)
    finally:
        partial.unlink(missing_ok=True)
    return file


def read_adapters(file: str | Path) -> tuple[AdapterFile, dict[str, Tensor]]:
    """Facts and tensors of a file of adapters, or of a sink.

    Raises:
        ValueError: if it is none, damaged, or of another version.
    """
    fault = f"no adapters can be read from {file}, which is absent, cut short or damaged"
    with refused(fault, SafetensorError, OSError), safe_open(ordinary(file), "pt") as opened:
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (no mapping)
        metadata = opened.metadata() or {}
    if metadata.get("format") != FORMAT:
        raise ValueError(
            f"{file} holds no adapters and no sink: a run with --train-only lora or sink writes one"
        )
    with refused(f"the adapters in {file} are damaged", KeyError, TypeError, ValueError):
        facts = AdapterFile(**from_json(metadata["record"], dict))
    return facts, tensors


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
    config = model.config
    state = model.state_dict()
    if not tensors_of(config):
        raise ValueError(
            "this model has no sink that could be saved; give it one with sink_kind and sink_count"
        )
    if any(".lora_" in one for one in state):
        raise ValueError(
            "the sink of a model with adapters would be tied to them; merge_lora(model) first"
        )
    facts = AdapterFile(
        base=name,
        base_sha256=base_hash(state, config, config.vocab_size),
        base_rows=config.vocab_size,
        rank=0,
        objective="diffusion",
        mask_token_id=config.mask_token_id,
        settings={key: getattr(config, key) for key in SINK},
    )
    tensors = {one: state[one].detach().cpu().contiguous() for one in tensors_of(config)}
    return save_adapters(facts, tensors, file)


def check_fit(
    model: Any, facts: AdapterFile, tensors: Mapping[str, Tensor], base: str, file: str
) -> tuple[str, ...]:
    """Raises ValueError unless this model, before training, has the weights and the [MASK] that
    were adapted, and the tensors are all that its layers and its sink need. Of a sink alone, a note
    says that it was trained on other weights.
    """
    config = model.config
    found = base_hash(model.state_dict(), config, facts.base_rows)
    notes: tuple[str, ...] = ()
    if found != facts.base_sha256 and not facts.rank:
        notes = (
            f"the sink was trained on other weights of this shape ({facts.base or 'not named'}, "
            f"SHA-256 {facts.base_sha256[:12]}…): its effect here is untested",
        )
    elif found != facts.base_sha256:
        raise ValueError(
            f"the adapters in {file} were trained on {facts.base} with weights of SHA-256 "
            f"{facts.base_sha256[:12]}…, "
            f"but {base} has {found[:12]}…\ngive the folder or .gguf file that they were trained "
            "on"
        )
    mask_id = stated(config, "mask_token_id")
    if facts.rank and facts.objective != "autoregressive" and mask_id != facts.mask_token_id:
        raise ValueError(
            f"the adapters in {file} were trained with [MASK] as id {facts.mask_token_id}, but "
            f"{base} has {mask_id}; give the base with the tokenizer that they were trained with"
        )
    shapes = {name: tuple(model.get_parameter(name).shape) for name in tensors_of(config)}
    for name, layer in model.named_modules():
        if facts.rank and name.rpartition(".")[2] in PROJECTIONS:
            outputs, inputs = layer.weight.shape
            shapes[f"{name}.{HALVES[0]}.weight"] = (facts.rank, inputs)
            shapes[f"{name}.{HALVES[1]}.weight"] = (outputs, facts.rank)
    fault = f"{file} is damaged, or was trained on another backbone ({facts.base or 'not named'})"
    with refused(fault):
        _check_tensors(tensors, shapes)
    return notes


def _check_tensors(tensors: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raises ValueError for the first tensor that is absent, surplus, misshapen or not finite."""
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    for name in sorted({*shapes, *found}):
        if name not in found:
            raise ValueError(f"{name} is not in it")
        if name not in shapes:
            raise ValueError(f"{name} is not asked for")
        if found[name] != shapes[name]:
            raise ValueError(f"{name} has shape {found[name]}, expected {shapes[name]}")
        if not all(map(math.isfinite, tensors[name].aminmax())):
            raise ValueError(f"{name} holds NaN or infinity")


@torch.no_grad()
def add_adapters(model: Any, tensors: Mapping[str, Tensor]) -> None:
    """Add adapters to the weights of a model without them, and put the sink in its place."""
    for name, tensor in tensors.items():
        if f".{HALVES[0]}." in name:
            first_AI = tensor.float()
            second_OA = tensors[name.replace(*HALVES)].float()
            weight_OI = model.get_submodule(name.partition(f".{HALVES[0]}.")[0]).weight
            weight_OI.add_((SCALE * second_OA @ first_AI).to(weight_OI))
        elif f".{HALVES[1]}." not in name:
            model.get_parameter(name).copy_(tensor)


def packaged_file(name: str) -> Path:
    """The file of one of `PACKAGED`."""
    return Path(str(files("sinklab.lab.checkpoints").joinpath("packaged", f"{name}.safetensors")))
