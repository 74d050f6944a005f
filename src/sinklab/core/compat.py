"""Private names of torch, transformers and accelerate that the package relies on, each with a test:
the list to check when one of them is upgraded.
"""

import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType, FunctionType
from typing import Any

import torch
from torch import _C, nn


def stated(thing: Any, name: str, default: Any = None) -> Any:
    """An attribute that objects of torch and transformers have or lack; the default without it."""
    return getattr(thing, name, default)


def config_value(module: Any, name: str) -> Any:
    """A value of the transformers config of a module; None without a config, or without it."""
    return stated(stated(module, "config"), name)


def config_of(module: nn.Module) -> Any:
    """The config that a module holds itself; None without one."""
    return vars(module).get("config")


def has_own_forward(module: nn.Module) -> bool:
    """Whether a module's forward is not that of its class."""
    return "forward" in vars(module)


def seen_length(store: Any) -> int:
    """Positions that a layer of a cache has seen; 0 if it does not tell the host: a static one that
    keeps every key counts on its device.
    """
    length = None
    count = stated(store, "get_seq_length")
    if count is not None:
        length = count()
    if not isinstance(length, int):
        return 0
    return length


def in_backward() -> bool:
    """Whether this thread is inside a backward pass, in which gradient checkpointing runs layers a
    second time.
    """
    return _C._current_graph_task_id() != -1


def is_compiled(module: nn.Module) -> bool:
    """Whether calling this module runs code of torch.compile, which hides its attention calls from
    hooks and modes.
    """
    if "_orig_mod" in module._modules or module._compiled_call_impl is not None:
        return True
    return has_own_forward(module) and hasattr(module.forward, "_torchdynamo_orig_callable")


def _frames(code: CodeType) -> Iterator[FrameType]:
    """The calls of a function that this thread is in, the inner ones first."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is code:
            yield frame
        frame = frame.f_back


def is_running(module: nn.Module) -> bool:
    """Whether a hook before this module's forward is called from within another forward of it, in
    this thread.
    """
    calls = _frames(nn.Module._call_impl.__code__)
    return sum(frame.f_locals["self"] is module for frame in calls) > 1


def generation_modes() -> list[str]:
    """How each ``generate`` of transformers that this thread is in writes: "sample",
    "beam_search", …
    """
    utils = sys.modules.get("transformers.generation.utils")
    if utils is None:
        return []
    calls = _frames(inspect.unwrap(utils.GenerationMixin.generate).__code__)
    return [frame.f_locals["generation_mode"].value for frame in calls]


def compiled_module(module: nn.Module) -> nn.Module:
    """The module that torch.compile was given for this one; the module itself if it was not, or if
    it compiles itself.
    """
    inner: Any = module._modules.get("_orig_mod", module)
    return inner


def forward_hooks(module: nn.Module) -> tuple[dict[int, Any], dict[int, Any]]:
    """The hooks of a module by number: those before its forward, and those after it."""
    return module._forward_pre_hooks, module._forward_hooks


@contextmanager
def without_tf32(device: torch.device) -> Iterator[None]:
    """Make float32 products on CUDA exact inside the block. Of torch's two switches the newer
    governs cuBLAS, and follows the older; "none" is exact.
    """
    switch = torch.backends.cuda.matmul
    before = switch.fp32_precision
    if device.type != "cuda" or before == "none":
        yield
        return
    switch.fp32_precision = "ieee"
    try:
        yield
    finally:
        switch.fp32_precision = before


def with_sdpa_replaced(function: Any, attention: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    """A function of torch.nn.functional that is written in Python, with `attention` in place of
    SDPA inside.

    A mode is given such a function whole. Its names are another dictionary here, and torch's own
    stays as it is.
    """
    own = {"has_torch_function": lambda tensors: False, "scaled_dot_product_attention": attention}
    inside = FunctionType(
        function.__code__, function.__globals__ | own, argdefs=function.__defaults__
    )
    inside.__kwdefaults__ = function.__kwdefaults__
    return inside


def choose_attention(config: Any, name: str) -> None:
    """Give a transformers config this attention without a look at the Hub, which may have a
    repository of that name.
    """
    config._attn_implementation = name


def lacks_sdpa(model: nn.Module) -> str:
    """Name of the transformers class in this model that has no SDPA, so that asking for it changes
    nothing; else "".
    """
    for module in model.modules():
        if stated(type(module), "_supports_sdpa") is False:
            return type(module).__name__
    return ""


def attention_of(config: Any) -> Any:
    """Name of the attention function that a transformers config asks for; else None."""
    name = stated(config, "_attn_implementation")
    if not isinstance(name, str):
        return None
    return name


def declares_interface(modules: Iterable[nn.Module]) -> bool:
    """Whether transformers declares of every model among these modules, at least one, that it is a
    text model and has its attention functions from `AttentionInterface` alone.

    Models of images and sound may declare it beside calls of their own. A test holds every text
    model of transformers to what it declares.
    """
    kinds: set[Any] = {type(module) for module in modules}
    declared = [stated(kind, "_supports_attention_backend") for kind in kinds]
    reads = [stated(kind, "input_modalities", "text") for kind in kinds]
    only_text = all(one in ("text", ("text",), ["text"]) for one in reads)
    return only_text and True in declared and False not in declared


def wrap_attention(wrap: Callable[[str, Callable], Callable] | None) -> None:
    """Have every module that asks transformers for its attention function be given ``wrap(name,
    function)``; None: the function itself again.
    """
    from transformers import AttentionInterface

    interface: Any = AttentionInterface
    own = inspect.unwrap(interface.get_interface)
    if wrap is None:
        interface.get_interface = own
        return

    @functools.wraps(own)
    def get_interface(self: Any, name: str, default: Callable) -> Callable:
        return wrap(name, own(self, name, default))

    interface.get_interface = get_interface


def choose_experts(config: Any, name: str) -> None:
    """Give a transformers config this way to compute its experts; a model that is built of it
    follows at once.
    """
    config._experts_implementation = name


def indivisible_layers(model: Any) -> list[str]:
    """Classes of a transformers model's layers that a device map may not divide."""
    return list(model._no_split_modules or ())


def mark_initialized(parameter: Any, initialized: bool) -> None:
    """Whether transformers' ``_init_weights`` leaves this parameter as it is."""
    parameter._is_hf_initialized = initialized


def is_divided(model: Any) -> bool:
    """Whether transformers has divided the tensors of this model over processes (tensor
    parallelism).
    """
    return (stated(model, "_tp_size") or 1) > 1


# keywords of PreTrainedConfig, or keys that transformers writes into config.json, without a field
# of that name
_CONFIG_KEYS = {
    "model_type",
    "tie_word_embeddings",
    "pad_token_id",
    "eos_token_id",
    "bos_token_id",
    "torch_dtype",
    "name_or_path",
    "_name_or_path",
    "_commit_hash",
    "output_attentions",
    "use_cache",
    "auto_map",
    "attn_implementation",
    "_attn_implementation",
    "_attn_implementation_internal",
    "num_labels",
    "experts_implementation",
    "_experts_implementation_internal",
    "quantization_config",
}


def config_keys() -> set[str]:
    """Keys that a config of transformers may have, whatever its model."""
    from transformers import PreTrainedConfig

    fields = {field.name for field in dataclasses.fields(PreTrainedConfig)}
    return fields | {*PreTrainedConfig().to_dict()} | _CONFIG_KEYS
