"""What a trace costs: time at three lengths and two head widths, and peak memory at the longest.

    python benchmarks/tracing.py [--device cuda] [--dtype bfloat16] [--repeats 5] [--shape llada]

The model is a transformers Llama made bidirectional, one row, random weights: 8 layers and 8 heads of 64 or of 128
(LLaDA's and Dream's width), or with `--shape llada` two layers of LLaDA-8B's shape. Traced with the default statistics
and with all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from measure import interleaved, memory_mb, reset_peak, write_result

from sinklab.probing import trace
from sinklab.registry import statistics

LENGTHS = (512, 1024, 4096)
SHAPES = {
    "heads_of_64": {"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 8, "num_attention_heads": 8},
    "heads_of_128": {"hidden_size": 1024, "intermediate_size": 2752, "num_hidden_layers": 8, "num_attention_heads": 8},
    "llada": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 2, "num_attention_heads": 32},
}
TRACES = {"default": ("received", "value_norm"), "all": tuple(statistics)}
MODES = ("untraced", *TRACES)
VOCABULARY, MASK = 2048, 0


def build(shape: str, device: str, dtype: str) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY, max_position_embeddings=max(LENGTHS), attn_implementation="sdpa", **SHAPES[shape]
    )
    config.is_causal = False
    torch.manual_seed(0)
    return LlamaForCausalLM(config).to(device=device, dtype=getattr(torch, dtype)).eval()


def inputs(length: int, device: str) -> tuple[torch.Tensor, Any]:
    """Ids of which the right half is masked but for every fourth, and the canvas that says so."""
    ids_BS = torch.randint(1, VOCABULARY, (1, length), generator=torch.Generator().manual_seed(length))
    open_BS = (torch.arange(length) >= length // 2)[None]
    ids_BS[open_BS & (torch.arange(length) % 4 > 0)[None]] = MASK
    canvas = SimpleNamespace(open_BS=open_BS, attention_BS=torch.ones_like(open_BS), mask_id=MASK)
    return ids_BS.to(device), canvas


def traced(model: Any, statistics: str, canvas: Any) -> Any:
    """The block that traces these statistics; `untraced` does nothing."""
    if statistics not in TRACES:
        return nullcontext()
    return trace(model, TRACES[statistics], canvas=canvas if statistics == "all" else None)


@torch.inference_mode()
def time_ratios(shape: str, device: str, dtype: str, repeats: int) -> dict[str, dict]:
    model, results = build(shape, device, dtype), {}
    for length in LENGTHS:
        ids_BS, canvas = inputs(length, device)

        def run(statistics: str, ids_BS: torch.Tensor = ids_BS, canvas: Any = canvas) -> None:
            with traced(model, statistics, canvas):
                model(ids_BS, use_cache=False)

        runs = {name: (lambda name=name, run=run: run(name)) for name in ("untraced", *TRACES)}
        timing: dict[str, Any] = interleaved(runs, repeats, device)
        base = timing["untraced"]
        timing["ratio"] = {
            name: {clock: round(timing[name][clock] / base[clock], 3) for clock in ("min_wall_s", "min_cpu_s")}
            for name in TRACES
        }
        results[str(length)] = timing
        print(f"{shape} S={length}: untraced {base['min_wall_s'] * 1e3:.1f} ms, over it {timing['ratio']}", flush=True)
    return results


@torch.inference_mode()
def memory_of(mode: str, shape: str, device: str, dtype: str) -> dict[str, float]:
    """Peak memory of one forward at the longest length, in this process, and the size of what was recorded."""
    model = build(shape, device, dtype)
    ids_BS, canvas = inputs(max(LENGTHS), device)
    short_BS, small = inputs(64, device)
    with traced(model, mode, small):
        model(short_BS, use_cache=False)
    before = memory_mb(device)["now"]
    reset_peak(device)
    with traced(model, mode, canvas) as recording:
        model(ids_BS, use_cache=False)
    peak = memory_mb(device)["peak"]
    size = sum(value.nbytes for name in TRACES.get(mode, ()) for value in recording.values(name))
    taken = {"before_mb": before, "peak_mb": peak, "growth_mb": peak - before, "recorded_mb": size / 1e6}
    return {name: round(value, 1) for name, value in taken.items()}


def _output(command: list[str]) -> str:
    # glibc would keep freed blocks for later by rules that change as it runs: tens of MB more or less from run to run.
    settled = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(1 << 16)}
    return subprocess.run(command, capture_output=True, text=True, check=True, env=settled).stdout


def memory_beside_untraced(shape: str, device: str, dtype: str, repeats: int = 3) -> dict[str, dict]:
    """Every mode in fresh processes; the smallest growth of each, since allocators add noise and never remove it."""
    results = {}
    for mode in MODES:
        options = ["--memory-of", mode, "--shape", shape, "--device", device, "--dtype", dtype]
        command = [sys.executable, __file__, *options]
        outputs = [_output(command) for _ in range(repeats)]
        results[mode] = min((json.loads(output) for output in outputs), key=lambda taken: taken["growth_mb"])
    for mode, taken in results.items():
        if mode != "untraced":
            taken["extra_mb"] = round(taken["growth_mb"] - results["untraced"]["growth_mb"], 1)
            # What the project aims at: 32 MB and twice the recorded result.
            taken["allowed_mb"] = round(32 + 2 * taken["recorded_mb"], 1)
        print(f"{shape} S={max(LENGTHS)} memory, {mode}: {taken}", flush=True)
    size = SHAPES[shape]
    # Counted, not run: what eager attention with `output_attentions` holds in float32.
    maps = 4 * size["num_hidden_layers"] * size["num_attention_heads"] * max(LENGTHS) ** 2
    return {**results, "whole_maps": {"mb": round(maps / 1e6, 1)}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--shape", choices=tuple(SHAPES), action="append", help="default: the two with 8 layers")
    parser.add_argument("--memory-of", choices=MODES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    shapes = options.shape or list(SHAPES)[:2]
    if options.memory_of:
        print(json.dumps(memory_of(options.memory_of, shapes[0], options.device, options.dtype)))
        return
    result = {
        "what": "bidirectional transformers Llama, one row: traced over untraced, default and all statistics",
        "dtype": options.dtype,
        "shapes": {shape: SHAPES[shape] for shape in shapes},
        "time": {shape: time_ratios(shape, options.device, options.dtype, options.repeats) for shape in shapes},
        "memory_at_longest": {shape: memory_beside_untraced(shape, options.device, options.dtype) for shape in shapes},
    }
    print(f"written to {write_result('tracing', result, options.device)}")


if __name__ == "__main__":
    main()
