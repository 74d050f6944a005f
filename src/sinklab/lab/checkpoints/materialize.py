"""Building a model without memory and filling it tensor by tensor, so that the host never holds it
twice.
"""

import math
import re
import warnings
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from sinklab.core.errors import near, one_of
from sinklab.core.subject import DiffusionLM, DiffusionLMConfig
from sinklab.lab.checkpoints import families
from sinklab.lab.checkpoints.families import CheckpointPlan, Part
from sinklab.lab.checkpoints.weights import Weights
from sinklab.lab.files import counted, refused

DeviceMap = str | dict[str, Any]
CPU_FLAGS = Path("/proc/cpuinfo")
HEAD = "lm_head.weight"
BALANCED = ("auto", "balanced", "balanced_low_0", "sequential")
"""Words of accelerate for device maps."""


Sources = dict[str, tuple[tuple[str, ...], Part | None]]
"""Name in the model's state dict -> tensors of the checkpoint, and the part to take of it if it is
one; several are rows of one tensor.
"""
# what transformers holds of all experts in one tensor (experts, rows, columns) -> what a file may
# have of each
_EXPERTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


def plan_devices(
    model: PreTrainedModel, device_map: DeviceMap, dtype: torch.dtype
) -> dict[str, Any]:
    """A full device map for a model on the meta device.

    Args:
        model: from :func:`empty_model`.
        device_map: one of :data:`BALANCED` (accelerate measures the devices), or module names and
            devices.
        dtype: of the weights.

    Raises:
        ValueError: for an unknown word, a module without a device, a device that is not there, or
            weights on disk.
    """
    if isinstance(device_map, str):
        devices = _balanced(model, device_map, dtype)
    else:
        devices = dict(device_map)
    if "disk" in map(str, devices.values()):
        raise ValueError(
            "some weights would go to disk, which sinklab does not do; use a smaller dtype or model"
        )
    for device in devices.values():
        usable_device(device)
    devices = _beside_their_layers(model, devices)
    known = [name for name, _ in [*model.named_modules(), *model.named_parameters()]]
    strangers = [name for name in devices if name not in known]
    if strangers:
        hint = near(strangers[0], known) or "print(model) shows its modules"
        raise ValueError(
            f"device_map names {strangers[0]!r}, which the model does not have; {hint}"
        )
    for name in model.state_dict():
        device_in(devices, name)
    return devices


def _balanced(model: PreTrainedModel, word: str, dtype: torch.dtype) -> dict[str, Any]:
    from accelerate import infer_auto_device_map
    from accelerate.utils import get_balanced_memory

    one_of(
        "device_map",
        word,
        (*BALANCED, "or a dict of modules and devices (for one device use device=)"),
    )
    whole: Any = {"no_split_module_classes": list(model._no_split_modules or ()), "dtype": dtype}
    memory = None
    if word != "sequential":
        memory = get_balanced_memory(model, low_zero=word == "balanced_low_0", **whole)
    return dict(infer_auto_device_map(model, max_memory=memory, **whole))


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


def _beside_their_layers(model: PreTrainedModel, devices: dict[str, Any]) -> dict[str, Any]:
    """A gate multiplies inside its layer, and the sinks enter like embeddings: they are on the
    device of those.
    """
    if "" in devices:
        return devices
    sinks = [name for name, _ in model.named_parameters(recurse=False)]
    devices = {
        name: device for name, device in devices.items() if not name.startswith(("gates", *sinks))
    }
    for name, _ in model.named_modules():
        if re.fullmatch(r"gates\.\d+", name):
            devices[name] = device_in(devices, name.replace("gates", "model.layers"))
    return devices | {name: device_in(devices, "model.embed_tokens") for name in sinks}


def device_in(devices: Mapping[str, Any], name: str) -> Any:
    """The device of a tensor or module: that of the longest name in the map that contains it."""
    parts = name.split(".")
    for end in range(len(parts), -1, -1):
        prefix = ".".join(parts[:end])
        if prefix in devices:
            return devices[prefix]
    raise ValueError(f"device_map does not cover the model: it has no device for {name}")


def dispatch(model: PreTrainedModel, devices: dict[str, Any]) -> PreTrainedModel:
    """Let accelerate move activations between the devices of the map."""
    from accelerate import dispatch_model

    with warnings.catch_warnings():
        # it expects modules alone; the sinks are a parameter, and the names have been checked
        warnings.filterwarnings("ignore", "The following device_map keys do not match")
        return dispatch_model(model, devices)


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


def read_quantised(
    config: Any, folder: Path, how: Any, device_map: DeviceMap, name: str
) -> PreTrainedModel:
    """The model of a folder whose weights transformers' own quantisers read; tensors have the
    model's names.

    Raises:
        ValueError: if the library that wrote them is not there or cannot read them, or tensors do
            not fit the config.
    """
    build: Any = AutoModelForCausalLM
    if isinstance(config, DiffusionLMConfig):
        build = DiffusionLM
    config.quantization_config = dict(how)
    options = {
        "dtype": config.dtype,
        "device_map": device_map,
        "attn_implementation": "sdpa",
        "use_safetensors": True,
    }
    method = how.get("quant_method")
    with refused(
        f"{name} is quantised ({method}), and what reads that is not installed, or cannot; take "
        "the original"
    ):
        model, found = build.from_pretrained(
            folder, config=config, output_loading_info=True, **options
        )
    wrong = {kind: sorted(map(str, names)) for kind, names in found.items() if names}
    if wrong:
        raise ValueError(
            f"the tensors of {name} do not fit its config ({wrong}); check that they belong "
            "together"
        )
    return model.eval()


def names_to_fill(model: PreTrainedModel) -> list[str]:
    """Tensors that a checkpoint of this model has; one that is tied to another (the head) is
    none.
    """
    return [name for name in model.state_dict() if name not in model.all_tied_weights_keys]


def sources_of(
    plan: CheckpointPlan,
    model: PreTrainedModel,
    weights: Weights,
    overrides: Mapping[str, Any],
    name: str,
) -> Sources:
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
    others = {
        one: value for one, value in overrides.items() if not one.startswith(("sink", "gate"))
    }
    if len(others) < len(overrides):
        before = names_to_fill(empty_model(families.configured(plan, others, name), name))
    theirs = weights.shapes
    sources: Sources = {}
    mismatched = []
    # parts that the caller leaves out, and the head of a tied model, which some files have
    known = {plan.family.source(plan, target)[0] for target in before if target not in names}
    if model.config.tie_word_embeddings:
        known.add(plan.family.source(plan, HEAD)[0])
    for target, tensor in model.state_dict().items():
        if target not in names:
            continue
        given, take = _source(plan, target, tensor, weights)
        if target not in before and given[0] not in theirs:
            continue
        sources[target] = given, take
        shape = tuple(tensor.shape)
        each = shape
        if len(given) > 1:
            # of the rows of all experts, those of one
            each = (shape[0] * shape[1] // len(given), *shape[2:])
        mismatched += [
            f"{one} has shape {theirs[one]}, which does not give {target} {shape}"
            for one in given
            if one in theirs and _taken(theirs[one], take) != each
        ]
    wanted = dict.fromkeys(one for given, _ in sources.values() for one in given)
    known |= wanted.keys()
    wrong = {
        "missing": [one for one in wanted if one not in theirs],
        # old Llama files keep the rotary frequencies
        "unexpected": [
            one for one in theirs if one not in known and not one.endswith("rotary_emb.inv_freq")
        ],
        "mismatched": mismatched,
    }
    listed = [
        f"{key}: {', '.join(names[:5])}" + f" and {len(names) - 5} more" * (len(names) > 5)
        for key, names in wrong.items()
        if names
    ]
    if listed:
        raise ValueError(
            f"the tensors of {name} do not fit its config ({'; '.join(listed)}); check that "
            "weights and config belong together"
        )
    return sources


def _source(
    plan: CheckpointPlan, target: str, tensor: Tensor, weights: Weights
) -> tuple[tuple[str, ...], Part | None]:
    """The family's source; for a tensor of all experts that the checkpoint does not have, the
    tensors of each.
    """
    name, take = plan.family.source(plan, target)
    found = re.fullmatch(r"(.+\.experts\.)(gate_up_proj|down_proj)", name)
    if name in weights.shapes or found is None:
        return (name,), take
    each = [
        f"{found[1]}{expert}.{kind}.weight"
        for expert in range(len(tensor))
        for kind in _EXPERTS[found[2]]
    ]
    return tuple(each), None


def _taken(shape: tuple[int, ...], take: Part | None) -> tuple[int, ...]:
    """The shape of the part taken of a tensor; () if it cannot be taken."""
    if take is None:
        return shape
    with suppress(RuntimeError, IndexError):
        return tuple(take(torch.empty(shape, device="meta")).shape)
    return ()


def fill(
    model: PreTrainedModel,
    sources: Sources,
    weights: Weights,
    dtype: torch.dtype,
    devices: Mapping[str, Any],
) -> None:
    """Give every tensor its memory and contents, one at a time; tie the tied ones, initialise those
    without a source, compute those that no checkpoint has.
    """
    empty = model.state_dict(keep_vars=True)
    for target, (names, take) in counted("reading weights", sources.items(), len(sources)):
        tensor = _allocated(model, target, empty[target], dtype, devices)
        if len(names) > 1:
            for name, rows in zip(names, tensor.flatten(0, 1).chunk(len(names)), strict=True):
                rows.copy_(weights[name])
        elif take is None:
            tensor.copy_(weights[names[0]])
        else:
            tensor.copy_(take(weights[names[0]]))
        # extremes need no memory, and NaN, if there is one, is an extreme
        if not tensor.is_meta and tensor.numel() and not all(map(math.isfinite, tensor.aminmax())):
            raise ValueError(
                f"the weights {target} hold NaN or infinity in {dtype}; fetch them again"
            )
    if dtype == torch.float64 or "cpu" in {
        torch.device(device).type for device in devices.values()
    }:
        # one by one: torch multiplies groups in narrower types alone, and on a CPU not of every
        # width
        model.model.config._experts_implementation = "eager"
    model.tie_weights()
    new = {target for target in names_to_fill(model) if target not in sources}
    for target in sorted(new):
        _allocated(model, target, empty[target], dtype, devices)
    for owner in sorted({target.rpartition(".")[0] for target in new}):
        module = model.get_submodule(owner)
        parameters: Any = module.named_parameters(recurse=False)
        for leaf, parameter in parameters:
            # a gate that only gets a bias keeps its weight
            parameter._is_hf_initialized = f"{owner}.{leaf}".lstrip(".") not in new
        model._init_weights(module)
    compute_buffers(model, devices)


def check_tied(model: PreTrainedModel, weights: Weights, head: str) -> None:
    """Raises ValueError if the checkpoint has a head all the same that is not the embedding."""
    tied: Any = model.get_input_embeddings().weight
    if head not in weights.shapes or not model.config.tie_word_embeddings:
        return
    if weights.shapes[head] != tuple(tied.shape) or not torch.equal(tied, weights[head].to(tied)):
        raise ValueError(
            "config.json ties the head to the embedding (tie_word_embeddings, LLaDA's "
            f"weight_tying), but {head} of the checkpoint is another tensor; set it to false in "
            "config.json"
        )


def _allocated(
    model: PreTrainedModel,
    name: str,
    empty: Tensor,
    dtype: torch.dtype,
    devices: Mapping[str, Any],
) -> Tensor:
    """The memory of a parameter or buffer that is on the meta device, to be filled in place."""
    # the correction of a router is as precise as its class makes it
    if name.endswith("_bias"):
        dtype = empty.dtype
    tensor = torch.empty(empty.shape, dtype=dtype, device=device_in(devices, name))
    owner, _, leaf = name.rpartition(".")
    module = model.get_submodule(owner)
    if isinstance(empty, nn.Parameter):
        module.register_parameter(leaf, nn.Parameter(tensor, requires_grad=empty.requires_grad))
    else:
        module.register_buffer(leaf, tensor)
    return tensor


def compute_buffers(model: PreTrainedModel, devices: Mapping[str, Any]) -> None:
    """Compute, by the model's classes, the buffers that no checkpoint holds and that are still on
    the meta device, such as the rotary frequencies.
    """
    for name, buffer in [*model.named_buffers()]:
        if buffer.is_meta:
            owner, _, leaf = name.rpartition(".")
            room = torch.empty_like(buffer, device=device_in(devices, name))
            model.get_submodule(owner)._buffers[leaf] = room
    for tensor in model.state_dict(keep_vars=True).values():
        tensor._is_hf_initialized = True
    model.initialize_weights()
