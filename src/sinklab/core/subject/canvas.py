"""The canvas: token ids, which of them are real, and which are to be filled.

What decoding needs to know about a batch of texts is checked here once, so that the loop can trust
it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from sinklab.core.errors import check_count, check_tensor, whole_numbers

# B batch rows, P prompt positions, S canvas positions, M wanted positions in row-major order


@dataclass(frozen=True, eq=False)
class Canvas:
    """Start of decoding. Raises ValueError for tensors that disagree in shape or dtype, for an open
    position that is padding or does not hold `mask_id`, and if none is open.
    """

    ids_BS: Tensor
    """int64 token ids; `mask_id` at every open position."""
    attention_BS: Tensor
    """bool, False at padding."""
    open_BS: Tensor
    """bool, True if a token is to be decoded. A mask that is not open is never filled."""
    mask_id: int
    block_BS: Tensor | None = None
    """int64, the decoding block of each open position, from 0 in every row, -1 elsewhere; None
    counts open positions.
    """

    def __repr__(self) -> str:
        rows, length = self.ids_BS.shape
        return (
            f"Canvas({rows} rows of {length} positions, {int(self.open_BS.sum())} open, "
            f"mask_id={self.mask_id})"
        )

    def __post_init__(self) -> None:
        check_tensor(
            "canvas ids", self.ids_BS, (None, None), "int64", "use ids.long(), with an axis of rows"
        )
        remedy = "as the ids; convert a 0/1 mask with mask.bool()"
        for name, flags_BS in (("attention_BS", self.attention_BS), ("open_BS", self.open_BS)):
            check_tensor(name, flags_BS, self.ids_BS.shape, "bool", remedy)
        if self.block_BS is not None:
            check_tensor("block_BS", self.block_BS, self.ids_BS.shape, "int64", "as the ids")
        if self.mask_id < 0:
            raise ValueError(
                f"mask_id must be a token id (0 or more), got {self.mask_id}; see the tokenizer"
            )
        if not self.open_BS.any():
            raise ValueError(
                "a canvas needs at least one open position, but no position of "
                f"{tuple(self.ids_BS.shape)} is a mask "
                f"(id {self.mask_id}) to fill; put mask_id where tokens are wanted."
            )
        if (self.open_BS & ~self.attention_BS).any():
            raise ValueError(
                "no position is open and padding at once; clear open_BS where attention_BS is False"
            )
        wrong_BS = self.open_BS & (self.ids_BS != self.mask_id)
        if wrong_BS.any():
            row, position = wrong_BS.nonzero()[0].tolist()
            raise ValueError(
                f"an open position must hold mask_id {self.mask_id}, but row {row} position "
                f"{position} holds "
                f"{int(self.ids_BS[row, position])}; write mask_id there or close it."
            )

    @property
    def prompt_BS(self) -> Tensor:
        """bool, real positions that are not decoded."""
        return self.attention_BS & ~self.open_BS

    @property
    def attention_mask(self) -> Tensor | None:
        """`attention_BS` as a model takes it: None without padding."""
        if bool(self.attention_BS.all()):
            return None
        return self.attention_BS

    def to(self, device: torch.device | str) -> Canvas:
        """This canvas on another device."""
        moved: dict[str, Any] = {}
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                moved[name] = value.to(device)
        return replace(self, **moved)

    def counted(self, number_BS: Tensor) -> Canvas:
        """This canvas with open positions of equal number as a block, from 0 in each row."""
        first_B1 = number_BS.masked_fill(~self.open_BS, number_BS.max() + 1).amin(1, keepdim=True)
        block_BS = number_BS - first_B1
        dense_BS = torch.searchsorted(block_BS[self.open_BS].unique(), block_BS.contiguous())
        return replace(self, block_BS=torch.where(self.open_BS, dense_BS, -1))

    @classmethod
    def from_prompts(
        cls,
        prompts: Sequence[Sequence[int]] | Tensor,
        *,
        new_tokens: int,
        mask_id: int,
        pad_id: int | None = None,
        context: int | None = None,
        attention_BP: Tensor | None = None,
        multiple: int = 1,
        closing: Sequence[int] = (),
    ) -> Canvas:
        """Prompts on the left, `new_tokens` masks on the right of each.

        Args:
            prompts: lists of token ids, or an integer tensor (B, P) or (P,).
            pad_id: id written at padding, needed when the lengths differ.
            context: the most positions the model can read.
            attention_BP: True or 1 at the real tokens of a tensor.
            multiple: prompts are padded to a multiple of this many columns.
            closing: ids after the masks, such as BERT's [SEP].

        Raises ValueError for what does not fit: no prompts, padding on the right, a canvas longer
        than context, masks in a prompt.
        """
        remedy = "leave it out to fill masks in the prompt, or use Canvas.infill"
        check_count("new_tokens", new_tokens, remedy)
        if isinstance(prompts, Tensor):
            ids_BP = _token_ids(prompts)
            real_BP = _flags("attention_BP", attention_BP, ids_BP)
            if (real_BP[:, :-1] & ~real_BP[:, 1:]).any():
                raise ValueError(
                    "prompts must be padded on the left, but a real token comes before padding; "
                    "set padding_side='left' on the tokenizer."
                )
        elif attention_BP is not None:
            raise ValueError(
                "attention_BP goes with a tensor of prompts; lists are padded here, so leave it "
                "out."
            )
        else:
            ids_BP, real_BP = pad_left(prompts, pad_id)
        padding = (-ids_BP.shape[1] % multiple, 0)
        ids_BP, real_BP = pad(ids_BP, padding), pad(real_BP, padding)
        rows, width = ids_BP.shape
        length = width + new_tokens + len(closing)
        if context is not None and length > context:
            raise ValueError(
                f"a prompt and its new tokens must fit the model's context of {context} positions, "
                f"got a prompt of {width} and {new_tokens} new tokens, {length - context} too "
                "many; shorten the prompt or ask for fewer."
            )
        if ((ids_BP == mask_id) & real_BP).any():
            raise ValueError(
                f"a prompt must not contain the mask id {mask_id}, which would never be filled; to "
                "fill masks anywhere, ask for no new tokens (Canvas.infill, or --new-tokens 0)."
            )
        after_N = ids_BP.new_tensor([mask_id] * new_tokens + [*closing])
        ids_BS = torch.cat([ids_BP, after_N.expand(rows, -1)], 1)
        real_BS = pad(real_BP, (0, len(after_N)), value=True)
        open_BS = torch.zeros_like(real_BS)
        open_BS[:, width : width + new_tokens] = True
        return cls(ids_BS, real_BS, open_BS, mask_id)

    @classmethod
    def infill(
        cls,
        ids_BS: Tensor | Sequence[Sequence[int]],
        *,
        mask_id: int,
        attention_BS: Tensor | None = None,
        context: int | None = None,
    ) -> Canvas:
        """Fill every mask of `ids_BS`. Raises ValueError if there is none, and for rows longer than
        `context`.
        """
        ids_BS = _token_ids(ids_BS)
        real_BS = _flags("attention_BS", attention_BS, ids_BS)
        if context is not None and ids_BS.shape[1] > context:
            raise ValueError(
                f"a text must fit the context of {context} positions, got {ids_BS.shape[1]}; "
                "shorten it"
            )
        return cls(ids_BS, real_BS, (ids_BS == mask_id) & real_BS, mask_id)


def token_rows(what: str, given: Any) -> Tensor:
    """A tensor or lists as a tensor of rows; a single row becomes a batch of one. Raises ValueError
    for a mapping, text and rows of unequal length.
    """
    if isinstance(given, Mapping):
        raise ValueError(
            f"{what} must be a tensor or a list of rows, got a {type(given).__name__}; pass "
            "**inputs."
        )
    try:
        rows = torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"{what} must be a tensor or a list of rows of equal length, got a "
            f"{type(given).__name__} ({error}); "
            "tokenize text with padding=True, padding_side='left' and return_tensors='pt'."
        ) from None
    if not rows.numel():
        rows = rows.long()
    if rows.ndim == 1:
        return rows[None]
    return rows


def _token_ids(given: Any) -> Tensor:
    ids = token_rows("token ids", given)
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool or ids.ndim != 2:
        raise ValueError(
            f"token ids must be integers of shape (rows, positions), got {ids.dtype} of shape "
            f"{tuple(ids.shape)}; tokenize the text first."
        )
    return ids.long()


def _flags(name: str, given: Tensor | None, ids_BS: Tensor) -> Tensor:
    """Real tokens, bool (B, S)."""
    if given is None:
        return torch.ones_like(ids_BS, dtype=torch.bool)
    real_BS = token_rows(name, given).to(ids_BS.device).bool()
    check_tensor(name, real_BS, ids_BS.shape, remedy="give one flag per token")
    return real_BS


def pad_left(prompts: Sequence[Sequence[int]], pad_id: int | None) -> tuple[Tensor, Tensor]:
    """Ids, int64 (B, P), padded on the left, and real tokens, bool (B, P). Raises ValueError for no
    prompts, text, a single prompt, and unequal lengths without `pad_id`.
    """
    if not len(prompts):
        raise ValueError(
            "at least one prompt is needed, got none; pass [[]] to decode one row without a prompt."
        )
    if isinstance(prompts[0], int | str):
        raise ValueError(
            "prompts must be a list of lists of token ids, got a list of "
            f"{type(prompts[0]).__name__}; tokenize text first, and wrap a single prompt: [prompt]."
        )
    lengths = {len(prompt) for prompt in prompts}
    if len(lengths) > 1 and pad_id is None:
        raise ValueError(
            f"prompts of unequal lengths ({sorted(lengths)}) need a pad_id to fill "
            "the shorter rows; pass the tokenizer's pad or end-of-text id."
        )
    rows = [torch.as_tensor(prompt, dtype=torch.int64) for prompt in prompts]
    ids_BP = pad_sequence(rows, True, pad_id or 0, padding_side="left")
    real_BP = pad_sequence(
        [torch.ones_like(row, dtype=torch.bool) for row in rows], True, padding_side="left"
    )
    return ids_BP, real_BP


@dataclass(frozen=True, eq=False)
class Places:
    """The positions of a canvas whose logits are wanted, in row-major order."""

    wanted_BS: Tensor
    """bool, the positions."""
    flat_M: Tensor
    """int64, row * S + column of each, ascending."""
    columns: slice | None = None
    """Columns of the decoding block, the same object at all of its evaluations; None if unknown."""

    @classmethod
    def of(cls, wanted_BS: Tensor) -> Places:
        """The True positions. Raises ValueError for a tensor that is not bool (B, S)."""
        check_tensor("the wanted positions of a denoiser", wanted_BS, (None, None), "bool")
        return cls(wanted_BS, wanted_BS.flatten().nonzero()[:, 0])


def true_indices(flags: Tensor, count: int) -> Tensor:
    """Flat indices of the `count` True values, int64 (M,), without a wait for the device."""
    return flags.reshape(-1).byte().sort(descending=True, stable=True).indices[:count]


def numbered_blocks(canvas: Canvas, block_length: int | None) -> tuple[list[int], Tensor]:
    """Positions per block of the fullest row; and the block of each open position, int64 (B, S), -1
    elsewhere.
    """
    check_count("block_length", block_length, "leave it out for a single block.")
    block_BS = canvas.block_BS
    if block_BS is None:
        rank_BS = canvas.open_BS.cumsum(1) - 1
        block_BS = rank_BS // (block_length or rank_BS.shape[1])
        block_BS = block_BS.masked_fill(~canvas.open_BS, -1)
    sizes = [int((block_BS == number).sum(1).max()) for number in range(int(block_BS.max()) + 1)]
    return sizes, block_BS


class RowEnds:
    """The rows that stop ids have finished. Raises ValueError for no id, and for [MASK]."""

    def __init__(self, stop_ids: Iterable[int] | int, canvas: Canvas) -> None:
        self.ids = sorted(set(whole_numbers("stop_ids", stop_ids)))
        if not self.ids:
            raise ValueError(
                "stop_ids needs at least one token id, got none; leave it out to decode every "
                "position."
            )
        if canvas.mask_id in self.ids:
            raise ValueError(
                f"[MASK] (id {canvas.mask_id}) is never written, so it cannot be a stop id; use "
                "end of text."
            )
        self._open_BS = canvas.open_BS
        self._ids = torch.tensor(self.ids, device=canvas.open_BS.device)
        self.finished_B = torch.zeros_like(canvas.open_BS[:, 0])

    def fill(self, ids_BS: Tensor, masked_BS: Tensor) -> tuple[Tensor, Tensor]:
        """The ids with a newly finished row's stop id in all open positions to its right; and these
        positions, bool (B, S).
        """
        is_stop_BS = (ids_BS[..., None] == self._ids).any(-1)
        first_BS = self._open_BS & is_stop_BS & (masked_BS.cumsum(1) == 0)
        new_B = first_BS.any(1) & ~self.finished_B
        self.finished_B = self.finished_B | new_B
        first_B1 = first_BS.long().argmax(1, keepdim=True)
        right_BS = torch.arange(ids_BS.shape[1], device=ids_BS.device) > first_B1
        filled_BS = self._open_BS & right_BS & new_B[:, None]
        return torch.where(filled_BS, ids_BS.gather(1, first_B1), ids_BS), filled_BS
