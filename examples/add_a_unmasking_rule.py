"""An unmasking rule in one file: confidence that falls from left to right. It runs as it stands.

``sinklab generate "The sea" --plugin add_a_unmasking_rule.py --rule discounted:discount=0.1``
writes with it, and `sinklab.lab.testing.check_unmasking_rule` holds it to what the loop relies on.
"""

from dataclasses import dataclass

import torch
from transformers import LlamaConfig

from sinklab.core.models import DiffusionLM, DiffusionLMConfig
from sinklab.core.registry import unmasking_rules
from sinklab.core.sampling import UnmaskingRule


@unmasking_rules.register("discounted")
@dataclass(frozen=True)
class Discounted(UnmaskingRule):
    """Commit where the proposed token's probability, less a discount for its column, is highest."""

    discount: float = 0.05

    def __call__(self, candidates):
        confidence_M = candidates.of_proposals(candidates.probability_MV)
        first_B = candidates.candidates_BS.long().argmax(1)
        first_M = first_B[candidates.rows_M]
        return confidence_M - self.discount * (candidates.columns_M - first_M)


if __name__ == "__main__":
    torch.manual_seed(0)
    sizes = {"vocab_size": 60, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = DiffusionLMConfig(LlamaConfig(**sizes, num_attention_heads=4), mask_token_id=59)
    model, prompt = DiffusionLM(config).eval(), torch.arange(12)[None]
    rules = (
        "discounted:discount=9.0",
        "left_to_right",
        "discounted:discount=0.0",
        "low_confidence",
    )
    texts = [model.generate(prompt, max_new_tokens=16, rule=rule) for rule in rules]
    assert torch.equal(texts[0], texts[1]) and torch.equal(texts[2], texts[3])
