"""Models as their configs describe them, without memory; and with it, filled by transformers from
the tensors of a checkpoint, each read when its turn comes, so that the host never holds them twice.
"""

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from sinklab.core.compat import stated
from sinklab.core.subject import DiffusionLM, DiffusionLMConfig
from sinklab.lab.checkpoints import families
from sinklab.lab.checkpoints.families import CheckpointPlan, Part
from sinklab.lab.checkpoints.weights import Weights
from sinklab.lab.files import refused

DeviceMap = str | dict[str, Any]
CPU_FLAGS = Path("/proc/cpuinfo")

# what transformers holds of all experts in one tensor (experts, rows, columns) -> what a file may
# have of each
_EXPERTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


def machine_type(device: torch.device | str) -> torch.dtype:
    """bfloat16 if this device multiplies it in hardware; else float32, since bfloat16 may take 40
    times longer.

    Asked are CUDA, and of a CPU the flags that Linux lists: AVX512-BF16 and AMX of x86, bf16 of
    ARM.
    """
    kind = torch.device(device).type
    is_fast = False
    if kind == "cuda":
        is_fast = torch.cuda.is_bf16_supported(including_emulation=False)
    elif kind == "cpu" and CPU_FLAGS.exists():
        flags = CPU_FLAGS.read_text().split()
        is_fast = not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(flags)
    if is_fast:
        return torch.bfloat16
    return torch.float32


def weight_type(
    dtype: torch.dtype | str, raw: Mapping[str, Any], device_map: DeviceMap
) -> torch.dtype:
    """The type that ``load`` is given by any of its names. Raises ValueError for one of none."""
    if dtype == "auto":
        dtype = raw.get("dtype") or raw.get("torch_dtype") or "float32"
    elif dtype == "machine" and isinstance(device_map, dict):
        dtype = machine_type(next(iter(device_map.values())))
    elif dtype == "machine":
        dtype = machine_type({True: "cuda", False: "cpu"}[torch.cuda.is_available()])
    number: Any = dtype
    if isinstance(dtype, str):
        number = getattr(torch, dtype.removeprefix("torch."), None)
    if not isinstance(number, torch.dtype) or not number.is_floating_point:
        raise ValueError(
            "dtype must be a floating point type such as torch.bfloat16 or 'auto', but is "
            f"{dtype!r}"
        )
    return number


def usable_device(device: Any) -> torch.device:
    """This device. Raises ValueError if its name is none, or this machine does not have it."""
    fault = (
        "device must be one that torch can use here "
        f"(cpu{' or cuda' * torch.cuda.is_available()}), but is {device!r}; "
        "pass device='cpu', or install a torch that knows the device"
    )
    with refused(fault, RuntimeError, AssertionError, TypeError, NotImplementedError):
        return torch.empty(0, device=torch.device(device)).device


def empty_model(config: PreTrainedConfig, name: str) -> PreTrainedModel:
    """The model of a config on the meta device: shapes and names, no memory. Its attention is
    always sdpa.

    Raises:
        ValueError: if transformers cannot build it, with the ``name`` of the checkpoint.
    """
    known = families.known_families().values()
    own = [one.own_class for one in known if one.own_class and config.model_type in one.model_types]
    build: Any = AutoModelForCausalLM.from_config
    if own:
        build = getattr(transformers, own[0])
    # another name may be a repository of compiled kernels, to be fetched and imported
    config._attn_implementation = "sdpa"
    if isinstance(config, DiffusionLMConfig):
        config.backbone._attn_implementation = "sdpa"
        build = DiffusionLM
    with families.blamed_on(name), torch.device("meta"):
        return build(config)


def names_to_fill(model: PreTrainedModel) -> list[str]:
    """Tensors that a checkpoint of this model has; one that is tied to another (the head) is
    none.
    """
    return [name for name in model.state_dict() if name not in model.all_tied_weights_keys]


@dataclass(frozen=True, eq=False)
class Piece:
    """A tensor of the model, read when it is asked for as those of a file are: ``piece[...]``."""

    names: tuple[str, ...]
    """Tensors of the checkpoint; several are the rows of one."""
    take: Part | None
    """The part to take of it, if it is one."""
    weights: Weights
    like: Tensor
    """The tensor on the meta device."""
    dtype: torch.dtype
    """Of rows that are put together."""

    def __getitem__(self, everything: Any) -> Tensor:
        tensors = (self.weights[name][everything] for name in self.names)
        if self.take is not None:
            # no view, which would hold the whole
            return self.take(next(tensors)).clone(memory_format=torch.contiguous_format)
        if len(self.names) == 1:
            return next(tensors)
        filled = torch.empty(self.like.shape, dtype=self.dtype)
        for rows in filled.flatten(0, 1).chunk(len(self.names)):
            rows.copy_(next(tensors))
        return filled

    def shape_of(self, name: str) -> tuple[int, ...]:
        """The shape that one of its tensors gives to it; () if the part cannot be taken."""
        shape = self.weights[name].shape
        if self.take is None:
            return shape
        with suppress(RuntimeError, IndexError):
            return tuple(self.take(torch.empty(shape, device="meta")).shape)
        return ()

    def wanted_shape(self) -> tuple[int, ...]:
        """The shape that each of its tensors should give: of the rows of all experts, those of
        one.
        """
        shape = tuple(self.like.shape)
        if len(self.names) == 1:
            return shape
        return (shape[0] * shape[1] // len(self.names), *shape[2:])


def sources_of(
    plan: CheckpointPlan,
    model: PreTrainedModel,
    weights: Weights,
    overrides: Mapping[str, Any],
    name: str,
) -> dict[str, Piece]:
    """Source of each tensor of the model that the checkpoint has; names and shapes are compared, in
    the names of the checkpoint.

    Args:
        plan: of the checkpoint.
        model: from :func:`empty_model`.
        weights: of the checkpoint.
        overrides: the caller's settings. Parts they add to the checkpoint's own model (a sink, a
            gate, its bias) may be absent; parts they remove may be there.
        name: of the checkpoint, for messages.

    Raises:
        ValueError: naming the tensors that are missing, surplus or misshapen.
    """
    names = before = names_to_fill(model)
    dtype: Any = model.config.dtype
    others = {
        one: value for one, value in overrides.items() if not one.startswith(("sink", "gate"))
    }
    if len(others) < len(overrides):
        before = names_to_fill(empty_model(families.configured(plan, others, name), name))
    # parts that the caller leaves out
    known = {plan.family.source(plan, target)[0] for target in before if target not in names}
    sources: dict[str, Piece] = {}
    for target, tensor in model.state_dict().items():
        piece = _piece(plan, target, tensor, weights, dtype)
        # the head of a tied model is in some files
        if piece.names[0] in weights or (target in names and target in before):
            sources[target] = piece
    wanted = {one: piece for piece in sources.values() for one in piece.names}
    refuse_tensors(
        name,
        {
            "missing": [one for one in wanted if one not in weights],
            # old Llama files keep the rotary frequencies
            "unexpected": [
                one
                for one in weights
                if one not in {*wanted, *known} and not one.endswith("rotary_emb.inv_freq")
            ],
            "mismatched": [
                f"{one} has shape {weights[one].shape}, which does not give {target} "
                f"{tuple(piece.like.shape)}"
                for target, piece in sources.items()
                for one in piece.names
                if one in weights and piece.shape_of(one) != piece.wanted_shape()
            ],
        },
    )
    return sources


def _piece(
    plan: CheckpointPlan, target: str, tensor: Tensor, weights: Weights, dtype: torch.dtype
) -> Piece:
    """The family's source; for a tensor of all experts that the checkpoint does not have, the
    tensors of each.
    """
    name, take = plan.family.source(plan, target)
    found = re.fullmatch(r"(.+\.experts\.)(gate_up_proj|down_proj)", name)
    if name in weights or found is None:
        return Piece((name,), take, weights, tensor, dtype)
    each = [
        f"{found[1]}{expert}.{kind}.weight"
        for expert in range(len(tensor))
        for kind in _EXPERTS[found[2]]
    ]
    return Piece(tuple(each), None, weights, tensor, dtype)


def refuse_tensors(name: str, wrong: Mapping[str, list[str]]) -> None:
    """Raises ValueError for tensors of a checkpoint that do not fit, by kind of fault, if any."""
    listed = [
        f"{kind}: {', '.join(names[:5])}" + f" and {len(names) - 5} more" * (len(names) > 5)
        for kind, names in wrong.items()
        if names
    ]
    if listed:
        raise ValueError(
            f"the tensors of {name} do not fit its config ({'; '.join(listed)}); check that "
            "weights and config belong together"
        )


@contextmanager
def quiet() -> Iterator[None]:
    """No progress bars and reports of transformers in this block, also for one tensor."""
    level, has_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if has_bars:
            logging.enable_progress_bar()


def filled(
    model: PreTrainedModel,
    source: Mapping[str, Any] | Path,
    name: str,
    dtype: torch.dtype,
    device_map: DeviceMap,
) -> PreTrainedModel:
    """The model of an empty one, made and placed by transformers; what has no tensor starts anew.

    Args:
        model: from :func:`empty_model`.
        source: tensors by the model's names, or a folder whose tensors have these.
        name: of the checkpoint, for messages.
        dtype: of the weights.
        device_map: as transformers takes it.

    Raises:
        ValueError: if files or devices cannot be used, tensors of a folder do not fit the config,
            or weights hold NaN or infinity.
    """
    folder: Path | None = None
    given: dict[str, Any] = {"state_dict": source}
    if isinstance(source, Path):
        folder, given = source, {"use_safetensors": True}
    config: Any = model.config
    quantised = stated(config, "quantization_config")
    fault = f"the weights of {name} cannot be read and placed"
    if quantised:
        fault = (
            f"{name} is quantised ({quantised.get('quant_method')}), and what reads that is not "
            "installed, or cannot; take the original"
        )
    given |= {"dtype": dtype, "device_map": device_map, "attn_implementation": "sdpa"}
    with refused(fault), quiet():
        # shapes are reported with the names
        read: Any = type(model).from_pretrained(
            folder,
            config=config,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **given,
        )
    made, found = read
    if folder is not None:
        if not quantised:
            # as transformers' own class does
            found["unexpected_keys"] = []
        refuse_tensors(name, {kind: sorted(map(str, names)) for kind, names in found.items()})
    return checked(made, name)


def checked(model: Any, name: str) -> PreTrainedModel:
    """This model, in evaluation mode. Raises ValueError for a head that is not tied although its
    config says so, and for weights that are no numbers.
    """
    head = model.get_output_embeddings()
    if model.config.tie_word_embeddings and head.weight is not model.get_input_embeddings().weight:
        raise ValueError(
            "config.json ties the head to the embedding (tie_word_embeddings, LLaDA's "
            f"weight_tying), but the head of {name} is another tensor; set it to false in "
            "config.json"
        )
    for target, tensor in model.state_dict().items():
        is_there = tensor.is_floating_point() and not tensor.is_meta and tensor.numel()
        # extremes need no memory, and NaN, if there is one, is an extreme
        if is_there and not all(map(math.isfinite, tensor.aminmax())):
            raise ValueError(
                f"the weights {target} of {name} hold NaN or infinity in {tensor.dtype}; fetch "
                "them again"
            )
    if model.dtype == torch.float64 or model.device.type == "cpu":
        # one by one: torch multiplies groups in narrower types alone, and on a CPU not of every
        # width
        model.base_model.config._experts_implementation = "eager"
    return model.eval()
