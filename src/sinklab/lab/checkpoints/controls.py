"""Untrained controls of a model: freshly initialised, or with its weights permuted."""

import copy
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sinklab.lab.checkpoints.loading import Loaded
from sinklab.lab.checkpoints.wrapped import WrappedLM
from sinklab.lab.files import refused


def initialised(loaded: Loaded, seed: int = 0) -> Loaded:
    """A model of this architecture, freshly initialised as its class does it before training.

    The numbers follow from the seed alone, whatever the device and type of the model. The host
    holds the weights once more, in float32, while this takes.

    Raises:
        ValueError: for a class that cannot be made from the model's config, or makes other tensors
            than the model has.
    """
    twin = copy.deepcopy(loaded.model).eval()
    made: Any = twin
    if isinstance(twin, WrappedLM):
        made = twin.foreign
    fault = (
        f"{type(made).__name__} cannot be initialised from the config of {loaded.name} alone, so "
        "there is no freshly initialised twin; the one with permuted weights needs no class"
    )
    with refused(fault), torch.random.fork_rng(devices=[]):
        # not the seed itself: a model made under it would be its own twin
        torch.manual_seed(
            int(torch.randint(2**62, (), generator=torch.Generator().manual_seed(seed)))
        )
        made.load_state_dict(type(made)(copy.deepcopy(made.config)).state_dict())
    return replace(loaded, model=twin, name=f"{loaded.name} (freshly initialised)")


@torch.no_grad()
def permuted(loaded: Loaded, seed: int = 0) -> Loaded:
    """The model with the numbers of each tensor in random order: their sizes are the trained ones,
    nothing else is.

    Tied tensors are one and stay tied; those of sinks and gates are permuted like all others. The
    order follows from the seed alone. Raises ValueError for weights that a quantiser stores.
    """
    twin = copy.deepcopy(loaded.model).eval()
    generator = torch.Generator().manual_seed(seed)
    with refused(
        f"the weights of {loaded.name} cannot be permuted as they are stored; load floating point "
        "ones"
    ):
        for tensor in _saved(twin):
            order = torch.randperm(tensor.numel(), generator=generator).to(tensor.device)
            # three times as fast as an index
            tensor.copy_(tensor.flatten().index_select(0, order).view_as(tensor))
    return replace(loaded, model=twin, name=f"{loaded.name} (weights permuted)")


PIECE = 2**16
"""Numbers of a tensor that `shuffled` shuffles among each other: their order fits a cache."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@contextmanager
def shuffled(loaded: Loaded, seed: int = 0) -> Iterator[None]:
    """The model itself with its weights shuffled, as long as this lasts; then, also after an
    exception, they are what they were, bit for bit.

    The cheap form of `permuted`: no second model is held, and numbers change places within pieces
    of `PIECE`, by one random order that every piece turns by a number of its own. The order follows
    from the seed alone.

    Raises:
        ValueError: for weights that cannot be shuffled where they are: those that a quantiser
            stores or that are not in memory.
    """
    tensors = _saved(loaded.model)
    if any(_stands_elsewhere(tensor) for tensor in tensors):
        raise ValueError(
            f"the weights of {loaded.name} cannot be shuffled as they are stored; load floating "
            "point ones, on devices with room for all"
        )
    order_P = torch.randperm(PIECE, generator=torch.Generator().manual_seed(seed))
    written: list[tuple[Tensor, int, int]] = []
    try:
        for number, tensor in enumerate(tensors):
            moved = _moved(tensor, order_P, seed + number, back=False)
            # an interrupt may come between this line and the next
            written.append((tensor, tensor._version, seed + number))
            _write(tensor, moved)
        yield
    finally:
        # the last first: tensors may share memory
        for tensor, version, turns in reversed(written):
            if tensor._version != version:
                _write(tensor, _moved(tensor, order_P, turns, back=True))


def _saved(model: torch.nn.Module) -> list[Tensor]:
    """Every tensor of a model once, also of tied ones. Of the buffers, those that are saved are
    trained: what corrects a router.
    """
    saved = model.state_dict(keep_vars=True).values()
    return [*{id(tensor): tensor for tensor in saved}.values()]


def _stands_elsewhere(tensor: Tensor) -> bool:
    is_plain = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.is_floating_point()
    return not is_plain or tensor.is_meta or tensor.is_inference()


@torch.no_grad()
def _write(tensor: Tensor, bits: Tensor) -> None:
    tensor.copy_(bits.view(tensor.dtype).view_as(tensor))


def _moved(tensor: Tensor, order_P: Tensor, seed: int, *, back: bool) -> Tensor:
    """The bits of a tensor, flat, each piece turned and put in order; ``back``: as before that."""
    bits = tensor.detach().contiguous().view(_BITS[tensor.itemsize]).flatten()
    turns = random.Random(seed)
    moved = torch.empty_like(bits)
    for piece, to in zip(bits.split(PIECE), moved.split(PIECE), strict=True):
        count = len(piece)
        order = order_P[order_P < count].to(bits.device)
        turn = turns.randrange(count)
        if back:
            to[order] = piece
            to.copy_(to.roll(-turn))
        else:
            torch.index_select(piece.roll(turn), 0, order, out=to)
    return moved


UNTRAINED: dict[str, Callable[[Loaded, int], Loaded]] = {
    "initialised": initialised,
    "permuted": permuted,
}
"""Name of an untrained control -> its maker, to hold one at a time in memory."""
