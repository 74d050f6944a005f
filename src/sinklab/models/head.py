"""The LM head, its logits and its loss; it may have fewer rows than there are ids."""

# M positions (any leading axes), D hidden size, R rows of the head, V vocabulary
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from sinklab.models import liger as liger_module
from sinklab.models.loss import chunked_cross_entropy


class Head(nn.Linear):
    """Logits for ``vocab_size`` ids from ``rows`` rows; ids without a row get the lowest finite logit.

    SMDM's head has no row for [MASK]: its probability is zero, and a row of zeros would take some. The value is
    finite, because differences of two such logits (classifier-free guidance) must not be NaN.
    """

    def __init__(self, hidden_size: int, rows: int, vocab_size: int) -> None:
        super().__init__(hidden_size, rows, bias=False)
        self.vocab_size = vocab_size

    def forward(
        self,
        states_MD: Tensor,
        labels_M: Tensor | None = None,
        weights_M: Tensor | None = None,
        chunk: int = 4096,
        liger: bool | None = None,
    ) -> Tensor:
        """Logits (…, V); with labels the sum of weighted cross-entropies instead, ``chunk`` positions at a time.

        The loss is made in here and not outside from the weight, so that what gathers the weight for a call of this
        module (FSDP, ZeRO-3) does.

        Raises:
            ValueError: if a label is no row of the head, or Liger is asked for where it cannot run.
        """
        if labels_M is not None and weights_M is not None:
            check_labels(labels_M, self.out_features)
            if liger_module.chosen(liger, states_MD.device):
                return liger_module.cross_entropy(states_MD, self.weight, labels_M, weights_M)
            return chunked_cross_entropy(states_MD, self.weight, labels_M, weights_M, chunk=chunk)
        logits_MR = super().forward(states_MD)
        if self.vocab_size == self.out_features:
            return logits_MR
        absent = self.vocab_size - self.out_features
        return nn.functional.pad(logits_MR, (0, absent), value=torch.finfo(logits_MR.dtype).min)


def check_labels(labels_M: Tensor, rows: int) -> None:
    """Raise for a label that the head has no row for."""
    if len(labels_M) and not 0 <= int(labels_M.min()) <= int(labels_M.max()) < rows:
        wrong = labels_M[(labels_M < 0) | (labels_M >= rows)][0].item()
        raise ValueError(
            f"labels must be ids that the head has a row for (0…{rows - 1}), or -100 where nothing is asked, "
            f"but one is {wrong}"
        )


class ResizableVocabulary(PreTrainedModel):
    """Mixin: ``resize_token_embeddings`` for a model with a ``model`` (the decoder) and a :class:`Head`."""

    def resize_token_embeddings(self, new_num_tokens: int | None = None, *args: Any, **settings: Any) -> nn.Embedding:
        """Change the size of the vocabulary: embedding, LM head and both configs (arguments of transformers).

        Raises:
            ValueError: if [MASK] would be cut off, or the head has fewer rows than the embedding.
        """
        rows, mask_id = self.config.output_vocab_size, self.config.mask_token_id
        if rows not in (None, self.config.vocab_size):
            raise ValueError(
                f"the head has {rows} rows for {self.config.vocab_size} ids, so the two cannot be resized together; "
                "leave the vocabulary as it is"
            )
        if new_num_tokens is not None and mask_id is not None and new_num_tokens <= mask_id:
            raise ValueError(f"{new_num_tokens} rows would cut off [MASK] (id {mask_id}); keep at least {mask_id + 1}")
        embedding = super().resize_token_embeddings(new_num_tokens, *args, **settings)
        size = embedding.num_embeddings
        with torch.device("meta"):
            head = Head(self.config.backbone.hidden_size, size, size)
        # transformers makes a plain Linear; its weight may be tied
        head.weight = self.lm_head.weight
        self.lm_head = head.train(self.training)
        self.model.vocab_size = size
        if rows is not None:
            self.config.output_vocab_size = size
        return embedding
