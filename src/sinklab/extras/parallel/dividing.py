"""A model divided over processes, for inference: the parts transformers divides, the refusals, and
the part each process reads.
"""

import atexit
import os
import re
from datetime import timedelta
from typing import Any

import torch
import transformers
from torch import Tensor, distributed, nn
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel
from transformers.distributed import DistributedConfig

from sinklab.core.registry import divisions
from sinklab.lab.checkpoints.materialize import Holding

RULES: dict[str, int | None] = {"colwise": 0, "rowwise": -1, "grouped_gemm": 0}
RULES |= dict.fromkeys(("ep_dispatch_experts", "replicated_with_grad_allreduce"))
"""Style of transformers' plans -> the axis of a weight that it divides, in order of rank. Each
leaves every process the heads or experts of its own, and sums their outputs before the next layer
reads it.
"""
# every process holds these whole, so that embeddings, logits and losses are those of one process
WHOLE = {"model.embed_tokens", "lm_head"}


@divisions.register("transformers")
class Divided(Holding):
    """A part of each tensor, by the plans of transformers."""

    def place(self, count: int, device: Any) -> Any:
        """The device of this process; see `place_of`."""
        return place_of(count, device)

    def divide(self, model: PreTrainedModel, count: int, device: Any, name: str) -> PreTrainedModel:
        """Divide a model on the meta device; see `divided`."""
        return divided(model, count, device, name)

    def part_of(self, tensor: Any) -> tuple[slice, ...]:
        """A slice an axis; all of an axis that is not divided."""
        part = [slice(0, size) for size in tensor.shape]
        if not isinstance(tensor, DTensor):
            return tuple(part)
        for placement in tensor.placements:
            if isinstance(placement, Shard):
                size = tensor.shape[placement.dim] // tensor.device_mesh.size()
                start = size * tensor.device_mesh.get_local_rank()
                part[placement.dim] = slice(start, start + size)
        return tuple(part)

    def as_held(self, tensor: Tensor, empty: Any) -> nn.Parameter:
        """A parameter with these contents, divided as an empty one is."""
        if isinstance(empty, DTensor):
            tensor = DTensor.from_local(
                tensor, empty.device_mesh, empty.placements, run_check=False
            )
        return nn.Parameter(tensor, requires_grad=empty.requires_grad)


def place_of(count: int, device: Any) -> torch.device:
    """The device on which this process holds its part of a model.

    Raises:
        ValueError: if the processes that torchrun started cannot hold models of ``count`` processes
            each, and for a transformers that cannot divide experts.
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world % count:
        raise ValueError(
            f"tensor_parallel={count} takes {count} processes for each model, but {world} run "
            f"here: start torchrun --nproc-per-node {count}, or a multiple of {count}"
        )
    if not divides_experts():
        raise ValueError(
            "tensor_parallel needs a transformers whose DistributedConfig has ep_size, 5.19 or "
            f"newer, but this is {transformers.__version__}; install a newer one"
        )
    if device is None:
        device = "cpu"
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return device


def divided(model: PreTrainedModel, count: int, device: torch.device, name: str) -> PreTrainedModel:
    """A model on the meta device with its attention, MLPs and experts divided over each ``count``
    processes.

    Raises:
        ValueError: for a class or a style without a rule, and sizes that ``count`` does not divide.
    """
    plan = _checked_plan(model, count, name)
    backend = "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"
    if not distributed.is_initialized():
        # some may wait for the last sample of others
        distributed.init_process_group(backend, timeout=timedelta(days=7))
        atexit.register(_leave_group)
    group = divide(model, plan, count, device.type)
    # draws without a seed are the same in all of them
    state = torch.get_rng_state()
    distributed.broadcast(state, group=group, group_src=0)
    torch.set_rng_state(state)
    return model.requires_grad_(False)


def _leave_group() -> None:
    """End the threads of the process group before the interpreter does: a process that aborts takes
    the others with it.
    """
    if distributed.is_initialized():
        distributed.destroy_process_group()


def _checked_plan(model: PreTrainedModel, count: int, name: str) -> dict[str, str]:
    """Parts of the model -> the style that divides each, numbers of layers as *."""

    def general(part: str) -> str:
        return re.sub(r"\.\d+(?=\.|$)", ".*", part)

    every = [one for one, _ in [*model.named_modules(), *model.named_parameters()]]
    plan = {**(model.tp_plan or {}), **(model.ep_plan or {}), "gates.*": "colwise"}
    plan = {part: style for part, style in plan.items() if part in {*map(general, every)} - WHOLE}
    config: Any = getattr(model.config, "backbone", model.config)
    wrong = f"{name} ({config.model_type}) cannot be divided over processes"
    if not {"q_proj", "k_proj", "v_proj", "o_proj"} <= {part.rpartition(".")[2] for part in plan}:
        raise ValueError(
            f"{wrong}: there is no plan for its attention; load it without tensor_parallel"
        )
    unknown = sorted({*plan.values()} - RULES.keys())
    if unknown:
        raise ValueError(
            f"{wrong}: its plan has the style {unknown[0]!r}, and rules are known for "
            f"{', '.join(RULES)}; load it without tensor_parallel"
        )
    heads = {"query": config.num_attention_heads, "key/value": config.num_key_value_heads}
    for kind in [kind for kind, number in heads.items() if number % count]:
        raise ValueError(
            f"every process holds as many heads of a model, but {name} has {heads[kind]} {kind} "
            f"heads for tensor_parallel={count}; pass a divisor of {heads[kind]}"
        )
    for part, tensor in model.named_parameters():
        style = plan.get(general(part), plan.get(general(part.rpartition(".")[0]), ""))
        axis = RULES.get(style)
        if axis is not None and tensor.ndim > 1 and tensor.shape[axis] % count:
            raise ValueError(
                f"{part} of {name} is divided evenly, but has shape {tuple(tensor.shape)} for "
                f"tensor_parallel={count}; pass a divisor of {tensor.shape[axis]}"
            )
    return plan


def divides_experts() -> bool:
    """Whether this transformers divides experts beside attention: its ``DistributedConfig`` has
    ``ep_size`` (5.19).
    """
    return "ep_size" in DistributedConfig.__dataclass_fields__


def divide(model: Any, plan: dict[str, str], count: int, device: str) -> Any:
    """Divide a model on the meta device over each ``count`` of the processes that run, by
    transformers' own rules.

    ``plan`` says which part by which; experts go whole to one process each, by the model's own
    plan. Tensors become DTensors, still without memory. Returns the group of processes that hold
    this model.
    """
    # not in the oldest transformers
    from transformers.distributed.utils import TransformersDeviceMesh

    make: Any = DistributedConfig
    config = make(tp_size=count, ep_size=count if model.ep_plan else 1)
    world = distributed.get_world_size()
    model.tp_plan = {part: style for part, style in plan.items() if part not in model.ep_plan}
    shape = (1, world // count, 1, count)
    meshes = []
    for names in (("pp", "dp_replicate", "fsdp", "tp"), ("pp", "dp_replicate", "efsdp", "ep")):
        meshes.append(distributed.init_device_mesh(device, shape, mesh_dim_names=names))
    type(model).maybe_distribute_model(model, config, TransformersDeviceMesh(*meshes))
    # it is a config of the model, and not of this launch
    del model.config.distributed_config
    return meshes[0]["tp"].get_group()
