"""Private names of torch, transformers and accelerate that the package relies on, each with a test: the list to check
when one of them is upgraded.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import _C, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle


def is_replayed() -> bool:
    """Whether this thread is inside a backward pass, where gradient checkpointing runs layers a second time."""
    return _C._current_graph_task_id() != -1


def is_compiled(module: nn.Module) -> bool:
    """Whether calling this module runs code of torch.compile, which hides its attention calls from hooks and modes."""
    return "_orig_mod" in module._modules or vars(module).get("_compiled_call_impl") is not None


def forward_hooks(module: nn.Module) -> tuple[dict[int, Any], dict[int, Any]]:
    """The hooks of a module by number: those before its forward, and those after it."""
    return module._forward_pre_hooks, module._forward_hooks


def next_hook() -> int:
    """The number that the next hook gets, on whatever module: while it stays the same, no hook has come."""
    return RemovableHandle.next_id


def has_global_hooks() -> bool:
    """Whether hooks are registered that every module runs."""
    return bool(nn.modules.module._has_any_global_hook())


def onednn_linear() -> Callable[..., torch.Tensor] | None:
    """(x, weight, bias, "none", [], "") -> x · weightᵀ by oneDNN; None where this build of torch lacks it."""
    return getattr(torch.ops.mkldnn, "_linear_pointwise", None)


@contextmanager
def without_tf32(device: torch.device) -> Iterator[None]:
    """Float32 products on CUDA are exact inside the block. Of torch's two switches the newer decides what cuBLAS does,
    and follows the older; "none" is exact."""
    switch = torch.backends.cuda.matmul
    before = switch.fp32_precision if device.type == "cuda" else "none"
    if before != "none":
        switch.fp32_precision = "ieee"
    try:
        yield
    finally:
        if before != "none":
            switch.fp32_precision = before


def attention_with_logsumexp(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The CPU's attention, grouped heads and all, with the log-sum-exp of every row; None on another device."""
    if q.device.type != "cpu":
        return None
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, attn_mask=mask, scale=scale)


_ATEN = torch.ops.aten
# attention kernels that scaled_dot_product_attention chooses from -> where they are asked for the log-sum-exp, which
# they say second; None: they always say it
_KERNELS: dict[Any, Any] = {
    _ATEN._scaled_dot_product_flash_attention.default: None,
    _ATEN._scaled_dot_product_flash_attention_for_cpu.default: None,
    _ATEN._scaled_dot_product_efficient_attention.default: 4,
    _ATEN._scaled_dot_product_cudnn_attention.default: 4,
}


class Overheard(TorchDispatchMode):
    """Hears the log-sum-exp from whichever kernel an attention call inside the block runs; its output stays the same.

    A kernel that says it on request is run both ways on the first call of a kind: where the outputs are not equal to
    the bit, it is left alone.
    """

    _same: ClassVar[dict[tuple, bool]] = {}
    logsumexp: torch.Tensor | None = None
    """(B, H, Q or more), float32, in nats; None where the call ran no such kernel."""
    ran: tuple[Any, tuple, dict[str, Any]] | None = None
    """The kernel that said it, with its arguments."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func is _ATEN.scaled_dot_product_attention.default:
            # inference mode does not take it apart before it comes here
            with self:
                return func.decompose(*args, **kwargs)
        asked = _KERNELS.get(func)
        if asked is not None and not args[asked] and self._may_ask(func, args, kwargs):
            args = _asking(args, asked)
        out = func(*args, **kwargs)
        if func in _KERNELS and (asked is None or args[asked]):
            self.logsumexp, self.ran = out[1], (func, args, kwargs)
        return out

    def _may_ask(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> bool:
        rest = args[_KERNELS[func] :]
        if len(rest) > 1 and rest[1]:
            # two runs with dropout differ in any case
            return False
        tensors = (x for x in args if isinstance(x, torch.Tensor))
        kind = (func, rest, *kwargs.items(), *((x.dtype, x.device, x.shape, x.stride()) for x in tensors))
        if kind not in self._same:
            asked = func(*_asking(args, _KERNELS[func]), **kwargs)
            self._same[kind] = torch.equal(asked[0], func(*args, **kwargs)[0])
        return self._same[kind]


# (kind of call) -> the kernel that runs it, and what it takes beside q, k and v; None: it is to be overheard
_DIRECT: dict[tuple, tuple[Any, tuple, dict[str, Any]] | None] = {}


def attend_and_hear(
    attention: Callable[..., torch.Tensor], args: tuple, kwargs: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What `scaled_dot_product_attention` gives for these arguments, to the bit, and `Overheard.logsumexp`.

    A dispatch mode takes as long as several launches. So the kernel that it has seen run on q, k and v themselves, and
    give the same output again, is called at once where the next call is of the same kind.
    """
    if len(args) != 3 or kwargs.get("attn_mask") is not None or kwargs.get("dropout_p"):
        with Overheard() as heard:
            return attention(*args, **kwargs), heard.logsumexp
    same = ((x.dtype, x.device, x.shape, x.stride(), x.requires_grad) for x in args)
    kind = (torch._fused_sdp_choice(*args, **kwargs), torch.is_grad_enabled(), *kwargs.items(), *same)
    if (direct := _DIRECT.get(kind)) is not None:
        kernel, rest, options = direct
        out, logsumexp, *_ = kernel(*args, *rest, **options)
        return out, logsumexp
    with Overheard() as heard:
        out = attention(*args, **kwargs)
    if kind not in _DIRECT:
        _DIRECT[kind] = None
        kernel, given, options = heard.ran or (None, (), {})
        if all(x.data_ptr() == y.data_ptr() and x.stride() == y.stride() for x, y in zip(args, given, strict=False)):
            again = kernel(*args, *given[3:], **options)[0] if kernel else out[:0]
            if again.stride() == out.stride() and torch.equal(again, out):
                _DIRECT[kind] = kernel, given[3:], options
    return out, heard.logsumexp


def _asking(args: tuple, asked: int) -> tuple:
    return (*args[:asked], True, *args[asked + 1 :])


def choose_attention(config: Any, name: str) -> None:
    """Give a transformers config this attention without a look at the Hub, where another name may be a repository."""
    config._attn_implementation = name


_WATCHED = "sinklab_"


def attention_of(config: Any) -> str | None:
    """Name of the attention function that a transformers config asks for, also while it is watched."""
    name = getattr(config, "_attn_implementation", None)
    return name.removeprefix(_WATCHED) if isinstance(name, str) else None


def watch_attention(configs: Iterable[Any], watched: bool) -> None:
    """Have models of these configs call the watched function of the same attention, or the function itself again."""
    for config in configs:
        if (base := attention_of(config)) is not None:
            # not the property, which changes the configs inside this one as well
            config._attn_implementation_internal = _WATCHED + base if watched else base


def register_watched(base: str, watched: Callable[..., Any]) -> None:
    """Give transformers `watched` in place of this attention, with its masks, under a name that is no repository's."""
    from transformers import AttentionInterface, AttentionMaskInterface

    if _WATCHED + base not in AttentionInterface._global_mapping:
        AttentionInterface.register(_WATCHED + base, watched)
        if (makes_mask := AttentionMaskInterface._global_mapping.get(base)) is not None:
            AttentionMaskInterface.register(_WATCHED + base, makes_mask)


def attention_function(base: str) -> Callable[..., Any] | None:
    """The attention function that transformers has under this name; None for one that every model brings itself."""
    from transformers import AttentionInterface

    return AttentionInterface._global_mapping.get(base)


def choose_experts(config: Any, name: str) -> None:
    """Give a transformers config this way to compute its experts; a model that is built of it follows at once."""
    config._experts_implementation = name


def indivisible_layers(model: Any) -> list[str]:
    """Classes of a transformers model's layers that a device map may not divide."""
    return list(model._no_split_modules or ())


def mark_initialized(parameter: Any, initialized: bool) -> None:
    """Whether transformers' ``_init_weights`` leaves this parameter as it is."""
    parameter._is_hf_initialized = initialized


def is_divided(model: Any) -> bool:
    """Whether transformers has divided the tensors of this model over processes (tensor parallelism)."""
    return (getattr(model, "_tp_size", None) or 1) > 1


def divides_experts() -> bool:
    """Whether this transformers divides experts beside attention: its ``DistributedConfig`` has ``ep_size`` (5.19)."""
    from transformers.distributed import DistributedConfig

    return "ep_size" in DistributedConfig.__dataclass_fields__


def divide(model: Any, plan: dict[str, str], count: int, device: str) -> Any:
    """Divide a model on the meta device over each ``count`` of the processes that run, by transformers' own rules.

    ``plan`` says which part by which; experts go whole to one process each, by the model's own plan. Tensors become
    DTensors, still without memory. Returns the group of processes that hold this model.
    """
    from transformers.distributed import DistributedConfig
    from transformers.distributed.utils import TransformersDeviceMesh

    make: Any = DistributedConfig
    config, world = make(tp_size=count, ep_size=count if model.ep_plan else 1), torch.distributed.get_world_size()
    model.tp_plan = {part: style for part, style in plan.items() if part not in model.ep_plan}
    names = ("pp", "dp_replicate", "fsdp", "tp"), ("pp", "dp_replicate", "efsdp", "ep")
    shape = (1, world // count, 1, count)
    meshes = [torch.distributed.init_device_mesh(device, shape, mesh_dim_names=one) for one in names]
    type(model).maybe_distribute_model(model, config, TransformersDeviceMesh(*meshes))
    # it is a config of the model, and not of this launch
    del model.config.distributed_config
    return meshes[0]["tp"].get_group()


# what PreTrainedConfig takes as keywords, or transformers writes into config.json, without a field of that name
_CONFIG_KEYS = {"model_type", "tie_word_embeddings", "pad_token_id", "eos_token_id", "bos_token_id", "torch_dtype"}
_CONFIG_KEYS |= {"name_or_path", "_name_or_path", "_commit_hash", "output_attentions", "use_cache", "auto_map"}
_CONFIG_KEYS |= {"attn_implementation", "_attn_implementation", "_attn_implementation_internal", "num_labels"}
_CONFIG_KEYS |= {"experts_implementation", "_experts_implementation_internal", "quantization_config"}


def config_keys() -> set[str]:
    """Keys that a config of transformers may have, whatever its model."""
    from transformers import PreTrainedConfig

    fields = {field.name for field in dataclasses.fields(PreTrainedConfig)}
    return fields | {*PreTrainedConfig().to_dict()} | _CONFIG_KEYS
