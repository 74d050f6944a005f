"""Private names of torch, transformers and accelerate that the package relies on, each with a test: the list to check
when one of them is upgraded.
"""

from torch import _C


def is_replayed() -> bool:
    """Whether this thread is inside a backward pass, where gradient checkpointing runs layers a second time."""
    return _C._current_graph_task_id() != -1
