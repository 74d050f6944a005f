"""Time and memory of block caches that evict, next to none, prefix and dual, on canvases of 512 to
4096 columns.

    python benchmarks/cache_policies.py [--repeats 3] [--quick]
    python benchmarks/cache_policies.py --device cuda [--quick]

A toy LLaDA with random weights (4 layers, 128 wide, 4 heads, float32, one thread): it shows speed
and memory and nothing else. Fidelity is measured on trained models by studies/sink_caches.py. 32
tokens are written in blocks of 16, one a step; policies take turns, and of every step the best turn
counts. Evicting caches choose at the second evaluation of a block, so a block has two full
evaluations instead of one: `full_ms` and `partial_ms` tell the two kinds apart.
"""

from __future__ import annotations

import argparse
import dataclasses

import torch
from measure import write_result
from transformers import LlamaConfig

from sinklab.core.models import DiffusionLM, DiffusionLMConfig
from sinklab.lab.studies.caches.run import Policy, costs
from sinklab.lab.studies.caches.study import CacheSettings

LENGTHS = (512, 1024, 2048, 4096)
KEEP = 0.25
POLICIES = [
    Policy("none"),
    Policy("prefix"),
    Policy("dual"),
    Policy("sink_refresh", sinks=16),
    Policy("nearest", KEEP),
    Policy("nearest", KEEP, 4, "now"),
    Policy("aligned", KEEP),
    Policy("aligned", KEEP, 4, "now"),
    Policy("received", KEEP),
]


def build(length: int, device: str, *, quick: bool) -> DiffusionLM:
    width, layers, vocab = (32, 2, 96) if quick else (128, 4, 4096)
    backbone = LlamaConfig(
        vocab_size=vocab,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=length,
        initializer_range=0.1,
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    return DiffusionLM(DiffusionLMConfig(backbone, mask_token_id=vocab - 1)).eval().to(device)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--quick", action="store_true", help="tiny sizes, one repeat, nothing written: does it run?"
    )
    options = parser.parse_args()
    device = "cuda" if options.device == "cuda" and torch.cuda.is_available() else "cpu"
    if device != options.device and not options.quick:
        parser.error("no GPU is at hand: --quick runs the same code at a tiny size on the CPU")
    if device == "cpu":
        torch.set_num_threads(1)
    lengths = (24, 40) if options.quick else LENGTHS
    settings = CacheSettings(
        new_tokens=12 if options.quick else 32,
        block_length=6 if options.quick else 16,
        repeats=1 if options.quick else options.repeats,
    )
    table = costs(build(max(lengths), device, quick=options.quick), lengths, POLICIES, settings)
    rows = [dict(zip(table, values, strict=True)) for values in zip(*table.values(), strict=True)]
    for row in rows:
        print(
            {
                key: round(value, 3) if isinstance(value, float) else value
                for key, value in row.items()
            },
            flush=True,
        )
    if not options.quick:
        what = (
            "one row, one token a step; ratio is to none at the same length; held_bytes: keys "
            "and values of the block"
        )
        result = {
            "what": what,
            "keep": KEEP,
            "settings": dataclasses.asdict(settings),
            "rows": rows,
        }
        print(f"written to {write_result('cache_policies', result, device)}")


if __name__ == "__main__":
    main()
