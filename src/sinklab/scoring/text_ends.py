"""Where a written text ends: at an end of text, or before a text at which its reader stops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any

from sinklab.checkpoints.loading import Loaded
from sinklab.sampling.settings import DecodingSettings


def ends_of(config: Any) -> list[int]:
    """Ids at which a diffusion model ends a text or a turn."""
    turn = getattr(config, "eot_token_id", None)
    return [*getattr(config, "eos_ids", ()), *([] if turn is None else [turn])]


def ending(settings: DecodingSettings, config: Any) -> DecodingSettings:
    """The settings; without `stop_at_eos` where neither they nor the model name an end of text."""
    if not settings.stop_at_eos or settings.stop_ids or ends_of(config):
        return settings
    return replace(settings, stop_at_eos=False)


def stop_ids(loaded: Loaded, until: Sequence[str] = ()) -> set[int]:
    """Ids at which a text ends: the model's ends of text and of turn, and special tokens among `until`."""
    found, tokenizer = {*loaded.special.stop, *ends_of(loaded.model.config)}, loaded.tokenizer
    if tokenizer is not None:
        special = {str(tokenizer.convert_ids_to_tokens(token)): token for token in tokenizer.all_special_ids}
        found |= {special[text] for text in until if text in special}
    return found


def ended(
    loaded: Loaded, ids: Sequence[int], until: Sequence[str], before: Sequence[int] = ()
) -> tuple[list[int], str]:
    """Tokens up to the end of text (left out), and their text up to the first `until` (left out).

    Args:
        before: the token in front of them, without which a SentencePiece tokenizer loses a leading space: one of those
            that an indented line of code begins with.
    """
    stops = stop_ids(loaded, until)
    kept = [*takewhile(lambda token: token not in stops, ids)]
    front, whole, text = (
        str(loaded.needed_tokenizer().decode(list(some), skip_special_tokens=True))
        for some in (before, [*before, *kept], kept)
    )
    # a character may begin in the token before
    text = whole.removeprefix(front) if whole.startswith(front) else text
    ends = [place for end in until if end and (place := text.find(end)) >= 0]
    return kept, text[: min(ends, default=len(text))]


def is_over(loaded: Loaded, ids: Sequence[int], until: Sequence[str]) -> bool:
    """Whether these tokens, which stand for good, hold an end."""
    if stop_ids(loaded, until) & set(ids):
        return True
    if not any(until) or not ids:
        return False
    text = str(loaded.needed_tokenizer().decode(list(ids), skip_special_tokens=True))
    return any(end and end in text for end in until)
