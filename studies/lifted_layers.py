"""In how many layers must the causal mask be lifted before the first token loses its sink?

    python studies/lifted_layers.py      writes lifted_layers.json

SmolLM2-135M-Instruct, not trained, 40 texts of 64 tokens: full attention in the last or the first k
of its 30 layers and a causal mask in the others, with and without a start token in front. A
description beside smollm2_diffusion.md, no outcome of it. SINKLAB_BASE and SINKLAB_BOOKS as there.
"""

import json
import os
import sys
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from smollm2_measures import SPIKE_LAYER, book_rows, states_behind
from torch import Tensor
from torch.nn.functional import pad

import sinklab
from sinklab.core.instrument import Call, Edit
from sinklab.core.registry import interventions
from sinklab.lab.analysis.estimates import mean_over
from sinklab.lab.checkpoints import from_causal

# N texts, B batch, S positions, L layers, D hidden size
BASE = os.environ.get("SINKLAB_BASE", "smollm2")
BOOKS = Path(os.environ.get("SINKLAB_BOOKS", "../shared/data/books_pd"))
LIFTED = (0, 1, 2, 5, 10, 15, 20, 25, 28, 29, 30)
"""Numbers of layers without a causal mask."""


@dataclass(frozen=True, kw_only=True)
class CausalLayers(Edit):
    """Give these layers of a model with full attention a causal mask."""

    def before(self, call: Call) -> Call:
        """The call with a causal mask in all heads."""
        return replace(call, mask=None, is_causal=True)


@torch.inference_mode()
def first_key(model: Any, ids_NS: Tensor, causal: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Mean weight of the first key over heads, (N, L), which every query sees in either mask; and
    the greatest magnitude of each text's hidden states behind layer 20, (N,).
    """
    shares, spikes = [], []
    for ids_BS in ids_NS.split(8):
        with ExitStack() as entered:
            if causal:
                entered.enter_context(sinklab.intervene(model, CausalLayers(layers=causal)))
            kept = entered.enter_context(states_behind(model, SPIKE_LAYER, ids_BS.shape[1]))
            seen = entered.enter_context(sinklab.trace(model))
            model(ids_BS, logits_to_keep=torch.zeros(0, dtype=torch.int64))
        shares.append(seen.received[0][..., 0].mean(-1) / ids_BS.shape[1])
        spikes.append(kept[0].abs().amax((1, 2)))
    return torch.cat(shares), torch.cat(spikes)


def main() -> None:
    """Every number of layers from either end, with and without a start token."""
    interventions.register("causal_layers")(CausalLayers)  # not where the script is imported
    loaded = from_causal(BASE, logit_shift=True)
    model, tokenizer = loaded.model.eval(), loaded.needed_tokenizer()
    rows_NS = book_rows(tokenizer, BOOKS / "valid.jsonl.gz", 64, 8)
    layers, found = model.config.backbone.num_hidden_layers, []
    for start in (False, True):
        ids_NS = pad(rows_NS, (1, 0), value=tokenizer.bos_token_id) if start else rows_NS
        for end in ("last", "first"):
            for count in LIFTED:
                order = range(layers) if end == "first" else range(layers - 1, -1, -1)
                lifted, causal = sorted(order[:count]), tuple(sorted(order[count:]))
                share_NL, spike_N = first_key(model, ids_NS, causal)
                one = {"start": start, "end": end, "lifted": count}
                one |= {"all_layers": asdict(mean_over(share_NL.mean(1)))}
                if lifted:
                    one |= {"lifted_layers": asdict(mean_over(share_NL[:, lifted].mean(1)))}
                one |= {"spike": float(spike_N.median())}
                found.append(one)
                print(json.dumps(one), flush=True)
    Path(__file__).with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
