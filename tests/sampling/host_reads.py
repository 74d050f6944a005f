"""Counts what makes a program wait for a GPU: values, shapes that depend on values, copies to and
from the host.

On a CPU nothing waits, but the same operations run.
"""

from collections import Counter

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

READ = {"_local_scalar_dense", "is_nonzero", "equal"}
SHAPED_BY_VALUES = {
    "nonzero",
    "masked_select",
    "_unique",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "bincount",
}
# a tensor made of numbers of Python is a copy from the host
COPIED = {"lift_fresh"}
METHODS = {"tolist", "numpy", "cpu", "__array__"}


class HostReads(TorchDispatchMode):
    """`counts` by operation, of what runs inside the block."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()
        self._methods = _Methods(self.counts)

    def __enter__(self):
        self._methods.__enter__()
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self._methods.__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::")
        self.counts[name] += name in READ | SHAPED_BY_VALUES | COPIED
        if name.strip("_") in ("index", "index_put", "index_put_impl"):
            flags = (torch.bool, torch.uint8)
            self.counts["index by flags"] += any(
                one is not None and one.dtype in flags for one in args[1]
            )
        return func(*args, **(kwargs or {}))


class _Methods(TorchFunctionMode):
    """`tolist` and the like take the values without an operation."""

    def __init__(self, counts):
        super().__init__()
        self.counts = counts

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        self.counts[name] += name in METHODS
        return func(*args, **(kwargs or {}))


def counted(steps):
    """The steps of a run, and what each of them read (a dict by operation)."""
    found, counts = [], []
    while True:
        with HostReads() as reads:
            step = next(steps, None)
        if step is None:
            return found, counts
        found.append(step)
        counts.append({name: count for name, count in reads.counts.items() if count})
