"""Low confidence with repeats held back, for `denoise` and `generate`."""

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import LlamaConfig

from sinklab import Canvas, DiffusionLM, DiffusionLMConfig, denoise
from sinklab.core.errors import limited
from sinklab.core.registry import unmasking_rules
from sinklab.core.sampling import Candidates, LowConfidence


@unmasking_rules.register("no_echo")
@dataclass(frozen=True)
class NoEcho(LowConfidence):
    """Commit the most probable proposals first, those later that repeat the one on their left.

    The probability of a proposal is multiplied by ``discount`` if the candidate in the column
    before proposes the same token. Tokens that are written already do not count.
    """

    discount: float = limited(0.5, at_least=0, at_most=1, remedy="1 is low_confidence")
    """Factor of a repeat's probability."""

    def __call__(self, candidates: Candidates) -> Tensor:
        score_M = super().__call__(candidates)
        place = (candidates.tokens_M, candidates.rows_M, candidates.columns_M)
        token_M, row_M, column_M = (torch.diff(one) for one in place)
        echo_M = torch.zeros_like(score_M, dtype=torch.bool)
        echo_M[1:] = (token_M == 0) & (row_M == 0) & (column_M == 1)
        return torch.where(echo_M, score_M * self.discount, score_M)


def test_an_echo_is_scored_at_a_discount() -> None:
    torch.manual_seed(3)
    backbone = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
    )
    model = DiffusionLM(DiffusionLMConfig(backbone, mask_token_id=31)).eval()
    canvas = Canvas.from_prompts([[1, 2, 3], [4, 5, 6]], new_tokens=8, mask_id=31)
    plain = list(denoise(model, canvas, rule="low_confidence"))
    held = list(denoise(model, canvas, rule="no_echo:discount=0.25"))
    with torch.no_grad():
        proposed_BS = model(canvas.ids_BS).logits[..., :31].argmax(-1)
    echo_BS = canvas.open_BS & canvas.open_BS.roll(1, 1) & (proposed_BS == proposed_BS.roll(1, 1))
    echo_M = echo_BS[canvas.open_BS]
    assert echo_M.any() and not echo_M.all()
    factor_M = torch.where(echo_M, 0.25, 1.0)
    torch.testing.assert_close(held[0].score_M, plain[0].score_M * factor_M)
    pairs = zip(plain, held, strict=True)
    assert any((one.committed_BS != two.committed_BS).any() for one, two in pairs)
    assert (held[-1].ids_BS != 31).all()
