"""What is asked of a model, checked and cut to its context, with the groups that share random numbers."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sinklab.models import Loaded

Ids = Sequence[int]


@dataclass(frozen=True)
class Request:
    """A continuation to score."""

    number: int
    """Its place in what was asked."""
    context: tuple[int, ...]
    continuation: tuple[int, ...]
    group: int
    """Requests of one group share random numbers."""
    dropped: int = 0
    """Tokens cut from the left of the context."""

    @property
    def length(self) -> int:
        """Tokens of both."""
        return len(self.context) + len(self.continuation)


def check_model(loaded: Loaded, cfg_scale: float) -> None:
    """Raise ValueError for a diffusion model without mask token, and guidance of an autoregressive one."""
    config: Any = loaded.model.config
    if loaded.family != "diffusion":
        if cfg_scale:
            raise ValueError(
                f"guidance masks the context, which only a diffusion model can read, but {loaded.name} is "
                f"{loaded.family}; leave out cfg_scale"
            )
    elif config.mask_token_id is None:
        raise ValueError(
            f"a score needs a model with a mask token, but {loaded.name} has mask_token_id None; set it in its config"
        )


def limit_of(loaded: Loaded) -> int:
    """Tokens that a text may have: what the authors state, else what the positions allow."""
    config: Any = loaded.model.config
    positions = config.text_positions if loaded.family == "diffusion" else config.max_position_embeddings
    return min(loaded.context or positions, positions)


def read_requests(loaded: Loaded, requests: Sequence[tuple[Ids, Ids]], groups: Sequence[int] | None) -> list[Request]:
    """Requests in the order given; without groups those of the same context share one.

    Raises:
        ValueError: for what cannot be scored.
    """
    if groups is not None and len(groups) != len(requests):
        raise ValueError(f"groups name the group of every request, got {len(groups)} for {len(requests)} requests")
    is_diffusion, limit = loaded.family == "diffusion", limit_of(loaded)
    asked = []
    for number, (given, wanted) in enumerate(requests):
        context, continuation = tuple(map(int, given)), tuple(map(int, wanted))
        _check_ids(loaded, number, context, continuation, limit)
        group = digest(context, () if context else continuation) if groups is None else int(groups[number])
        if not is_diffusion:
            context = context or (_start(loaded),)
        # an autoregressive model does not read the last token
        dropped = max(0, len(context) + len(continuation) - limit - (not is_diffusion))
        asked.append(Request(number, context[dropped:], continuation, group, dropped))
    return asked


def _check_ids(loaded: Loaded, number: int, context: Ids, continuation: Ids, limit: int) -> None:
    config: Any = loaded.model.config
    if not continuation:
        raise ValueError(f"request {number} has an empty continuation, and there is nothing to score; leave it out")
    if len(continuation) > limit:
        raise ValueError(
            f"the continuation of request {number} has {len(continuation)} tokens, but the context of {loaded.name} is "
            f"{limit}; shorten it, or score it in chunks with rolling"
        )
    if wrong := [token for token in (*context, *continuation) if not 0 <= token < config.vocab_size]:
        raise ValueError(
            f"request {number} holds the id {wrong[0]}, but {loaded.name} knows 0 to {config.vocab_size - 1}; encode "
            "the text with its own tokenizer"
        )
    if loaded.family == "diffusion" and config.mask_token_id in continuation:
        raise ValueError(
            f"the continuation of request {number} holds [MASK] (id {config.mask_token_id}), which stands for what is "
            "asked and is no answer; take it out"
        )


def _start(loaded: Loaded) -> int:
    special = loaded.special
    start = special.bos if special.bos is not None else special.eos
    if start is None:
        raise ValueError(
            f"{loaded.name} is autoregressive and needs a token to start from, but a context is empty and the model "
            "names no beginning or end of text; give a context"
        )
    return start


def digest(ids: Ids, more: Ids) -> int:
    """A number of these ids that is the same in every process."""
    text = ",".join(map(str, (*ids, "|", *more)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
