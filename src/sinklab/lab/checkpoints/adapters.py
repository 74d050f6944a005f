"""Adapters by themselves: a few MB that make another model of a base, with a record of their
training.
"""

# A rank of the adapters, I inputs and O outputs of a layer
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sinklab.core.compat import stated
from sinklab.core.subject.sinks import tensors_of
from sinklab.lab.checkpoints.sinkfile import hash_of, read_tensors, write_tensors
from sinklab.lab.checkpoints.weights import Weights
from sinklab.lab.files import from_json, refused

FORMAT = "sinklab-adapters"
VERSION = 1
SCALE = 2.0
"""Factor of the product of both halves, whatever the rank."""
HALVES = ("lora_A", "lora_B")
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
"""Linear layers of an attention that are adapted."""
PACKAGED = {"smollm2-diffusion": "smollm2", "smollm2-diffusion-sink": "smollm2"}
"""Name of packaged adapters -> the base that `load` knows by this name."""
ROWS_OF_TOKENS = ("model.embed_tokens.weight", "lm_head.weight")


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
    objective: str
    """Objective of the training: diffusion, block_diffusion or autoregressive."""
    mask_token: str = "auto"
    """Choice of [MASK], as of :func:`sinklab.lab.checkpoints.from_causal`."""
    mask_token_id: int | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    """Fields of `DiffusionLMConfig`: shift, form of attention, sink."""
    tokens: int = 0
    """Tokens of text that they were trained on, in all."""
    seed: int = 0
    version: int = VERSION


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


def base_hash(
    state: Mapping[str, Tensor], rows: int, *, sink: tuple[str, ...] = (), tied: bool = True
) -> str:
    """SHA-256 (hex) of the weights below the adapters: the same before training, during it, and in
    bfloat16.

    Args:
        state: of a model with or without adapters.
        rows: of the embedding of the base; later ones are not read.
        sink: names of the sink's tensors, which are not read.
        tied: the head is the embedding.
    """
    base: dict[str, Tensor] = {}
    for name, tensor in state.items():
        plain = name.replace(".base_layer.", ".")
        is_added = name in sink or any(f".{half}." in name for half in HALVES)
        if is_added or (tied and plain == "lm_head.weight"):
            continue
        if plain in ROWS_OF_TOKENS:
            tensor = tensor[:rows]
        base[plain] = tensor
    return hash_of(base)


def save_adapters(facts: AdapterFile, tensors: Mapping[str, Tensor], file: str | Path) -> Path:
    """Write adapters and their facts into a safetensors file, which is replaced when the new one is
    whole.
    """
    return write_tensors(file, tensors, {"format": FORMAT, "record": json.dumps(asdict(facts))})


def read_adapters(file: str | Path) -> tuple[AdapterFile, dict[str, Tensor]]:
    """Facts and tensors of a file of adapters.

    Raises:
        ValueError: if it is none, damaged, or of another version.
    """
    metadata, tensors = read_tensors(file, "adapters")
    if metadata.get("format") != FORMAT:
        raise ValueError(
            f"{file} holds no adapters: a run with --train-only lora writes adapters.safetensors"
        )
    with refused(f"the adapters in {file} are damaged", KeyError, TypeError, ValueError):
        record = from_json(metadata["record"], dict)
        if record["version"] != VERSION:
            raise ValueError(
                f"they have version {record['version']}, and this sinklab reads version {VERSION}"
            )
        facts = AdapterFile(**{one.name: record[one.name] for one in fields(AdapterFile)})
    return facts, tensors


def check_fit(
    model: Any, facts: AdapterFile, tensors: Mapping[str, Tensor], base: str, file: str
) -> None:
    """Raises ValueError unless this model, before training, has the weights and the [MASK] that
    were adapted, and the tensors are all that its layers and its sink need.
    """
    config = model.config
    tied = bool(config.tie_word_embeddings)
    found = base_hash(model.state_dict(), facts.base_rows, sink=tensors_of(config), tied=tied)
    if found != facts.base_sha256:
        raise ValueError(
            f"the adapters in {file} were trained on {facts.base} with weights of SHA-256 "
            f"{facts.base_sha256[:12]}…, "
            f"but {base} has {found[:12]}…\ngive base= (--base) the folder or .gguf file that "
            "they were trained on"
        )
    mask_id = stated(config, "mask_token_id")
    if facts.objective != "autoregressive" and mask_id != facts.mask_token_id:
        raise ValueError(
            f"the adapters in {file} were trained with [MASK] as id {facts.mask_token_id}, but "
            f"{base} has {mask_id}; give the base with the tokenizer that they were trained with"
        )
    with refused(f"the adapters in {file} are damaged, fetch them again"):
        _check_tensors(model, facts.rank, tensors)


def _check_tensors(model: Any, rank: int, tensors: Mapping[str, Tensor]) -> None:
    shapes = {name: tuple(model.get_parameter(name).shape) for name in tensors_of(model.config)}
    for name, layer in model.named_modules():
        if name.rpartition(".")[2] in PROJECTIONS:
            outputs, inputs = layer.weight.shape
            shapes[f"{name}.{HALVES[0]}.weight"] = (rank, inputs)
            shapes[f"{name}.{HALVES[1]}.weight"] = (outputs, rank)
    found = Weights(dict(tensors)).shapes
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
