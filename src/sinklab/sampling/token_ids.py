"""Token ids as callers give them: one or several. Imports nothing, for settings alone must not cost torch."""

from __future__ import annotations

import operator
from typing import Any


def token_ids(what: str, given: Any) -> tuple[int, ...]:
    """`given`, an id or an iterable of ids (a tensor too), as a tuple. Raises ValueError that names `what`."""
    many = given.tolist() if hasattr(given, "tolist") else given
    if isinstance(many, int):
        return (many,)
    try:
        return tuple(operator.index(one) for one in many)
    except TypeError:
        raise ValueError(
            f"{what} takes a token id or several, got {given!r}; tokenizer.convert_tokens_to_ids gives them."
        ) from None
