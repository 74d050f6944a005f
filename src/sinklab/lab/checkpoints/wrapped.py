"""Any module that maps token ids to logits, with the face of a model of ours: a config, a denoiser,
`generate`.
"""

# B batch, S positions, V vocabulary, M wanted positions (row-major)
from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from sinklab.core.attention.context import running
from sinklab.core.subject import Denoiser, Places, masks
from sinklab.core.subject.generation import GenerateByDenoising

UNLIMITED = 2**20
"""Positions of a module that states no limit."""


@dataclass
class WrappedConfig:
    """Sizes and ids that are asked of the config of a model, about a module that may have none."""

    num_hidden_layers: int
    num_attention_heads: int
    hidden_size: int
    vocab_size: int
    max_position_embeddings: int = UNLIMITED
    """Tokens that a text may have."""
    first_position: int = 0
    """Position of the first token of a text: RoBERTa's is behind that of padding."""
    mask_token_id: int | None = None
    pad_token_id: int | None = None
    gives_states: bool = True
    """Whether layers are known, whose outputs are the hidden states."""
    global_layers: tuple[int, ...] | None = None
    """Layers in which every token sees all others, if those of other layers see a window alone
    (ModernBERT): a study records these, as its page counts with one number of queries per key. None
    if all layers are so.
    """
    eos_ids: tuple[int, ...] = ()
    opening_ids: tuple[int, ...] = ()
    """Ids that begin a text, such as BERT's [CLS]."""
    closing_ids: tuple[int, ...] = ()
    """Ids that end a text which begins so, such as BERT's [SEP]; they are never masked."""
    logit_shift = False
    sink_count = 0
    block_length = None
    block_columns = 1
    text_vocab_size = None

    @property
    def text_positions(self) -> int:
        """Tokens of text that the positions reach."""
        return self.max_position_embeddings

    def closing_of(self, ids: Sequence[int]) -> tuple[int, ...]:
        """Ids that end a text which begins with these: none if [CLS] does not open it, as in a
        chat.
        """
        size = len(self.opening_ids)
        return self.closing_ids if tuple(ids[:size]) == self.opening_ids else ()

    @property
    def decoding(self) -> dict[str, Any]:
        """Arguments of `DecodingSettings.decode` that belong to the model."""
        return {"eos_ids": self.eos_ids}

    def get_text_config(self) -> WrappedConfig:
        """The config that holds the sizes."""
        return self


class WrappedLM(GenerateByDenoising, nn.Module):
    """A module that maps ids (B, S) to logits (B, S, V), such as a masked language model of
    transformers.

    Its results are those of the module. Padding is written as the module's own padding id, blocked
    by its ``attention_mask``, and takes no position. The module may return the logits, an output
    that has them as ``logits``, or a tuple that begins with them.
    """

    def __init__(self, foreign: nn.Module, config: WrappedConfig) -> None:
        super().__init__()
        self.foreign = foreign
        self.config = config
        parameters = inspect.signature(foreign.forward).parameters
        takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
        self.takes_mask = takes_all or "attention_mask" in parameters
        self.takes_positions = "position_ids" in parameters

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Place of the weights."""
        return next((one.device for one in self.parameters()), torch.device("cpu"))

    @property
    def dtype(self) -> torch.dtype:
        """The type of the weights."""
        return next(
            (one.dtype for one in self.parameters() if one.is_floating_point()), torch.float32
        )

    def num_parameters(self) -> int:
        """Numbers in the weights, each tensor counted once."""
        return sum(one.numel() for one in self.parameters())

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        use_cache: bool = False,
        past_key_values: None = None,
    ) -> CausalLMOutputWithPast:
        """Logits of the module at every position.

        Args:
            input_ids: token ids (B, S).
            attention_mask: 1 for text, 0 for padding (B, S), on either side; None means no padding.
            logits_to_keep: of the last so many positions alone, 0 for all; or int64 (C,), of these
                columns; or bool (B, S), of these positions, in row-major order.
            use_cache: False; the module keeps no keys and values here.
            past_key_values: none.

        Raises:
            ValueError: for padding of a module that takes no ``attention_mask``, an output without
                logits, and if the caller wants keys and values to be kept.
        """
        if use_cache or past_key_values is not None:
            raise ValueError(
                f"a wrapped {type(self.foreign).__name__} keeps no keys and values between tokens; "
                "write with full_forward=True, which reads the whole text at every step"
            )
        given: dict[str, Any] = {}
        real_BS = masks.real_positions(input_ids, attention_mask)
        if real_BS is not None:
            given = self._padding(real_BS)
            input_ids = input_ids.masked_fill(~real_BS, self.config.pad_token_id or 0)
        logits_BSV = logits_of(self.foreign(input_ids, **given), input_ids, self.foreign)
        if isinstance(logits_to_keep, int):
            return CausalLMOutputWithPast(logits=logits_BSV[:, -logits_to_keep:])
        if logits_to_keep.dtype == torch.bool:
            return CausalLMOutputWithPast(logits=logits_BSV[logits_to_keep])
        return CausalLMOutputWithPast(logits=logits_BSV[:, logits_to_keep])

    def _padding(self, real_BS: Tensor) -> dict[str, Tensor]:
        """Arguments that tell the module of padding."""
        if not self.takes_mask:
            raise ValueError(
                f"texts of unequal length need padding, but {type(self.foreign).__name__}.forward "
                "takes no "
                "attention_mask that could hide it; give texts of one length, or one at a time"
            )
        given = {"attention_mask": real_BS.long()}
        if self.takes_positions:
            start = self.config.first_position
            given["position_ids"] = masks.position_ids(
                real_BS, real_BS.shape[1], start=start, device=real_BS.device
            )
        return given

    def save_pretrained(self, folder: str | Path, **how: Any) -> None:
        """Save the module by its own ``save_pretrained``, if it is one of transformers. Raises
        ValueError for another one.
        """
        save: Any = getattr(self.foreign, "save_pretrained", None)
        if save is None:
            raise ValueError(
                f"{type(self.foreign).__name__} has no save_pretrained; save its state_dict() "
                "yourself"
            )
        save(folder, **how)

    def denoiser(
        self, attention_mask: Tensor | None = None, *, plain: bool = False
    ) -> WrappedDenoiser:
        """The module as a function from (ids, wanted positions) to logits, for canvases with this
        padding.
        """
        return WrappedDenoiser(self, attention_mask)


class WrappedDenoiser(Denoiser):
    """Logits of a wrapped module; everything is computed afresh at every call."""

    def __init__(self, model: WrappedLM, attention_BS: Tensor | None = None) -> None:
        self.model = model
        self.attention_BS = attention_BS

    def logits(self, ids_BS: Tensor, at: Places) -> Tensor:
        """Logits (M, V) at the wanted positions of a canvas (B, S)."""
        length, limit = ids_BS.shape[1], self.model.config.text_positions
        if length > limit:
            raise ValueError(
                f"a text must fit the context of {limit} positions, got {length}; shorten it"
            )
        with torch.inference_mode(), running(ids_BS):
            return self.model(ids_BS, self.attention_BS, logits_to_keep=at.wanted_BS).logits


def is_decoder(module: nn.Module) -> bool:
    """Whether this is a decoder of transformers, causal unless its config says otherwise."""
    return isinstance(module, PreTrainedModel) and module.can_generate()


@torch.inference_mode()
def sees_right(model: Any, attention_mask: list[int] | None = None) -> float:
    """How much the last of four tokens changes the logits of the third, beside padding if there is
    some: the largest change in units of their rounding. 0 if it sees nothing, and little more in a
    causal model whose experts round by the number of their tokens.
    """
    real_1S: Tensor | None = None
    if attention_mask is not None:
        real_1S = torch.tensor([attention_mask], device=model.device)
    found = []
    for last in (0, 1):
        ids_1S = torch.tensor([[0, 0, 0, last]], device=model.device)
        found.append(model(ids_1S, attention_mask=real_1S).logits[0, 2].float())
    rounding = torch.finfo(model.dtype).eps * found[0].abs().max()
    return float((found[1] - found[0]).abs().max() / rounding)


def logits_of(output: Any, ids_BS: Tensor, module: nn.Module) -> Tensor:
    """The logits (B, S, V) in the output of a module. Raises ValueError if there are none of this
    shape.
    """
    found = getattr(output, "logits", output)
    if isinstance(found, tuple | list) and found:
        found = found[0]
    if isinstance(found, Tensor) and found.ndim == 3 and found.shape[:2] == ids_BS.shape:
        return found
    shape = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
    raise ValueError(
        f"{type(module).__name__} must map token ids {tuple(ids_BS.shape)} to logits (rows, "
        f"positions, vocabulary), or return an object with such logits, but gave {shape}; wrap the "
        "model with its language-model head"
    )


def position_limits(module: nn.Module, config: Any) -> tuple[int, int]:
    """Tokens that a text may have, and the position of its first: learned positions behind a
    padding index (RoBERTa, ESM-1b) begin behind that, and reach less far than the config says.
    """
    limit = getattr(config, "max_position_embeddings", None) or UNLIMITED
    for name, part in module.named_modules():
        if name.endswith("position_embeddings") and isinstance(part, nn.Embedding):
            first = 0 if part.padding_idx is None else part.padding_idx + 1
            return part.num_embeddings - first, first
    return limit, 0
