"""What a trace costs: time at three lengths, and peak memory at the longest beside `output_attentions`.

    python benchmarks/tracing.py [--device cuda] [--dtype bfloat16] [--repeats 5]

The model is a transformers Llama made bidirectional: 8 layers, 8 heads, 512 wide, random weights.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from contextlib import nullcontext

import torch
from measure import interleaved, memory_mb, reset_peak, write_result

from sinklab.probing import trace

LENGTHS = (256, 1024, 2048)
MODES = ("untraced", "traced", "output_attentions")


def build(device: str, dtype: str, attention: str = "sdpa") -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=2048,
        hidden_size=512,
        intermediate_size=1376,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=max(LENGTHS),
        attn_implementation=attention,
    )
    config.is_causal = False
    torch.manual_seed(0)
    return LlamaForCausalLM(config).to(device=device, dtype=getattr(torch, dtype)).eval()


@torch.inference_mode()
def time_ratios(device: str, dtype: str, repeats: int) -> dict[str, dict]:
    model, results = build(device, dtype), {}
    for length in LENGTHS:
        ids = torch.randint(0, 2048, (1, length), device=device)

        def untraced(ids: torch.Tensor = ids) -> None:
            model(ids, use_cache=False)

        def traced(ids: torch.Tensor = ids) -> None:
            with trace(model):
                model(ids, use_cache=False)

        timing = interleaved({"untraced": untraced, "traced": traced}, repeats, device)
        base = timing["untraced"]
        timing["ratio"] = {
            clock: round(timing["traced"][clock] / base[clock], 3) for clock in ("min_cpu_s", "min_wall_s")
        }
        results[str(length)] = timing
        print(
            f"S={length}: untraced {base['min_wall_s'] * 1e3:.1f} ms, traced over untraced {timing['ratio']}",
            flush=True,
        )
    return results


def memory_of(mode: str, device: str, dtype: str) -> dict[str, float]:
    """Peak memory of one forward at the longest length, in this process."""
    model = build(device, dtype, "eager" if mode == "output_attentions" else "sdpa")
    ids = torch.randint(0, 2048, (1, max(LENGTHS)), device=device)
    with torch.inference_mode():
        with nullcontext() if mode == "output_attentions" else trace(model):
            model(ids[:, :8], use_cache=False)
        before = memory_mb(device)["now"]
        reset_peak(device)
        if mode == "traced":
            with trace(model):
                model(ids, use_cache=False)
        else:
            model(ids, use_cache=False, output_attentions=mode == "output_attentions")
    peak = memory_mb(device)["peak"]
    return {"before_mb": round(before, 1), "peak_mb": round(peak, 1), "growth_mb": round(peak - before, 1)}


def memory_ratios(device: str, dtype: str, repeats: int = 3) -> dict[str, dict]:
    """Every mode in fresh processes; the smallest peak of each, since allocators add noise and never remove it."""
    results = {}
    for mode in MODES:
        command = [sys.executable, __file__, "--memory-of", mode, "--device", device, "--dtype", dtype]
        outputs = [subprocess.run(command, capture_output=True, text=True, check=True).stdout for _ in range(repeats)]
        results[mode] = min((json.loads(output) for output in outputs), key=lambda taken: taken["peak_mb"])
    base = results["untraced"]
    for mode in MODES[1:]:
        results[mode]["peak_ratio"] = round(results[mode]["peak_mb"] / base["peak_mb"], 3)
        results[mode]["growth_ratio"] = round(results[mode]["growth_mb"] / base["growth_mb"], 3)
    for mode, taken in results.items():
        print(f"S={max(LENGTHS)} memory, {mode}: {taken}", flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--memory-of", choices=MODES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory_of:
        print(json.dumps(memory_of(options.memory_of, options.device, options.dtype)))
        return
    result = {
        "what": "bidirectional transformers Llama, 8 layers, 8 heads, 512 wide, one row; received and value_norm",
        "dtype": options.dtype,
        "time": time_ratios(options.device, options.dtype, options.repeats),
        "memory_at_longest": memory_ratios(options.device, options.dtype),
    }
    print(f"written to {write_result('tracing', result, options.device)}")


if __name__ == "__main__":
    main()
