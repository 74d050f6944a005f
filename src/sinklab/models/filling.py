"""Building a model without memory and filling it tensor by tensor, so that the host never holds it twice."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from sinklab.models import families, rotary
from sinklab.models.config import SINK_NAMES, DiffusionLMConfig
from sinklab.models.diffusion_lm import DiffusionLM
from sinklab.models.recipe import Part, Plan
from sinklab.models.weightfiles import Weights

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
OURS = (*SINK_NAMES, "gates.")


def hollow(config: PreTrainedConfig, name: str) -> PreTrainedModel:
    """The model of a config on the meta device: shapes and names, no memory. Its attention is always sdpa.

    Raises:
        ValueError: if transformers cannot build it, with the ``name`` of the checkpoint.
    """
    build: Any = DiffusionLM if isinstance(config, DiffusionLMConfig) else AutoModelForCausalLM.from_config
    for one in (config, getattr(config, "backbone", None)):
        if one is not None:
            # another name may be a repository of compiled kernels, to be fetched and imported
            one._attn_implementation = "sdpa"
    with families.blamed_on(name), torch.device("meta"):
        return build(config)


def names_to_fill(model: PreTrainedModel) -> list[str]:
    """Tensors that a checkpoint of this model has; a head tied to the embedding is none."""
    tied = {HEAD} if model.config.tie_word_embeddings else set()
    return [name for name in model.state_dict() if name not in tied]


def complete_plan(
    plan: Plan | None, model: PreTrainedModel, weights: Weights, asked: Collection[str]
) -> tuple[Plan, set[str]]:
    """The plan for this model, and the tensors of ours that no checkpoint has and that start anew.

    A source with no places in the plan is left out: that of a sink or gate that was to go.

    Args:
        plan: of the recipe; None for a checkpoint with the model's own names.
        model: from :func:`hollow`.
        weights: of the checkpoint.
        asked: names of the caller's settings. A sink or gate that was asked for may be absent; one that was asked to
            go may be there.
    """
    names = names_to_fill(model)
    plan = plan or {name: (Part(name),) for name in {**dict.fromkeys(names), **_removed(model, weights.shapes, asked)}}
    gone = _removed(model, (part.target for parts in plan.values() for part in parts), asked)
    plan = {source: tuple(part for part in parts if part.target not in gone) for source, parts in plan.items()}
    filled = {part.target for source, parts in plan.items() if source in weights.shapes for part in parts}
    start_new = bool({"sink_kind", "sink_count", "gate", "gate_bias"} & {*asked})
    new = {name for name in names if start_new and name.startswith(OURS) and name not in filled}
    return {source: parts for source, parts in plan.items() if not new & {part.target for part in parts}}, new


def _removed(model: PreTrainedModel, targets: Iterable[str], asked: Collection[str]) -> dict[str, None]:
    """Those of these tensors that belong to a sink or gate which the caller's settings took away."""
    gone: set[str] = set()
    if {"sink_kind", "sink_count"} & {*asked}:
        gone |= {name for name in SINK_NAMES if not hasattr(model, name)}
    if "gate" in asked and not hasattr(model, "gates"):
        gone |= {f"gates.{layer}.{kind}" for layer in range(len(model.model.layers)) for kind in ("weight", "bias")}
    return {name: None for name in targets if name in gone}


def check(plan: Plan, model: PreTrainedModel, weights: Weights, name: str) -> None:
    """Compare names and shapes, in the names of the checkpoint.

    Raises:
        ValueError: that names what is missing, surplus or misshapen.
    """
    shapes = {target: tuple(tensor.shape) for target, tensor in model.state_dict().items()}
    # old Llama files keep the rotary frequencies; some files of a tied model have its head all the same
    harmless = ("rotary_emb.inv_freq", *([HEAD] if model.config.tie_word_embeddings else []))
    wrong: dict[str, list[str]] = {
        "missing": [source for source in plan if source not in weights.shapes],
        "unexpected": [one for one in weights.shapes if one not in plan and not one.endswith(harmless)],
        "mismatched": [
            text
            for source, parts in plan.items()
            if source in weights.shapes and (text := _misfit(source, weights.shapes[source], parts, shapes))
        ],
    }
    listed = "; ".join(
        f"{key}: {', '.join(names[:5])}{f' and {len(names) - 5} more' if len(names) > 5 else ''}"
        for key, names in wrong.items()
        if names
    )
    if listed:
        raise ValueError(
            f"the tensors of {name} do not fit its config ({listed}); check that weights and config belong together"
        )


def _misfit(source: str, shape: tuple[int, ...], parts: Iterable[Part], shapes: dict[str, tuple[int, ...]]) -> str:
    whole = torch.empty(shape, device="meta")
    for part in parts:
        try:
            taken = tuple((part.take(whole) if part.take else whole).shape)
        except (RuntimeError, IndexError):
            taken = ()
        if taken != shapes[part.target]:
            return f"{source} has shape {shape}, which does not give {part.target} {shapes[part.target]}"
    return ""


def fill(
    model: PreTrainedModel,
    plan: Plan,
    weights: Weights,
    dtype: torch.dtype,
    device_of: Callable[[str], torch.device],
) -> None:
    """Give every tensor of the plan its memory and contents, one at a time, and tie what is tied."""
    for source, parts in plan.items():
        for part in parts:
            target = torch.empty(model.get_parameter(part.target).shape, dtype=dtype, device=device_of(part.target))
            if part.take is None and target.ndim:
                for rows, piece in weights.pieces(source):
                    target[rows] = piece
            else:
                whole = weights.whole(source)
                target.copy_(part.take(whole) if part.take else whole)
            _put(model, part.target, target)
    rotary.rebuild(model.model, device_of("model.rotary_emb"))
    model.tie_weights()
    if model.config.tie_word_embeddings and HEAD in weights.shapes and HEAD not in plan:
        _check_tied(model, weights)


def _check_tied(model: PreTrainedModel, weights: Weights) -> None:
    """A head that the file has all the same must be the embedding."""
    tied = model.get_parameter(EMBEDDING)
    same = weights.shapes[HEAD] == tuple(tied.shape) and all(
        torch.equal(tied[rows], piece.to(tied)) for rows, piece in weights.pieces(HEAD)
    )
    if not same:
        raise ValueError(
            f"config.json ties the head to the embedding (tie_word_embeddings), but {HEAD} of the checkpoint is "
            "another tensor; set tie_word_embeddings to false in config.json"
        )


def start(
    model: PreTrainedModel, names: set[str], dtype: torch.dtype, device_of: Callable[[str], torch.device]
) -> None:
    """Initialise sinks and gates that the checkpoint does not have."""
    for name in sorted(names):
        _put(model, name, torch.empty(model.get_parameter(name).shape, dtype=dtype, device=device_of(name)))
    owners = {name.rpartition(".")[0] for name in names}
    for owner in sorted(owners):
        module = model.get_submodule(owner)
        for leaf, parameter in module.named_parameters(recurse=False):
            # as transformers marks what is not to be initialised: a gate that only gets a bias keeps its weight
            parameter._is_hf_initialized = f"{owner}.{leaf}".lstrip(".") not in names  # type: ignore[attr-defined]
        model._init_weights(module)


def _put(model: nn.Module, name: str, tensor: Tensor) -> None:
    owner, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(owner), leaf, nn.Parameter(tensor))
