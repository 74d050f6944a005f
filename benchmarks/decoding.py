"""What a decoder costs: LLaDA's loop written plainly, and ours without a cache, with a prefix
cache, with a dual cache.

    python benchmarks/decoding.py [--repeats 5] [--quick]
    python benchmarks/decoding.py --device cuda [--layers 8] [--prompts 512] [--decoders dual] \\
        [--steps 64] [--quick]

On the CPU: a toy LLaDA (4 layers, 128 wide, 4 heads, 4096 tokens, float32, one thread), 64 new
tokens in blocks of 16, one token a step, behind prompts of 128, 512 and 1024 tokens. Processor time
of this process; decoders take turns, and of every step the best turn counts, so that a busy
neighbour disturbs long runs no more than short ones. The unit is our loop without a cache that
calls the model's own forward ("uncached"). Other people's loops are run by `peers.py`. On a GPU:
the shape of LLaDA-8B with random bfloat16 weights made there, 256 new tokens in blocks of 32 behind
prompts of 512 and 1024, without a cache and with both: milliseconds a step of ours, of ours without
graphs ("eager"), of ours with every value waited for as well ("waiting": as it was), and of LLaDA's
loop. Without a cache all steps cost the same, and the first 12 are timed. Turns are interleaved;
ratios are taken within a turn. A step that begins a block computes everything: "partial_ms" is the
median of the others, between CUDA events. `--quick` runs either at a tiny size, on the CPU if need
be, and writes nothing: does it run?
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from measure import interleaved, synchronize, write_result
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig

from sinklab.core.attention import context, watching
from sinklab.core.subject import (
    Cache,
    Canvas,
    Denoiser,
    DiffusionLM,
    DiffusionLMConfig,
    Session,
    denoise,
)
from sinklab.extras.fast.decoder import FastDecoder
from sinklab.lab.caching import DualCache, PrefixCache

# B batch, S canvas, V vocabulary


@dataclass(frozen=True)
class Sizes:
    """What decodes here."""

    layers: int = 4
    width: int = 128
    heads: int = 4
    mlp: int = 512
    vocab: int = 4096
    new_tokens: int = 64
    block: int = 16
    prompts: tuple[int, ...] = (128, 512, 1024)
    dtype: str = "float32"


QUICK = Sizes(layers=2, width=32, heads=2, mlp=48, vocab=96, new_tokens=8, block=4, prompts=(6,))
LLADA_8B = Sizes(32, 4096, 32, 12288, 126464, 256, 32, (512, 1024), dtype="bfloat16")
QUICK_8B = Sizes(2, 32, 2, 48, 96, 8, 4, (6,), dtype="bfloat16")

CACHES: dict[str, Cache | None] = {
    "uncached": None,
    "uncached_fast": None,
    "refreshed_every_step": DualCache(refresh_every=1),
    "prefix": PrefixCache(),
    "dual": DualCache(),
}
GPU_DECODERS = ["uncached_fast", "prefix", "dual"]
# steps without a cache, which all cost the same
ALIKE = 12
LEAST_SECONDS = 60


def build(sizes: Sizes, device: str) -> DiffusionLM:
    backbone = LlamaConfig(
        vocab_size=sizes.vocab,
        hidden_size=sizes.width,
        intermediate_size=sizes.mlp,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.heads,
        max_position_embeddings=max(sizes.prompts) + sizes.new_tokens,
        # Wide weights, so that no decision hangs on the last bit; narrow ones where there are many
        # layers.
        initializer_range=0.1 if sizes.layers < 8 else 0.02,
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    with torch.device(device):
        config = DiffusionLMConfig(backbone, mask_token_id=sizes.vocab - 1)
        return DiffusionLM._from_config(config, dtype=getattr(torch, sizes.dtype)).eval()


def canvas_of(sizes: Sizes, prompt: int, rows: int, device: str) -> Canvas:
    ids_BP = torch.randint(
        0, sizes.vocab - 1, (rows, prompt), generator=torch.Generator().manual_seed(prompt)
    )
    return Canvas.from_prompts(
        ids_BP.to(device), new_tokens=sizes.new_tokens, mask_id=sizes.vocab - 1
    )


@torch.inference_mode()
def plain_loop(model: DiffusionLM, canvas: Canvas, block: int) -> Iterator[Tensor]:
    """LLaDA's semi-autoregressive loop, one token a step, as one would write it down: logits and
    their softmax (in float32: the released code has had float64 too) for the whole canvas, the best
    candidate of each row by topk.
    """
    ids_BS = canvas.ids_BS.clone()
    first, length = int(canvas.open_BS[0].nonzero()[0]), ids_BS.shape[1]
    for start in range(first, length, block):
        for _ in range(block):
            masked_BS = ids_BS == canvas.mask_id
            logits_BSV = model(ids_BS).logits
            token_BS = logits_BSV.argmax(-1)
            confidence_BS = F.softmax(logits_BSV, -1).gather(-1, token_BS[..., None])[..., 0]
            confidence_BS[:, start + block :] = -torch.inf
            confidence_BS = confidence_BS.masked_fill(~masked_BS, -torch.inf)
            for row in range(len(ids_BS)):
                place = confidence_BS[row].topk(1).indices
                ids_BS[row, place] = token_BS[row, place]
            yield ids_BS


def ours(model: DiffusionLM, canvas: Canvas, sizes: Sizes, name: str) -> Iterator[Tensor]:
    cache = CACHES[name]
    for step in denoise(
        model.denoiser(plain=name == "uncached"), canvas, cache=cache, block_length=sizes.block
    ):
        yield step.ids_BS


def last(run: Iterator[Tensor]) -> Tensor:
    *_, ids_BS = run
    return ids_BS


def check_tokens(model: DiffusionLM, canvas: Canvas, sizes: Sizes) -> None:
    """Every decoder writes what its slow twin writes."""
    plain_BS = last(plain_loop(model, canvas, sizes.block))
    for name in ("uncached", "uncached_fast", "refreshed_every_step"):
        assert torch.equal(last(ours(model, canvas, sizes, name)), plain_BS)
    for name in ("prefix", "dual"):
        with watching(model):
            twin_BS = last(ours(model, canvas, sizes, name))
        assert torch.equal(last(ours(model, canvas, sizes, name)), twin_BS)


def best_steps(
    runs: dict[str, Callable[[], Iterator[Tensor]]], repeats: int, least: float
) -> dict[str, dict[str, float]]:
    """Processor seconds of each decoder: the sum over its steps of the best turn of each, and its
    best whole run.

    Turns go on for `least` seconds: the first ten or so of a process are up to a fifth slower here.
    """
    steps: dict[str, list[list[float]]] = {name: [] for name in runs}
    began, turn = time.perf_counter(), 0
    while turn < repeats or time.perf_counter() - began < least:
        turn += 1
        for name, run in runs.items():
            marks = [time.process_time()]
            for _ in run():
                marks.append(time.process_time())
            steps[name].append([after - before for before, after in itertools.pairwise(marks)])
    return {
        name: {
            "seconds": round(sum(map(min, zip(*turns, strict=True))), 4),
            "best_run_seconds": round(min(map(sum, turns)), 4),
            "turns": len(turns),
        }
        for name, turns in steps.items()
    }


def cpu_ratios(sizes: Sizes, repeats: int) -> dict[str, dict]:
    """Seconds of each decoder, by prompt length, and their ratios."""
    model, results = build(sizes, "cpu"), {}
    for prompt in sizes.prompts:
        canvas = canvas_of(sizes, prompt, 1, "cpu")
        check_tokens(model, canvas, sizes)
        runs: dict[str, Callable[[], Iterator[Tensor]]] = {
            "plain_loop": lambda canvas=canvas: plain_loop(model, canvas, sizes.block)
        }
        for name in CACHES:
            runs[name] = lambda canvas=canvas, name=name: ours(model, canvas, sizes, name)
        timing = best_steps(runs, repeats, LEAST_SECONDS if repeats > 1 else 0)
        ratios = {
            f"to_{unit}": {
                name: round(taken["seconds"] / timing[unit]["seconds"], 4)
                for name, taken in timing.items()
            }
            for unit in ("uncached", "plain_loop", "refreshed_every_step")
        }
        results[f"P{prompt}"] = {
            "decoders": timing,
            "ratios": ratios,
            "milliseconds_per_evaluation": parts(model, canvas, sizes, repeats),
        }
        print(f"P={prompt}: {timing}\n  {ratios['to_uncached']}", flush=True)
    return results


@torch.inference_mode()
def parts(model: DiffusionLM, canvas: Canvas, sizes: Sizes, repeats: int) -> dict[str, float]:
    """Where the time of one evaluation goes, and what the things cost that are not done. Half a
    block is wanted.
    """
    ids_BS = canvas.ids_BS
    start = int(canvas.open_BS[0].nonzero()[0])
    window = slice(start, start + sizes.block)
    wanted_BS = torch.zeros_like(canvas.open_BS)
    wanted_BS[:, start : start + sizes.block : 2] = True
    session = model.denoiser().begin()
    logits_MV = session(ids_BS, wanted_BS)
    logits_BSV = model(ids_BS).logits
    states_BSE = model.hidden_states(ids_BS)
    heads, dim = sizes.heads, sizes.width // sizes.heads
    cached = [torch.randn(1, heads, ids_BS.shape[1], dim) for _ in range(2 * sizes.layers)]
    fresh = [torch.randn(1, heads, sizes.block, dim) for _ in range(2 * sizes.layers)]

    def watched(run: Callable[[], object]) -> Callable[[], object]:
        def slow() -> None:
            with watching(model):
                run()

        return slow

    def joined() -> None:
        for old, new in zip(cached, fresh, strict=True):
            torch.cat([old[:, :, : window.start], new, old[:, :, window.stop :]], 2)

    def written() -> None:
        for old, new in zip(cached, fresh, strict=True):
            old[:, :, window] = new

    runs: dict[str, Callable[[], object]] = {
        "block window": lambda: session(ids_BS, wanted_BS, window),
        "block window, decoder's own forward": watched(lambda: session(ids_BS, wanted_BS, window)),
        "block and suffix window": lambda: session(
            ids_BS, wanted_BS, slice(start, ids_BS.shape[1])
        ),
        "full": lambda: session(ids_BS, wanted_BS),
        "full, decoder's own forward": watched(lambda: session(ids_BS, wanted_BS)),
        "of these: head at the wanted positions": lambda: model.lm_head(states_BSE[wanted_BS]),
        "removed: head at all positions": lambda: model.lm_head(states_BSE),
        "loop: softmax at the wanted positions": lambda: F.softmax(logits_MV, -1),
        "removed: softmax at all positions, float32": lambda: F.softmax(logits_BSV, -1),
        "removed: softmax at all positions, float64": lambda: F.softmax(logits_BSV.double(), -1),
        "of these: keys and values written in place": written,
        "removed: keys and values concatenated": joined,
    }
    calls = {}
    for name, run in runs.items():
        run()
        begun = time.perf_counter()
        run()
        calls[name] = min(max(round(0.05 / (time.perf_counter() - begun)), 1), 100)

    def often(name: str) -> Callable[[], object]:
        return lambda: [runs[name]() for _ in range(calls[name])]

    timing = interleaved({name: often(name) for name in runs}, 2 * repeats)
    return {
        name: round(taken["min_cpu_s"] / calls[name] * 1e3, 3) for name, taken in timing.items()
    }


class Untold(Denoiser):
    """A denoiser that is not told where its logits are wanted: it asks the device, as it did
    before.
    """

    def __init__(self, denoiser):
        self.denoiser = denoiser

    def logits(self, ids_BS, at):
        return self.denoiser(ids_BS, at.wanted_BS)

    def begin(self, cache):
        return UntoldSession(self.denoiser.begin(cache))


class UntoldSession(Session):
    def __init__(self, session):
        self.session = session

    def logits(self, ids_BS, at, columns=None):
        return self.session(ids_BS, at.wanted_BS, columns)


@contextmanager
def as_it_was(device: str) -> Iterator[None]:
    """Every value of a step is read at once, and no graph is recorded."""
    context.SYNCHRONOUS.add(device)
    try:
        with eager():
            yield
    finally:
        if device != "cpu":
            context.SYNCHRONOUS.discard(device)


@contextmanager
def eager() -> Iterator[None]:
    FastDecoder.records = False
    try:
        yield
    finally:
        FastDecoder.records = True


def gpu_steps(
    model: DiffusionLM, canvas: Canvas, sizes: Sizes, name: str, device: str
) -> Iterator[Tensor]:
    kind, _, cache = name.partition(" ")
    if kind == "plain_loop":
        yield from plain_loop(model, canvas, sizes.block)
        return
    denoiser = Untold(model.denoiser()) if kind == "waiting" else model.denoiser()
    forms: dict[str, AbstractContextManager] = {
        "ours": nullcontext(),
        "eager": eager(),
        "waiting": as_it_was(device),
    }
    with torch.inference_mode(), forms[kind]:
        for step in denoise(denoiser, canvas, cache=CACHES[cache], block_length=sizes.block):
            yield step.ids_BS


def timed_steps(run: Iterator[Tensor], most: int, device: str) -> tuple[float, list[float], Tensor]:
    """Wall seconds of so many steps at most, milliseconds of each (on a GPU by its own clock), and
    the last ids.
    """
    gc.collect()
    synchronize(device)
    marks, last_BS, began = [], torch.empty(0), time.perf_counter()
    for ids_BS in itertools.islice(run, most):
        last_BS = ids_BS
        if device == "cuda":
            marks.append(torch.cuda.Event(enable_timing=True))
            marks[-1].record()
        else:
            marks.append(time.perf_counter())
    synchronize(device)
    wall = time.perf_counter() - began
    if device == "cuda":
        return (
            wall,
            [before.elapsed_time(after) for before, after in itertools.pairwise(marks)],
            last_BS,
        )
    return wall, [1e3 * (after - before) for before, after in itertools.pairwise(marks)], last_BS


def gpu_ratios(
    sizes: Sizes, device: str, repeats: int, decoders: list[str], steps: int | None
) -> Iterator[tuple[str, dict]]:
    """Milliseconds a step and ratios within a turn, by prompt and decoder."""
    model = build(sizes, device)
    for prompt, cache in ((prompt, cache) for prompt in sizes.prompts for cache in decoders):
        canvas = canvas_of(sizes, prompt, 1, device)
        kinds = ["ours", "eager", "waiting"] if CACHES[cache] else ["ours", "waiting"]
        names = [*(f"{kind} {cache}" for kind in kinds), *([] if CACHES[cache] else ["plain_loop"])]
        most = min(sizes.new_tokens if CACHES[cache] else ALIKE, steps or sizes.new_tokens)
        turns: dict[str, list[tuple[float, list[float], Tensor]]] = {name: [] for name in names}
        for turn in range(repeats + 1):
            for name in names:
                taken = timed_steps(gpu_steps(model, canvas, sizes, name, device), most, device)
                # the first turn warms up
                turns[name] += [taken] if turn else []
        result = told(turns, most, sizes.block)
        print(f"P{prompt} {cache}", json.dumps(result), flush=True)
        yield f"P{prompt} {cache}", result


def told(
    turns: dict[str, list[tuple[float, list[float], Tensor]]], steps: int, block: int
) -> dict[str, Any]:
    """What a prompt and a cache came to."""
    ours, result = next(iter(turns.values())), {}
    for name, taken in turns.items():
        wall = [1e3 * seconds / steps for seconds, _, _ in taken]
        partial = [ms for _, each, _ in taken for place, ms in enumerate(each, 1) if place % block]
        result[name] = {
            "steps": steps,
            "ms_a_step": round(statistics.median(wall), 3),
            "range": [round(min(wall), 3), round(max(wall), 3)],
            "tokens_per_s": round(1e3 / statistics.median(wall), 1),
            "partial_ms": round(statistics.median(partial), 3),
        }
        if taken is not ours:
            ratios = [own[0] / other[0] for own, other in zip(ours, taken, strict=True)]
            result[name]["ours_over_it"] = round(statistics.median(ratios), 4)
            result[name]["ours_over_it_range"] = [round(min(ratios), 4), round(max(ratios), 4)]
            result[name]["positions_that_differ"] = int((ours[0][2] != taken[0][2]).sum())
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--shape", choices=("llada",), default="llada", help="with --device cuda")
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="with --device cuda"
    )
    parser.add_argument("--layers", type=int, help="with --device cuda: in place of 32")
    parser.add_argument(
        "--prompts", type=int, nargs="+", help="with --device cuda: in place of 512 and 1024"
    )
    parser.add_argument(
        "--steps", type=int, help="with --device cuda: time the first so many alone"
    )
    parser.add_argument(
        "--decoders",
        nargs="+",
        choices=GPU_DECODERS,
        default=GPU_DECODERS,
        help="with --device cuda",
    )
    parser.add_argument(
        "--quick", action="store_true", help="tiny sizes, one repeat, nothing written: does it run?"
    )
    options = parser.parse_args()
    repeats = 1 if options.quick else options.repeats
    if options.device == "cuda":
        sizes = QUICK_8B if options.quick else LLADA_8B
        sizes = replace(
            sizes, layers=options.layers or sizes.layers, prompts=options.prompts or sizes.prompts
        )
        sizes = replace(sizes, dtype=options.dtype)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        if device == "cpu" and not options.quick:
            parser.error("no GPU is at hand: --quick runs the same code at a tiny size on the CPU")
        prompts: dict[str, Any] = {}
        for key, found in gpu_ratios(sizes, device, repeats, options.decoders, options.steps):
            prompts[key] = found
            # after each, so that a run that is stopped leaves what it has
            write(options, device, sizes, {"prompts": prompts})
    else:
        torch.set_num_threads(1)
        sizes, device = QUICK if options.quick else Sizes(), "cpu"
        write(options, device, sizes, {"prompts": cpu_ratios(sizes, repeats), "removed": REMOVED})


def write(options: argparse.Namespace, device: str, sizes: Sizes, result: dict[str, Any]) -> None:
    if not options.quick:
        whole = {"what": WHAT, "sizes": asdict(sizes), **result}
        print(f"written to {write_result('decoding', whole, device)}")


WHAT = (
    "one token a step; on the CPU the unit is our loop without a cache, with the model's own "
    "forward"
)
REMOVED = [
    "softmax and argmax over the whole canvas: only candidates get them",
    "logits of the whole canvas: the head runs at candidates alone, also in full evaluations",
    "in the last layer, queries, attention, output projection and MLP of positions that are no "
    "candidates",
    "concatenation of keys and values at every step: one buffer a layer, written in place",
    "masks where nothing is padded, rotary tables at every step: made once a run",
    "the wrappers of the decoder's forward, and module calls around stock linear layers, norms "
    "and MLPs",
    "a copy of the negated half in the rotary embedding, an allocation in the MLP",
]

if __name__ == "__main__":
    main()
