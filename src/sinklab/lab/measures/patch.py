"""Patching: keys and values of one run in another."""

# B batch (1: alike in all rows), H query heads, K key/value heads, S keys, D head dim
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from sinklab.core.errors import limited
from sinklab.core.probing.call import AttentionCall
from sinklab.core.probing.interventions.base import CallSite, LayerIntervention
from sinklab.core.probing.interventions.removals import reference_values
from sinklab.core.probing.listener import Listener
from sinklab.core.probing.scope import whole_numbers
from sinklab.core.probing.tap import tapped
from sinklab.core.registry import interventions

WHAT = ("key", "value", "both")


class Keeper(Listener):
    """Keeps keys and values of every layer of the last forward."""

    def __init__(self) -> None:
        self.kept: dict[str, Tensor] = {}

    def observe(self, call: AttentionCall, out: Tensor) -> None:
        for name, own_BKSD in (("key", call.key_BKSD), ("value", call.value_BKSD)):
            kept_BKSD = own_BKSD.detach().cpu().clone(memory_format=torch.contiguous_format)
            self.kept[f"{call.layer}.{name}"] = kept_BKSD


def save_keys_and_values(model: Any, file: str | Path, *args: Any, **kwargs: Any) -> None:
    """Run ``model(*args, **kwargs)`` once, and write keys and values of every layer for `Patch`."""
    keeper = Keeper()
    with torch.no_grad(), tapped(model, keeper):
        model(*args, **kwargs)
    save_file(keeper.kept, str(file))


@interventions.register("patch")
@dataclass(frozen=True, kw_only=True)
class Patch(LayerIntervention):
    """Keys or values of chosen positions become those of another run (activation patching): does a
    sink follow its key or its value?

    Raises ValueError for no position, and in a call for a file, layer or position that is not
    there, or of another shape.
    """

    file: str
    """A file of `save_keys_and_values`, of one row or as many as the call has."""
    positions: tuple[int, ...]
    """Canvas positions that are overwritten."""
    source: tuple[int, ...] = ()
    """Positions in the other run, one for each; none for the same ones."""
    what: str = limited("both", one_of=WHAT)
    """Vectors that are overwritten."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("positions", "source"):
            object.__setattr__(self, name, whole_numbers(name, getattr(self, name)))
        if not self.positions or len(self.source) not in (0, len(self.positions)):
            raise ValueError(
                "positions name what is overwritten, and source as many positions or none, got "
                f"{len(self.positions)} and {len(self.source)}: name one for each"
            )

    def edit(self, call: AttentionCall, site: CallSite) -> AttentionCall:
        """The call with these keys or values overwritten in the edited heads."""
        key_BHSD = call.for_query_heads(call.key_BKSD)
        value_BHSD = call.for_query_heads(call.value_BKSD)
        if self.what != "value":
            key_BHSD = self._patched(key_BHSD, "key", call, site)
        if self.what != "key":
            value_BHSD = self._patched(value_BHSD, "value", call, site)
        return replace(call, key_BKSD=key_BHSD, value_BKSD=value_BHSD)

    def _patched(self, own_BHSD: Tensor, name: str, call: AttentionCall, site: CallSite) -> Tensor:
        source = self.source or self.positions
        other_BKSD = self._saved(f"{call.layer}.{name}")
        own, other = own_BHSD.shape, other_BKSD.shape
        fits = own[1] % other[1] == 0 and own[3] == other[3] and other[0] in (1, own[0])
        is_there = site.prefix + max(self.positions) < own[2]
        if not (fits and is_there and site.prefix + max(source) < other[2]):
            raise ValueError(
                f"{self.file} has {name}s {tuple(other)} of {call.layer}, which has {tuple(own)}: "
                f"positions {source} cannot be taken to {self.positions}; save a run of the same "
                "architecture, with one row or as many, and name positions of both"
            )
        other_BHSD = call.for_query_heads(other_BKSD.to(own_BHSD))
        patched_BHSD = own_BHSD.clone()
        for to, from_ in zip(self.positions, source, strict=True):
            part_BHD = other_BHSD[:, site.heads, site.prefix + from_]
            patched_BHSD[:, site.heads, site.prefix + to] = part_BHD
        return patched_BHSD

    def _saved(self, name: str) -> Tensor:
        saved = reference_values(self.file)
        if name not in saved:
            raise ValueError(
                f"{self.file} has no {name}, but {', '.join(sorted(saved)[:4])} …: save a run of "
                "the same architecture"
            )
        return saved[name]
