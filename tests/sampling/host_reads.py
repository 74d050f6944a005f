"""Counts what makes a program wait for a GPU: values, shapes that depend on values, copies to and from the host.

On a CPU nothing waits, but the same operations run.
"""

from collections import Counter

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

WAITS = {
    "_local_scalar_dense", "nonzero", "masked_select", "_unique", "_unique2", "unique_dim", "unique_consecutive",
    "is_nonzero", "equal", "bincount", "lift_fresh", "repeat_interleave.Tensor",
}  # fmt: skip
READS = {"tolist", "numpy", "cpu", "__array__", "item"}


class _Methods(TorchFunctionMode):
    """`tolist` and the like take the values without an operation."""

    def __init__(self, counts):
        super().__init__()
        self.counts = counts

    def __torch_function__(self, func, types, args=(), kwargs=None):
        # what the host made itself it may read: `marked` of it says so
        if getattr(func, "__name__", "") in READS - {"item"}:
            self.counts[func.__name__] += 1
        return func(*args, **(kwargs or {}))


class HostReads(TorchDispatchMode):
    """`counts` by operation, of what ran inside the block."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()
        self._methods = _Methods(self.counts)

    def __enter__(self):
        self._methods.__enter__()
        return super().__enter__()

    def __exit__(self, *error):
        out = super().__exit__(*error)
        self._methods.__exit__(*error)
        return out

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name, overload = func._schema.name.removeprefix("aten::"), func._schema.overload_name
        if name in WAITS or f"{name}.{overload}" in WAITS:
            self.counts[name] += 1
        if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
            self.counts["index by flags"] += sum(
                isinstance(one, torch.Tensor) and one.dtype in (torch.bool, torch.uint8) for one in args[1]
            )
        return func(*args, **(kwargs or {}))
