"""An unmasking rule: from the edges of every gap inwards, the surest edge first."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import LlamaConfig

from sinklab.core.models import DiffusionLM, DiffusionLMConfig
from sinklab.core.registry import unmasking_rules
from sinklab.core.sampling import Canvas, Candidates, UnmaskingRule, denoise


@unmasking_rules.register("inwards")
@dataclass(frozen=True)
class Inwards(UnmaskingRule):
    """Commit next to a token first, the most probable proposal of these; then the others likewise.

    A neighbour counts if it is no candidate of this step: text, padding, or another block. The ends
    of the canvas do not count.
    """

    measure: ClassVar[str | None] = "order"
    reads_shaped: ClassVar[bool] = False

    def __call__(self, candidates: Candidates) -> Tensor:
        """The probability of the proposal, plus 1 beside a token."""
        open_BS = pad(candidates.candidates_BS, (1, 1), value=True)
        is_edge_BS = ~(open_BS[:, :-2] & open_BS[:, 2:])
        is_edge_M = is_edge_BS[candidates.rows_M, candidates.columns_M]
        proposed_M1 = candidates.tokens_M[:, None]
        return candidates.probability_MV.gather(-1, proposed_M1)[:, 0] + is_edge_M


MASK_ID = 31


def tiny_model() -> DiffusionLM:
    torch.manual_seed(1)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "vocab_size": 32}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    backbone = LlamaConfig(**sizes, **heads, max_position_embeddings=32)
    return DiffusionLM(DiffusionLMConfig(backbone, mask_token_id=MASK_ID)).eval()


def beside_text(canvas: Canvas, rule: str) -> list[bool]:
    """Whether each committed token stood beside one that was there before its step."""
    found = []
    for step in denoise(tiny_model(), canvas, rule=rule):
        text_BS = pad(step.before_BS != MASK_ID, (1, 1), value=False)
        near_BS = text_BS[:, :-2] | text_BS[:, 2:]
        found += near_BS[step.committed_BS].tolist()
    return found


def test_inwards_commits_next_to_text() -> None:
    ids_BS = torch.full((2, 12), MASK_ID)
    ids_BS[0, [0, 5]] = torch.tensor([1, 2])
    ids_BS[1, [6, 11]] = torch.tensor([3, 4])
    canvas = Canvas.infill(ids_BS, mask_id=MASK_ID)
    inwards = beside_text(canvas, "inwards")
    assert len(inwards) == 20
    assert all(inwards)
    assert not all(beside_text(canvas, "low_confidence"))
    assert not (tiny_model().generate(ids_BS, rule="inwards") == MASK_ID).any()
