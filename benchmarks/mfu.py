"""Model FLOPs utilisation of training the 472M model of «One Token Is Enough», on one GPU.

    python benchmarks/mfu.py [--batch 8] [--repeats 20] [--no-compile] [--forms \\
        plain,sink_prefix,…] [--quick]

MFU = model FLOPs a second / the peak that a large square bfloat16 matrix product reaches on this
device today (the data sheet's peak, where known, can be set beside it by hand). Model FLOPs of a
step on T tokens of rows of S, with M of the tokens masked, counted as multiplications and
additions:

    3 · ( 2·T·P  +  4·T·S·L·A  +  2·M·E·V )

3: forward, and twice as much backward. P: weights of the layers' matrices (4 E·A + 3 E·F a layer;
the gate's E·A more for the gate), A: attention width, E: hidden size, F: SwiGLU width, V: rows of
the head. Attention is counted in full (nothing is causal here), norms, softmax, rotation, embedding
and the optimizer not at all, a sink not either. What a form computes beyond that (the masked twin:
its sink in every row, the head at all positions) earns nothing: all forms of one model are measured
by the same useful work.

A step is forward, backward and fused AdamW on float32 weights under bfloat16 autocast, as the
trainer does it. Forms: plain; sink; gate; masked_twin (sink under an (L + 1)² mask, logits of all
positions).
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from measure import memory_mb, reset_peak, synchronize, write_result
from steps import Batch, Shape, build, noisy_batch, ours, precision, straightforward
from torch import Tensor

from sinklab.core.subject import DiffusionLM

# T tokens, S row, L layers, A attention width, E hidden size, F SwiGLU width, V rows of the head, M
# masked tokens

PAPER = Shape(layers=18, width=1280, heads=10, mlp=5120, vocab=32000, batch=8, length=2048)
QUICK = Shape(layers=2, width=64, heads=2, mlp=96, vocab=128, batch=2, length=32)
FORMS = {"plain": "plain", "sink": "sink", "gate": "gate", "masked_twin": "sink"}
"""Name: variant of the model."""


def model_flops(shape: Shape, masked: int, gate: bool = False) -> int:
    """FLOPs of one step as the head of this file defines them."""
    width = shape.width
    a_layer = (5 if gate else 4) * width * width + 3 * width * shape.mlp
    matrices = 2 * shape.tokens * shape.layers * a_layer
    attention = 4 * shape.tokens * shape.length * shape.layers * width
    return 3 * (matrices + attention + 2 * masked * width * shape.vocab)


def seconds(run: Callable[[], object], repeats: int, device: str) -> list[float]:
    """Wall time of each run, after two for warming up."""
    run()
    run()
    taken = []
    for _ in range(repeats):
        synchronize(device)
        start = time.perf_counter()
        run()
        synchronize(device)
        taken.append(time.perf_counter() - start)
    return sorted(taken)


def matmul_peak(size: int, repeats: int, device: str) -> float:
    """FLOP/s of the fastest of many size³ bfloat16 products."""
    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(left)
    return 2 * size**3 / seconds(lambda: torch.mm(left, right, out=out), repeats, device)[0]


def training_step(
    model: DiffusionLM, loss: Callable[[], Tensor], device: str
) -> Callable[[], None]:
    """Forward, backward and update."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )

    def run() -> None:
        with precision("bfloat16", device):
            value = loss()
        value.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return run


def measure_form(
    form: str, shape: Shape, batch: Batch, *, device: str, backend: str | None, repeats: int
) -> dict[str, Any]:
    """Step time, tokens and FLOPs a second, and memory of one form."""
    variant = FORMS[form]
    model = build(shape, variant, device)
    if backend:
        model.model.compile(dynamic=False, backend=backend)
    of = straightforward if form == "masked_twin" else ours
    run = training_step(model, lambda: of(model, batch), device)
    run()
    reset_peak(device)
    taken = seconds(run, repeats, device)
    median = taken[len(taken) // 2]
    flops = model_flops(shape, int((batch.labels_BS != -100).sum()), gate=variant == "gate")
    return {
        "parameters": model.num_parameters(),
        "median_step_s": median,
        "min_step_s": taken[0],
        "tokens_per_s": round(shape.tokens / median),
        "model_flops": flops,
        "model_flops_per_s": flops / median,
        "peak_mb": round(memory_mb(device)["peak"]),
    }


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--batch", type=int, default=PAPER.batch, help="rows of 2,048 tokens in a step"
    )
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--forms", default=",".join(FORMS), help="which, separated by commas")
    parser.add_argument("--no-compile", action="store_true", help="run the layers eagerly")
    parser.add_argument(
        "--quick", action="store_true", help="tiny sizes, on the CPU, nothing written: does it run?"
    )
    options = parser.parse_args(arguments)
    forms = options.forms.split(",")
    if unknown := [form for form in forms if form not in FORMS]:
        parser.error(f"--forms knows {', '.join(FORMS)}, but not {', '.join(unknown)}")
    device = "cpu" if options.quick else "cuda"
    if device == "cuda" and not torch.cuda.is_available():
        parser.error(
            "the 472M model is measured on a CUDA GPU and none is visible; --quick runs tiny "
            "sizes on the CPU"
        )
    shape = QUICK if options.quick else Shape(**(asdict(PAPER) | {"batch": options.batch}))
    repeats = 1 if options.quick else options.repeats
    backend = None if options.no_compile else "aot_eager" if options.quick else "inductor"
    batch = noisy_batch(shape, device)
    peak = matmul_peak(128 if options.quick else 8192, 3 if options.quick else 50, device)
    print(f"bfloat16 matrix product: {peak / 1e12:.4g} TFLOP/s", flush=True)
    result: dict[str, Any] = {
        "what": "training steps of DiffusionLM; MFU against the measured bfloat16 matmul peak; "
        "formula in the script",
        "shape": asdict(shape),
        "masked_share": round(batch.masked_share, 3),
        "compiled": backend,
        "matmul_peak_flops_per_s": peak,
        "forms": {},
    }
    for form in forms:
        torch.compiler.reset()
        taken = measure_form(form, shape, batch, device=device, backend=backend, repeats=repeats)
        taken["mfu"] = round(taken["model_flops_per_s"] / peak, 4)
        result["forms"][form] = taken
        print(
            f"{form}: {taken['median_step_s'] * 1e3:.1f} ms, {taken['tokens_per_s']} tokens/s, MFU "
            f"{taken['mfu']:.1%}, peak {taken['peak_mb']} MB",
            flush=True,
        )
        # models of 8 GB with their optimizers need not be there at once
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
    if not options.quick:
        print(f"written to {write_result('mfu', result, device)}")
    return result


if __name__ == "__main__":
    main()
