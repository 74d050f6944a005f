"""The row of the embedding that becomes [MASK] in a model that has none, and a tokenizer that knows
it.
"""

# V rows of the embedding, D hidden size
import dataclasses
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from sinklab.lab.checkpoints.tokens import check_vocabulary

MASK_TOKEN = "<|mask|>"
"""Text of [MASK] if the tokenizer has none."""
UNNAMED = (
    "neither config.json nor a tokenizer says which id is [MASK]: pass mask_token_id= to denoise"
)
"""Note of a diffusion model without [MASK], until it has one."""


def with_mask(loaded: Any, wanted: int | None) -> Any:
    """A loaded diffusion model without [MASK] (:class:`~sinklab.lab.checkpoints.Loaded`), with one,
    changed in place.

    Raises:
        ValueError: if the tokenizer has more entries than the embedding has rows, or there is no
            such [MASK].
    """
    model: Any = loaded.model
    if loaded.tokenizer is not None:
        check_vocabulary(loaded.tokenizer, model.config.vocab_size, loaded.name)
    token_id, how = _find(loaded, wanted)
    if token_id >= model.config.vocab_size:
        _add_rows(model, token_id + 1)
    if loaded.tokenizer is not None:
        _tell(loaded.tokenizer, token_id, loaded.name)
        how = f"{loaded.tokenizer.mask_token}, {how}"
    model.config.mask_token_id = token_id
    notes = [note for note in loaded.notes if note != UNNAMED]
    notes.append(f"[MASK] is id {token_id}: {how}")
    if model.config.gate != "none" and model.config.gate_bias is None:
        notes.append(
            "the gate starts near 0.5, which halves the attention of a trained backbone; "
            "gate_bias=4 opens it"
        )
    special = dataclasses.replace(loaded.special, mask=token_id)
    return dataclasses.replace(loaded, special=special, notes=tuple(notes))


def _next_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """The first id behind the tokenizer's entries."""
    return max(tokenizer.get_vocab().values()) + 1


def _find(loaded: Any, wanted: int | None) -> tuple[int, str]:
    """The id of [MASK], which may be behind the last row, and how it was chosen."""
    tokenizer = loaded.tokenizer
    rows = loaded.model.config.vocab_size
    if wanted is not None:
        if not 0 <= wanted < rows:
            raise ValueError(
                f"mask_token_id must be a row of the embedding (0…{rows - 1}), but is {wanted}; "
                "leave it out for its own, an unused or a new row"
            )
        if wanted in loaded.special.stop:
            raise ValueError(
                f"mask_token_id must be an id that text does not use, but {wanted} ends it; give "
                "another, or leave it out"
            )
        return wanted, "as requested"
    if loaded.special.mask is not None:
        return loaded.special.mask, "its own"
    if tokenizer is not None:
        first = _next_id(tokenizer)
        if first < rows:
            return first, "a row that the tokenizer did not use"
    return rows, "a new row, the mean of the others"


def _add_rows(model: Any, rows: int) -> None:
    """Grow embedding and head; new rows are the mean of the others, so that [MASK] is no outlier to
    begin with.
    """
    before = model.config.vocab_size
    model.resize_token_embeddings(rows, mean_resizing=False)
    with torch.no_grad():
        for weight_VD in (
            model.get_input_embeddings().weight,
            model.get_output_embeddings().weight,
        ):
            weight_VD[before:] = weight_VD[:before].float().mean(dim=0)


def _tell(tokenizer: PreTrainedTokenizerBase, token_id: int, name: str) -> None:
    """Make the entry with this id the tokenizer's mask token."""
    # ids are given in order: the rows before this one get names too
    fillers = [f"<|unused_{number}|>" for number in range(_next_id(tokenizer), token_id)]
    if fillers:
        tokenizer.add_tokens(fillers, special_tokens=True)
    entries = {number: entry for entry, number in tokenizer.get_vocab().items()}
    tokenizer.add_special_tokens({"mask_token": entries.get(token_id, MASK_TOKEN)})
    after = tokenizer.get_vocab()
    if tokenizer.mask_token_id != token_id or len(set(after.values())) != len(after):
        raise ValueError(
            f"the tokenizer of {name} cannot give {MASK_TOKEN} the id {token_id}: its ids have "
            f"holes or {MASK_TOKEN} stands elsewhere ({tokenizer.mask_token_id}); give "
            "mask_token_id= the id of an entry that text does not use"
        )
