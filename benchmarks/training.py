"""What the sink and the head cost in training: seconds of forward + backward, taken in turns.

    python benchmarks/training.py [--device cuda] [--repeats 7] [--threads 2] [--quick]

Sink: no sink, one sink as a key/value prefix (what sinklab does), and the same model in the masked (L + 1)² form of
Eq. 6 (the slow twin of the tests). Head: the masked-diffusion loss with the LM head at masks alone, and everywhere.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from measure import interleaved, write_result
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig

from sinklab.diffusion import corrupt, masked_token_loss, sample_times
from sinklab.models import DiffusionLM, DiffusionLMConfig

# the twin is the tests' own, so that what is timed here is what is compared there
sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "models"))
from masked_twin import masked_form

# B batch, S sequence, V vocabulary


@dataclass(frozen=True)
class Sizes:
    """What is trained here."""

    layers: int = 8
    width: int = 512
    heads: int = 8
    batch: int = 4
    lengths: tuple[int, ...] = (256, 512)
    vocab: int = 2048
    head_vocabs: tuple[int, ...] = (4096, 32000)


QUICK = Sizes(layers=2, width=64, heads=2, batch=2, lengths=(32,), vocab=64, head_vocabs=(128,))


def build(sizes: Sizes, vocab: int, sink: int, device: str) -> DiffusionLM:
    backbone = LlamaConfig(
        vocab_size=vocab,
        hidden_size=sizes.width,
        intermediate_size=sizes.width * 11 // 4,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.heads,
        max_position_embeddings=2 * max(sizes.lengths),
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    config = DiffusionLMConfig(
        backbone, sink_kind="token" if sink else "none", sink_count=sink, mask_token_id=vocab - 1
    )
    model = DiffusionLM(config)
    assert model.model.config._attn_implementation == "sdpa"
    return model.to(device).train()


@contextmanager
def precision(dtype: str, device: str) -> Iterator[None]:
    # the default device is for the twin, which makes its mask itself
    with torch.device(device), torch.autocast(device, torch.bfloat16, enabled=dtype == "bfloat16"):
        yield


def step(model: DiffusionLM, loss: Callable[[], Tensor], dtype: str, device: str) -> Callable[[], None]:
    """One forward and backward, without an optimizer."""

    def run() -> None:
        model.zero_grad(set_to_none=True)
        with precision(dtype, device):
            value = loss()
        value.backward()

    return run


def sink_ratios(sizes: Sizes, device: str, repeats: int) -> dict[str, dict]:
    """No sink, prefix and masked form, by length and precision; the head is everywhere in all three."""
    plain, sink = (build(sizes, sizes.vocab, count, device) for count in (0, 1))
    results: dict[str, dict] = {}
    for length in sizes.lengths:
        ids_BS = torch.randint(0, sizes.vocab, (sizes.batch, length), device=device)
        forms: dict[str, tuple[DiffusionLM, Callable[[], Tensor]]] = {
            "no_sink": (plain, lambda ids=ids_BS: plain(ids).logits),
            "prefix": (sink, lambda ids=ids_BS: sink(ids).logits),
            "masked_form": (sink, lambda ids=ids_BS: masked_form(sink, ids)),
        }
        for dtype in ("float32", "bfloat16"):
            with torch.no_grad(), precision(dtype, device):
                difference = (forms["prefix"][1]() - forms["masked_form"][1]()).abs().max().item()
            runs = {
                name: step(
                    model,
                    lambda logits=logits, ids=ids_BS: F.cross_entropy(logits().flatten(0, 1).float(), ids.flatten()),
                    dtype,
                    device,
                )
                for name, (model, logits) in forms.items()
            }
            timing = interleaved(runs, repeats, device)
            ratios = {name: ratio(timing, name, "no_sink") for name in ("prefix", "masked_form")}
            results[f"L{length}_{dtype}"] = {**timing, "ratio": ratios, "largest_difference": difference}
            print(f"L={length} {dtype}: no sink {timing['no_sink']['min_wall_s'] * 1e3:.1f} ms, {ratios}", flush=True)
    return results


def head_losses(sizes: Sizes, vocab: int, device: str) -> tuple[DiffusionLM, dict[str, Callable[[], Tensor]], float]:
    """The model, its loss on one noisy batch in both ways, and the share of masks in that batch."""
    model = build(sizes, vocab, 1, device)
    generator = torch.Generator().manual_seed(0)
    times = sample_times(sizes.batch, sampler="low_discrepancy", generator=generator)
    clean = torch.randint(0, vocab - 1, (sizes.batch, min(sizes.lengths)), generator=generator)
    noisy, masked = corrupt(clean, times, mask_id=vocab - 1, generator=generator)
    share = masked.float().mean().item()
    clean, noisy, masked, times = (value.to(device) for value in (clean, noisy, masked, times))
    losses = {
        "head_at_masks": lambda: masked_token_loss(model(noisy, logits_to_keep=masked).logits, clean, masked, times),
        "head_everywhere": lambda: masked_token_loss(model(noisy).logits[masked], clean, masked, times),
    }
    return model, losses, share


def head_ratios(sizes: Sizes, device: str, repeats: int) -> dict[str, dict]:
    """Tokens per second with the head at masks and everywhere, on the same noise."""
    results: dict[str, dict] = {}
    tokens = sizes.batch * min(sizes.lengths)
    for vocab in sizes.head_vocabs:
        model, losses, share = head_losses(sizes, vocab, device)
        for dtype in ("float32", "bfloat16"):
            runs = {name: step(model, loss, dtype, device) for name, loss in losses.items()}
            timing = interleaved(runs, repeats, device)
            for taken in timing.values():
                taken["tokens_per_s"] = round(tokens / taken["min_wall_s"])
            speedup = ratio(timing, "head_everywhere", "head_at_masks")
            results[f"V{vocab}_{dtype}"] = {**timing, "speedup": speedup, "masked_share": round(share, 3)}
            print(
                f"V={vocab} {dtype}: {timing['head_at_masks']['tokens_per_s']} tokens/s at masks "
                f"({share:.0%} of positions), {timing['head_everywhere']['tokens_per_s']} everywhere, {speedup}",
                flush=True,
            )
    return results


def ratio(timing: dict[str, dict], over: str, under: str) -> dict[str, float]:
    return {
        key: round(timing[over][f"{key}_s"] / timing[under][f"{key}_s"], 3)
        for key in ("min_wall", "median_wall", "min_cpu")
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--batch", type=int, default=None, help="rows; 4 on the CPU and 32 on a GPU when left out")
    parser.add_argument("--threads", type=int, default=None, help="CPU threads; PyTorch's choice when left out")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, one repeat, nothing written: does it run?")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    sizes = QUICK if options.quick else Sizes(batch=options.batch or (32 if options.device == "cuda" else 4))
    repeats = 1 if options.quick else options.repeats
    result = {
        "what": "DiffusionLM on a Llama backbone; forward + backward; ratios of wall and processor time",
        "sizes": asdict(sizes),
        "sink": sink_ratios(sizes, options.device, repeats),
        "head": head_ratios(sizes, options.device, repeats),
    }
    if not options.quick:
        print(f"written to {write_result('training', result, options.device)}")


if __name__ == "__main__":
    main()
