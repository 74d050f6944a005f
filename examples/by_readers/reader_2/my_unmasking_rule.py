"""An unmasking rule in rounds of columns: neighbours are not written at the same step."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from transformers import LlamaConfig

from sinklab.core.errors import Checked, limited
from sinklab.core.models import DiffusionLM, DiffusionLMConfig
from sinklab.core.registry import unmasking_rules
from sinklab.core.sampling import Candidates, Canvas, UnmaskingRule, denoise


@unmasking_rules.register("interleaved")
@dataclass(frozen=True)
class Interleaved(UnmaskingRule, Checked):
    """Commit every ``stride``-th canvas column first, then the columns behind those, and so on.

    Within a round the most probable proposals go first, at temperature 1 and without top-p and
    top-k.
    """

    stride: int = limited(2, at_least=2, remedy="1 is low_confidence")
    """columns from one of a round to the next"""

    measure: ClassVar[str | None] = "order"
    reads_shaped: ClassVar[bool] = False

    def __call__(self, candidates: Candidates) -> torch.Tensor:
        tokens_M1 = candidates.tokens_M[:, None]
        probability_M = candidates.probability_MV.gather(-1, tokens_M1)[:, 0]
        # halved, so that no probability reaches the round before
        return probability_M / 2 - candidates.columns_M % self.stride


def test_even_columns_come_first_and_the_surest_first_among_them() -> None:
    torch.manual_seed(2)
    backbone = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=32,
        initializer_range=0.5,
    )  # fmt: skip
    model = DiffusionLM(DiffusionLMConfig(backbone=backbone, mask_token_id=31)).eval()
    canvas = Canvas.from_prompts([[1, 2, 3], [4, 5]], new_tokens=8, mask_id=31, pad_id=0)
    steps = list(denoise(model, canvas, rule="interleaved"))
    columns = [step.committed_BS.nonzero()[:, 1].view(2) for step in steps]
    assert all((pair % 2 == (number >= 4)).all() for number, pair in enumerate(columns))
    first = next(denoise(model, canvas, steps=1))  # of low_confidence
    surest = first.confidence_BS[:, 4::2].argmax(1) * 2 + 4
    assert torch.equal(columns[0], surest)
    assert (steps[-1].ids_BS[canvas.open_BS] != 31).all()
