"""What training costs: seconds and memory of forward + backward, taken in turns.

    python benchmarks/training.py [--device cuda] [--repeats 7] [--threads 1] [--width 256] \\
        [--compile] [--quick]

variants: every variant of the model against the plain one, and what it keeps for the backward pass.
forms: a sink as a key/value prefix, and in the masked (L + 1)² form of Eq. 6 (the
tests' slow twin), against no sink. loop: tokens per second of our step over a straightforward loop,
which is the masked form with the logits of all positions, in the same precision. head: the loss in
chunks, with the logits of all masks at once, and with those of all positions. Memory is only
measured where the allocator gives it back: leave MALLOC_* unset for it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict, replace

import torch
from measure import interleaved, memory_mb, reset_peak, write_result
from steps import (
    VARIANTS,
    Batch,
    Shape,
    build,
    kept_mb,
    noisy_batch,
    of_logits,
    ours,
    precision,
    ratio,
    step,
)
from steps import straightforward as straightforward_loss
from torch import Tensor

from sinklab.core.subject import DiffusionLM
from sinklab.extras.fast.loss import chunked_cross_entropy

DTYPES = ("float32", "bfloat16")


def measured(
    runs: dict[str, Callable[[], None]], tokens: int, repeats: int, device: str
) -> dict[str, dict]:
    """Timing of each run, with tokens per second."""
    timing = interleaved(runs, repeats, device)
    for taken in timing.values():
        taken["tokens_per_s"] = round(tokens / taken["min_wall_s"])
    return timing


def peak_mb(run: Callable[[], None], device: str) -> float:
    """How far memory rises during a run, in MB."""
    reset_peak(device)
    before = memory_mb(device)["now"]
    run()
    return round(memory_mb(device)["peak"] - before, 1)


def variant_costs(shape: Shape, device: str, repeats: int) -> dict[str, dict]:
    """Step time, tokens per second and memory of every variant, with its ratio to the plain
    model.
    """
    models = {name: build(shape, name, device) for name in VARIANTS}
    batch = noisy_batch(shape, device)
    results: dict[str, dict] = {}
    for dtype in DTYPES:
        losses = {name: lambda model=model: ours(model, batch) for name, model in models.items()}
        runs = {name: step(models[name], loss, dtype, device) for name, loss in losses.items()}
        timing = measured(runs, shape.tokens, repeats, device)
        for name, taken in timing.items():
            taken["ratio"] = ratio(timing, name, "plain")
            taken["kept_for_backward_mb"] = round(
                kept_mb(models[name], losses[name], dtype, device), 1
            )
            taken["peak_rise_mb"] = peak_mb(runs[name], device)
            print(
                f"{dtype} {name}: {taken['min_wall_s'] * 1e3:.1f} ms, {taken['tokens_per_s']} "
                f"tokens/s, {taken['kept_for_backward_mb']} MB kept, {taken['ratio']}",
                flush=True,
            )
        results[dtype] = timing
    return results


def form_costs(shape: Shape, device: str, repeats: int) -> dict[str, dict]:
    """No sink and one sink in two forms; the head is at masks alone in all of them."""
    batch = noisy_batch(shape, device)
    models = {"no_sink": build(shape, "plain", device)}
    models["prefix"] = build(shape, "sink", device)
    masked = models["prefix"]
    losses: dict[str, Callable[[], Tensor]] = {
        name: lambda model=model: ours(model, batch) for name, model in models.items()
    }
    losses["masked_form"] = lambda: straightforward_loss(masked, batch)
    results: dict[str, dict] = {}
    for dtype in DTYPES:
        with precision(dtype, device):
            values = {name: loss().item() for name, loss in losses.items()}
        runs = {
            name: step(models.get(name, masked), loss, dtype, device)
            for name, loss in losses.items()
        }
        timing = measured(runs, shape.tokens, repeats, device)
        ratios = {name: ratio(timing, name, "no_sink") for name in losses if name != "no_sink"}
        results[dtype] = {**timing, "ratio": ratios, "loss": values}
        print(
            f"{dtype}: no sink {timing['no_sink']['min_wall_s'] * 1e3:.1f} ms, {ratios}", flush=True
        )
    return results


def loop_speed(shape: Shape, device: str, repeats: int, backend: str | None) -> dict[str, dict]:
    """Our step, compiled or not, over a straightforward loop, with one sink."""
    batch = noisy_batch(shape, device)
    plain_loop, eager = build(shape, "sink", device), build(shape, "sink", device)
    steps: dict[str, tuple[DiffusionLM, Callable[[], Tensor]]] = {
        "straightforward": (plain_loop, lambda: straightforward_loss(plain_loop, batch)),
        "ours": (eager, lambda: ours(eager, batch)),
    }
    if backend:
        compiled = build(shape, "sink", device)
        compiled.model.compile(dynamic=False, backend=backend)
        steps["ours_compiled"] = (compiled, lambda: ours(compiled, batch))
    results: dict[str, dict] = {}
    for dtype in DTYPES:
        runs = {name: step(model, loss, dtype, device) for name, (model, loss) in steps.items()}
        timing = measured(runs, shape.tokens, repeats, device)
        speedup = {
            name: ratio(timing, "straightforward", name)
            for name in steps
            if name != "straightforward"
        }
        results[dtype] = {
            **timing,
            "speedup": speedup,
            "masked_share": round(batch.masked_share, 3),
        }
        print(
            f"V={shape.vocab} {dtype}: {timing['ours']['tokens_per_s']} tokens/s, speed-up "
            f"{speedup}",
            flush=True,
        )
    return results


def head_costs(shape: Shape, device: str, repeats: int, chunk: int) -> dict[str, dict]:
    """The head and its loss alone, forward and backward, from states that want a gradient."""
    batch = noisy_batch(shape, device)
    model = build(replace(shape, layers=1), "plain", device)
    head = model.lm_head
    states_MD = torch.randn(shape.tokens, shape.width, device=device, requires_grad=True)
    asked_M = (batch.labels_BS != -100).flatten()
    labels_M, weights_M = batch.labels_BS.flatten(), batch.weights_BS.flatten()

    def chunked(rows: int) -> Tensor:
        return chunked_cross_entropy(
            states_MD[asked_M], head.weight, labels_M[asked_M], weights_M[asked_M], chunk=rows
        )

    def masks_at_once() -> Tensor:
        part = Batch(batch.noisy_BS, labels_M[asked_M], weights_M[asked_M], batch.masked_share)
        return of_logits(head(states_MD[asked_M])[None], part)

    losses: dict[str, Callable[[], Tensor]] = {
        "chunked": lambda: chunked(chunk),
        "masks_at_once": masks_at_once,
        "all_positions": lambda: of_logits(head(states_MD)[None], batch),
    }
    results: dict[str, dict] = {}
    for dtype in DTYPES:
        runs = {name: step(model, loss, dtype, device) for name, loss in losses.items()}
        timing = measured(runs, shape.tokens, repeats, device)
        for name, taken in timing.items():
            taken["ratio"] = ratio(timing, name, "masks_at_once")
            taken["peak_rise_mb"] = peak_mb(runs[name], device)
            print(
                f"V={shape.vocab} {dtype} {name}: {taken['ratio']}, peak +{taken['peak_rise_mb']} "
                "MB",
                flush=True,
            )
        results[dtype] = {**timing, "chunk": chunk, "masked_share": round(batch.masked_share, 3)}
    return results


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--batch", type=int, default=16, help="rows of a micro-batch")
    parser.add_argument("--length", type=int, default=256, help="tokens of a row")
    parser.add_argument(
        "--width", type=int, default=256, help="hidden size; heads of 64, SwiGLU of 11/4"
    )
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument(
        "--threads", type=int, default=None, help="CPU threads; PyTorch's choice when left out"
    )
    parser.add_argument("--compile", action="store_true", help="time our compiled step too")
    parser.add_argument(
        "--quick", action="store_true", help="tiny sizes, one repeat, nothing written: does it run?"
    )
    options = parser.parse_args(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    shape, vocabularies, repeats, chunk = Shape(2, 64, 2, 176, 64, 2, 32), (128,), 1, 8
    if not options.quick:
        width, repeats, chunk = options.width, options.repeats, 512
        shape = Shape(
            options.layers,
            width,
            max(1, width // 64),
            width * 11 // 4,
            2048,
            options.batch,
            options.length,
        )
        vocabularies = (2048, 8192, 32000)
    backend = ("aot_eager" if options.quick else "inductor") if options.compile else None
    largest = replace(shape, vocab=vocabularies[-1])
    result = {
        "what": "DiffusionLM on a Llama backbone; forward + backward; ratios of wall and "
        "processor time",
        "shape": asdict(shape),
        "variants": variant_costs(shape, options.device, repeats),
        "forms": form_costs(shape, options.device, repeats),
        "loop": {
            f"V{vocab}": loop_speed(replace(shape, vocab=vocab), options.device, repeats, backend)
            for vocab in vocabularies
        },
        "head": {f"V{largest.vocab}": head_costs(largest, options.device, repeats, chunk)},
    }
    if not options.quick:
        print(f"written to {write_result('training', result, options.device)}")


if __name__ == "__main__":
    main()
