"""A name for weights that have no published revision."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def weights_hash(state_dict: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 (hex) of the names, dtypes, shapes and bytes of ``state_dict``; the order of the entries does not count.

    Raises ValueError when an entry is not a tensor.
    """
    import torch

    digest = hashlib.sha256()
    for name in sorted(state_dict):
        tensor = state_dict[name]
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(
                f"weights_hash needs a mapping of names to tensors: {name!r} is a {type(tensor).__name__}. "
                "Pass model.state_dict()."
            )
        # The length of the header is hashed too, so that no two state dicts spell the same stream of bytes.
        header = json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode()
        digest.update(len(header).to_bytes(8, "little") + header)
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()
