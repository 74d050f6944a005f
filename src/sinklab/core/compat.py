"""Private names of torch and transformers that the core relies on, to check at an upgrade: each has
a test.
"""

import dataclasses
import functools
import inspect
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import _C, nn


def stated(thing: Any, name: str, default: Any = None) -> Any:
    """An attribute that may be missing."""
    return getattr(thing, name, default)


def config_value(module: Any, name: str) -> Any:
    """A value of a module's transformers config, or None."""
    return stated(stated(module, "config"), name)


def seen_length(store: Any) -> int:
    """Positions that a layer of a cache has seen; 0 if it counts on its device, as a static one."""
    length = stated(store, "get_seq_length", int)()
    if not isinstance(length, int):
        return 0
    return length


def in_backward() -> bool:
    """Whether this thread is in a backward pass, where checkpointing runs layers again."""
    return _C._current_graph_task_id() != -1


def graph_node() -> int:
    """Number of the node of a graph where this thread's backward pass is, else of the next one that
    it makes: forwards make nodes of rising numbers.
    """
    node: Any = _C._current_autograd_node()
    if node is None:
        return torch.autograd._get_sequence_nr()
    return node._sequence_nr()


def is_compiled(module: nn.Module) -> bool:
    """Whether calling this module runs code of torch.compile."""
    if "_orig_mod" in module._modules or module._compiled_call_impl is not None:
        return True
    return stated(module.forward, "_torchdynamo_orig_callable") is not None


def _calls_of(code: CodeType) -> list[dict[str, Any]]:
    """Local variables of every call of this code that the thread is in."""
    frames = traceback.walk_stack(sys._getframe())
    return [frame.f_locals for frame, _ in frames if frame.f_code is code]


def is_running(module: nn.Module) -> bool:
    """Whether this module's forward runs inside another forward of it."""
    calls = _calls_of(nn.Module._call_impl.__code__)
    return sum(call["self"] is module for call in calls) > 1


def generation_modes() -> list[str]:
    """The mode of each ``generate`` that this thread is in: "sample", "beam_search", …"""
    utils = sys.modules.get("transformers.generation.utils")
    if utils is None:
        return []
    calls = _calls_of(inspect.unwrap(utils.GenerationMixin.generate).__code__)
    return [call["generation_mode"].value for call in calls]


def compiled_module(module: nn.Module) -> nn.Module:
    """The module that torch.compile was given, or the module itself."""
    inner: Any = module._modules.get("_orig_mod", module)
    return inner


@contextmanager
def without_tf32(device: torch.device) -> Iterator[None]:
    """Make float32 products on CUDA exact, by the newer of torch's switches: "none" is exact."""
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


def replace_sdpa(function: Any, attention: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    """A function of torch.nn.functional that is written in Python, with `attention` in place of
    SDPA: a mode is given it whole. Torch's own stays as it is.
    """
    own = {"has_torch_function": lambda tensors: False, "scaled_dot_product_attention": attention}
    inside = FunctionType(
        function.__code__, function.__globals__ | own, argdefs=function.__defaults__
    )
    inside.__kwdefaults__ = function.__kwdefaults__
    return inside


def lacks_sdpa(model: nn.Module) -> str:
    """Name of a transformers class in this model that has no SDPA to ask for, or ""."""
    for module in model.modules():
        if stated(type(module), "_supports_sdpa") is False:
            return type(module).__name__
    return ""


def attention_of(config: Any) -> Any:
    """Name of the attention function that a config asks for, or None."""
    name = stated(config, "_attn_implementation")
    if not isinstance(name, str):
        return None
    return name


def declares_interface(modules: Iterable[nn.Module]) -> bool:
    """Whether every model of transformers among these modules, at least one, declares that it reads
    text alone and has its attention functions from `AttentionInterface`.

    Models of images and sound may declare it beside calls of their own.
    """
    kinds: set[Any] = {type(module) for module in modules}
    declared = [stated(kind, "_supports_attention_backend") for kind in kinds]
    reads = [stated(kind, "input_modalities", "text") for kind in kinds]
    only_text = all(one in ("text", ("text",), ["text"]) for one in reads)
    return only_text and True in declared and False not in declared


def wrap_attention(wrap: Callable[[str, Callable], Callable] | None) -> None:
    """Give every module that asks for its attention function ``wrap(name, function)``; None: the
    function itself again.
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


def is_divided(model: Any) -> bool:
    """Whether this model's tensors are divided over processes."""
    return (stated(model, "_tp_size") or 1) > 1


# keys that transformers takes or writes into config.json without a field of that name
_CONFIG_KEYS = {
    "tie_word_embeddings",
    "pad_token_id",
    "eos_token_id",
    "bos_token_id",
    "name_or_path",
    "_commit_hash",
    "use_cache",
    "auto_map",
    "attn_implementation",
    "_attn_implementation",
    "_attn_implementation_internal",
    "_experts_implementation_internal",
    "num_labels",
    "experts_implementation",
    "quantization_config",
}


def config_keys() -> set[str]:
    """Keys that any config of transformers may have."""
    from transformers import PreTrainedConfig

    fields = {field.name for field in dataclasses.fields(PreTrainedConfig)}
    return fields | {*PreTrainedConfig().to_dict()} | _CONFIG_KEYS
