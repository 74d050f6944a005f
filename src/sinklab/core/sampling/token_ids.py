"""Token ids as callers give them: one or several. Imports nothing, for settings alone must not cost
torch.
"""

import operator
from collections.abc import Sequence
from contextlib import suppress
from typing import Any


def token_ids(what: str, given: Any) -> tuple[int, ...]:
    """`given`, an id or an iterable of ids (a tensor too), as a tuple. Raises ValueError with the
    name of the argument.
    """
    with suppress(TypeError):
        return (operator.index(given),)
    try:
        return tuple(operator.index(one) for one in given)
    except TypeError:
        raise ValueError(
            f"{what} takes a token id or several, got {given!r}; tokenizer.convert_tokens_to_ids "
            "gives them."
        ) from None


def check_vocabulary(what: str, ids: Sequence[int], size: int | None = None) -> None:
    """Raises ValueError for an id that is negative, or that has no logit if the vocabulary's size
    is known.
    """
    if ids and (min(ids) < 0 or (size is not None and max(ids) >= size)):
        upto = "upwards"
        if size is not None:
            upto = f"to {size - 1}"
        raise ValueError(
            f"{what} must lie in the vocabulary, 0 {upto}, got {list(ids)}; check the tokenizer."
        )
