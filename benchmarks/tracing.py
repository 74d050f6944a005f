"""What a trace costs: time at several lengths, beside what else one would write, and peak memory at
the longest.

    python benchmarks/tracing.py [--device cuda] [--dtype bfloat16] [--repeats 7] [--shape llada] \\
        [--layers 4]
                                 [--lengths 1024 4096] [--rivals]

The model is a transformers Llama made bidirectional, one row, random weights: 8 layers and 8 heads
of 64 or of 128 (LLaDA's and Dream's width), or with `--shape llada` that of LLaDA-8B, all 32 layers
and its whole vocabulary. Traced with the default statistics, with those that a study records by
default, and with all of them. Rivals: an attention function that multiplies q · kᵀ beside it and
throws that away; the twelve lines that also take its softmax and sum its columns; eager attention
with `output_attentions`, whose maps are summed; the same by nnsight where it is installed; and the
plainest loop over heads that computes the default statistics, over which the trace is held too.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from measure import (
    RESULTS,
    interleaved,
    memory_mb,
    ratios,
    reset_peak,
    synchronize,
    write_result,
)

from sinklab.core.instrument import trace
from sinklab.core.registry import statistics
from sinklab.lab.studies.trace.study import StudySettings

LENGTHS = (512, 1024, 4096)
SHAPES = {
    "heads_of_64": {
        "hidden_size": 512,
        "intermediate_size": 1376,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
    },
    "heads_of_128": {
        "hidden_size": 1024,
        "intermediate_size": 2752,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
    },
    "llada": {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "vocab_size": 126464,
    },
}
# what `sinklab trace` measures unless told otherwise, and the states of queries
STUDY = (
    *StudySettings.statistics,
    "received_by_state",
    "received_from_masked",
)
TRACES = {"default": ("received", "value_norm"), "study": STUDY, "all": tuple(statistics)}
MODES = ("untraced", *TRACES)
MASK = 0


def build(shape: str, device: str, dtype: str) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    fields = {"vocab_size": 2048, **SHAPES[shape]}
    config = LlamaConfig(max_position_embeddings=max(LENGTHS), attn_implementation="sdpa", **fields)
    config.is_causal = False
    torch.manual_seed(0)
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        # made where it runs: 16 GB would take minutes to draw and to copy
        with torch.device(device):
            model = LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(torch.float32)
    for layer in model.model.layers:
        layer.self_attn.is_causal = False
    return model


def inputs(length: int, device: str) -> tuple[torch.Tensor, Any]:
    """Ids of which the right half is masked but for every fourth, and the canvas that says so."""
    ids_BS = torch.randint(1, 2048, (1, length), generator=torch.Generator().manual_seed(length))
    open_BS = (torch.arange(length) >= length // 2)[None]
    ids_BS[open_BS & (torch.arange(length) % 4 > 0)[None]] = MASK
    canvas = SimpleNamespace(open_BS=open_BS, attention_BS=torch.ones_like(open_BS), mask_id=MASK)
    return ids_BS.to(device), canvas


def traced(model: Any, statistics: str, canvas: Any) -> Any:
    """The block that traces these statistics; `untraced` does nothing."""
    if statistics not in TRACES:
        return nullcontext()
    return trace(model, TRACES[statistics], canvas=None if statistics == "default" else canvas)


@contextmanager
def patched(attention: Callable[..., torch.Tensor]) -> Iterator[None]:
    """F.scaled_dot_product_attention is this one for the length of the block."""
    original = F.scaled_dot_product_attention
    F.scaled_dot_product_attention = attention
    try:
        yield
    finally:
        F.scaled_dot_product_attention = original


def only_multiplied(model: Any, ids_BS: torch.Tensor) -> None:
    """The product q · kᵀ in the model's dtype beside each attention call."""
    plain = F.scaled_dot_product_attention

    def attention(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any
    ) -> torch.Tensor:
        q @ k.mT
        return plain(q, k, v, **options)

    with patched(attention):
        model(ids_BS, use_cache=False)


def twelve_lines(model: Any, ids_BS: torch.Tensor) -> torch.Tensor:
    """Column sums, (layer, batch, head, key), as one writes them in a hurry."""
    plain, received = F.scaled_dot_product_attention, []

    def attention(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any
    ) -> torch.Tensor:
        scores = q @ k.mT * options.get("scale", q.shape[-1] ** -0.5)
        received.append(torch.softmax(scores, -1, dtype=torch.float32).sum(-2))
        return plain(q, k, v, **options)

    with patched(attention):
        model(ids_BS, use_cache=False)
    return torch.stack(received).cpu()


def plainest_loop(model: Any, ids_BS: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Column sums (layer, head, key) and value norms (layer, key), head by head: the product,
    exponentials, sums of rows and of columns.
    """
    plain, received, norms = F.scaled_dot_product_attention, [], []

    def attention(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any
    ) -> torch.Tensor:
        scale = options.get("scale", q.shape[-1] ** -0.5)
        for q_QD, k_SD in zip(q[0], k[0], strict=True):
            weights_QS = (q_QD @ k_SD.mT).float().mul_(scale).exp_()
            received.append(weights_QS.sum(-1).reciprocal() @ weights_QS)
        norms.append(v[0].float().norm(dim=-1).mean(0))
        return plain(q, k, v, **options)

    with patched(attention):
        model(ids_BS, use_cache=False)
    return torch.stack(received).cpu(), torch.stack(norms).cpu()


def output_attentions(model: Any, ids_BS: torch.Tensor) -> torch.Tensor:
    """Column sums of the maps that eager attention gives out."""
    model.set_attn_implementation("eager")
    try:
        maps = model(ids_BS, use_cache=False, output_attentions=True).attentions
        return torch.stack([map_BHQS.sum(-2, dtype=torch.float32) for map_BHQS in maps]).cpu()
    finally:
        model.set_attn_implementation("sdpa")


def by_nnsight(model: Any, ids_BS: torch.Tensor) -> torch.Tensor:
    """The same, of eager attention, saved inside nnsight's trace."""
    from nnsight import NNsight, save

    model.set_attn_implementation("eager")
    try:
        wrapped = NNsight(model)
        with wrapped.trace(ids_BS, use_cache=False):
            received = save([])
            for layer in wrapped.model.layers:
                received.append(layer.self_attn.output[1].sum(-2, dtype=torch.float32))
        return torch.stack(received).cpu()
    finally:
        model.set_attn_implementation("sdpa")


def rivals(
    model: Any, ids_BS: torch.Tensor, only: list[str] | None
) -> dict[str, Callable[[], object]]:
    """Those of these names that run here, all without names; one that does not says why."""
    known = {
        "only_multiplied": only_multiplied,
        "twelve_lines": twelve_lines,
        "output_attentions": output_attentions,
        "plainest_loop": plainest_loop,
    }
    if importlib.util.find_spec("nnsight"):
        known["nnsight"] = by_nnsight
    found: dict[str, Callable[[], object]] = {}
    for name, run in known.items():
        if only and name not in only:
            continue
        try:
            run(model, ids_BS)
            found[name] = lambda run=run: run(model, ids_BS)
        except (RuntimeError, TypeError, AttributeError) as error:
            print(f"{name} does not run here: {str(error).splitlines()[0]}", flush=True)
        if ids_BS.is_cuda:
            torch.cuda.empty_cache()
    return found


@torch.inference_mode()
def time_ratios(shape: str, options: argparse.Namespace) -> dict[str, dict]:
    model, results, device = build(shape, options.device, options.dtype), {}, options.device
    for length in options.lengths:
        ids_BS, canvas = inputs(length, device)

        def run(statistics: str, ids_BS: torch.Tensor = ids_BS, canvas: Any = canvas) -> None:
            with traced(model, statistics, canvas):
                model(ids_BS, use_cache=False)

        runs: dict[str, Callable[[], object]] = {
            name: (lambda name=name, run=run: run(name)) for name in MODES
        }
        if options.rivals:
            runs |= rivals(model, ids_BS, options.only)
        if options.only:
            runs = {name: run for name, run in runs.items() if name in options.only}
        timing: dict[str, Any] = interleaved(runs, options.repeats, device)
        base, over = timing["untraced"], ratios(timing, "untraced")
        if device == "cuda":
            for name, one in runs.items():
                timing[name]["peak_over_model_mb"] = round(peak_of(one), 1)
        results[str(length)] = timing | {"ratio": over}
        if "plainest_loop" in runs:
            over_plainest = ratios(timing, "plainest_loop")
            results[str(length)]["ratio_over_plainest_loop"] = over_plainest
            print(f"default over the plainest loop: {over_plainest['default']}", flush=True)
        print(
            f"{shape} S={length}: untraced {base['median_wall_s'] * 1e3:.1f} ms, over it:",
            flush=True,
        )
        for name, ratio in over.items():
            peak = timing[name].get("peak_over_model_mb", "")
            said = f"{ratio['median']:6.3f}  ({ratio['min']:.3f} to {ratio['max']:.3f})"
            print(f"    {name:18} {said}  {peak}", flush=True)
    return results


def peak_of(run: Callable[[], object]) -> float:
    """Peak memory of a run on the GPU, in MB over what lay there before."""
    torch.cuda.empty_cache()
    before = memory_mb("cuda")["now"]
    reset_peak("cuda")
    run()
    synchronize("cuda")
    return memory_mb("cuda")["peak"] - before


@torch.inference_mode()
def memory_of(mode: str, shape: str, device: str, dtype: str) -> dict[str, float]:
    """Peak memory of one forward at the longest length, in this process, and the size of what was
    recorded.
    """
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
    taken = {
        "before_mb": before,
        "peak_mb": peak,
        "growth_mb": peak - before,
        "recorded_mb": size / 1e6,
    }
    return {name: round(value, 1) for name, value in taken.items()}


def _output(command: list[str]) -> str:
    # glibc would keep freed blocks for later by rules that change as it runs: tens of MB more or
    # less from run to run.
    settled = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(1 << 16)}
    return subprocess.run(command, capture_output=True, text=True, check=True, env=settled).stdout


def memory_beside_untraced(
    shape: str, device: str, dtype: str, repeats: int = 3
) -> dict[str, dict]:
    """Every mode in fresh processes; the smallest growth of each, since allocators add noise and
    never remove it.
    """
    results = {}
    for mode in MODES:
        options = ["--memory-of", mode, "--shape", shape, "--device", device, "--dtype", dtype]
        command = [sys.executable, __file__, *options]
        outputs = [_output(command) for _ in range(repeats)]
        results[mode] = min(
            (json.loads(output) for output in outputs), key=lambda taken: taken["growth_mb"]
        )
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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument(
        "--shape", choices=tuple(SHAPES), action="append", help="default: the two with 8 layers"
    )
    parser.add_argument("--layers", type=int, help="so many instead of the shape's own")
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS))
    parser.add_argument(
        "--rivals", action="store_true", help="time what else one would write in the same turns"
    )
    parser.add_argument("--only", nargs="+", help="ways to time, untraced and default among them")
    parser.add_argument("--memory-of", choices=MODES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    shapes = options.shape or list(SHAPES)[:2]
    for shape in shapes if options.layers else ():
        SHAPES[shape]["num_hidden_layers"] = options.layers
    if options.memory_of:
        print(json.dumps(memory_of(options.memory_of, shapes[0], options.device, options.dtype)))
        return
    result: dict[str, Any] = {
        "what": "bidirectional transformers Llama, one row: wall time over untraced, by turns",
        "dtype": options.dtype,
        "shapes": {shape: SHAPES[shape] for shape in shapes},
        "traces": TRACES,
        "time": {shape: time_ratios(shape, options) for shape in shapes},
    }
    if options.device == "cpu" and not options.only:
        # on a GPU it is measured beside the time: its allocator keeps count
        memory = {
            shape: memory_beside_untraced(shape, options.device, options.dtype) for shape in shapes
        }
        result["memory_at_longest"] = memory
    name = "tracing"
    if options.only:
        # a file of its own, to which runs of the same day add their shapes and lengths
        name = "tracing_some"
        known = RESULTS / f"{name}_{options.device}_{datetime.date.today().isoformat()}.json"
        if known.exists():
            before = json.loads(known.read_text())
            for shape, lengths in before["time"].items():
                result["time"][shape] = lengths | result["time"].get(shape, {})
            result["shapes"] = before["shapes"] | result["shapes"]
    print(f"written to {write_result(name, result, options.device)}")


if __name__ == "__main__":
    main()
