"""Removals that keep the mass on the keys and give them other values: zero, or those of other keys,
seen or of reference texts.
"""

# B batch, H query heads, S keys, D head dim
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from sinklab.core.attention.visibility import allowed
from sinklab.core.errors import check_tensor
from sinklab.core.instrument.call import Call
from sinklab.core.instrument.edits.removals import Removal
from sinklab.core.instrument.keys import one_row_mask
from sinklab.core.registry import removals
from sinklab.lab.files import ordinary, refused


@dataclass(frozen=True)
class ValueRemoval(Removal):
    """Base of removals that keep the attention and give the keys other values: a subclass says
    which, in `values`, and is registered under a name::

        @removals.register("halve_value")
        @dataclass(frozen=True)
        class HalveValue(ValueRemoval):
            def values(self, call, value_BHSD, blocked_BHS, random_BHS):
                return value_BHSD / 2
    """

    def values(
        self, call: Call, value_BHSD: Tensor, blocked_BHS: Tensor, random_BHS: Tensor
    ) -> Tensor:
        """New values, broadcastable to (B, H, S, D); those of the other keys do not count."""
        raise NotImplementedError

    def apply(self, call: Call, blocked_BHS: Tensor, random_BHS: Tensor) -> Call:
        """The call with other values for these keys."""
        # Query heads of one value head lose different keys: each needs its own values.
        key_BHSD = call.expand_kv(call.k_BKSD)
        value_BHSD = call.expand_kv(call.v_BKSD)
        new_BHSD = self.values(call, value_BHSD, blocked_BHS, random_BHS)
        edited_BHSD = torch.where(blocked_BHS.unsqueeze(-1), new_BHSD, value_BHSD)
        return replace(call, k_BKSD=key_BHSD, v_BKSD=edited_BHSD)


@removals.register("zero_value")
@dataclass(frozen=True)
class ZeroValue(ValueRemoval):
    """Keep the mass on the keys, and let their values add nothing."""

    def values(
        self, call: Call, value_BHSD: Tensor, blocked_BHS: Tensor, random_BHS: Tensor
    ) -> Tensor:
        return torch.zeros_like(value_BHSD[:, :, :1])


@removals.register("shuffle_value")
@dataclass(frozen=True)
class ShuffleValue(ValueRemoval):
    """Keep the mass on the keys, and give each the value of another key that is seen and stays,
    drawn by the seed.

    A sink that is only a place to put mass does not care whose value stands there. Several keys of
    a head get the values of different keys, as long as there are enough. Raises ValueError in a
    call whose queries see different keys.
    """

    draws = True

    def values(
        self, call: Call, value_BHSD: Tensor, blocked_BHS: Tensor, random_BHS: Tensor
    ) -> Tensor:
        others_BHS = other_keys(call, blocked_BHS, "shuffle_value")
        order_BHS = random_BHS.masked_fill(~others_BHS, -1.0).argsort(dim=-1, descending=True)
        number_BHS = blocked_BHS.long().cumsum(-1) - 1
        number_BHS = number_BHS.clamp(min=0) % others_BHS.sum(-1, keepdim=True).clamp(min=1)
        donor_BHS = order_BHS.gather(-1, number_BHS)
        width = value_BHSD.shape[-1]
        return value_BHSD.gather(2, donor_BHS.unsqueeze(-1).expand(-1, -1, -1, width))


@removals.register("mean_value")
@dataclass(frozen=True)
class MeanValue(ValueRemoval):
    """Keep the mass on the keys, and give each the mean value of that head's sinks in reference
    texts.

    Raises ValueError in a call for a file that cannot be read or is of another model, and for a
    head without a sink there.
    """

    file: str = ""
    """A file of safetensors: for each layer, by its path, a tensor (H, D), NaN for a head without a
    sink. The plug-in studies/what_sinks_do/plugin.py writes one.
    """

    def values(
        self, call: Call, value_BHSD: Tensor, blocked_BHS: Tensor, random_BHS: Tensor
    ) -> Tensor:
        means_HD: Any = reference_values(self.file).get(call.layer)
        heads, _, width = value_BHSD.shape[1:]
        remedy = f"give a file of this model's own, which {self.file} is not"
        check_tensor(f"values of {call.layer}", means_HD, (heads, width), "float", remedy)
        lacking_H = means_HD.isnan().any(-1) & blocked_BHS.any(-1).any(0).to(means_HD.device)
        if bool(lacking_H.any()):
            head = int(lacking_H.nonzero()[0])
            raise ValueError(
                f"{call.layer}, head {head} has no sink in the reference texts; leave out that head"
            )
        return means_HD.nan_to_num().to(value_BHSD)[None, :, None]


def other_keys(call: Call, blocked_BHS: Tensor, removal: str) -> Tensor:
    """Keys (B, H, S) that are seen and stay. Raises ValueError if queries see different keys."""
    mask = one_row_mask(call)
    if mask.shape[2] > 1:
        raise ValueError(
            f"{removal} takes the values that a query sees, but in {call.layer} queries see "
            "different keys (a causal model, blocks): take mean_value or zero_value"
        )
    return allowed(mask)[:, :, 0] & ~blocked_BHS


def reference_values(file: str) -> dict[str, Tensor]:
    """Tensors of a file by name, read once as it was last changed. Raises ValueError for another
    file.
    """
    with refused(
        f"no reference values can be read from {file}, which is absent or damaged",
        SafetensorError,
        OSError,
    ):
        state = ordinary(file).stat()
        return _read(file, state.st_ino, state.st_size, state.st_mtime_ns)


@lru_cache(maxsize=4)
def _read(file: str, *_: int) -> dict[str, Tensor]:
    return load_file(file)
