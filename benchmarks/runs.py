"""What a large run folder costs: write, open, read, and turn into a page, beside writing and
reading the bare bytes.

    python benchmarks/runs.py [--samples 30] [--steps 128] [--layers 32] [--heads 32] \\
        [--positions 256] [--quick]

The numbers inside are simulated (heavy-tailed shares with a moving sink); the shape is that of
LLaDA-8B. `--quick` is a run of two small samples, written down nowhere. To compare two versions of
the code, set PYTHONPATH to the src of each.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from measure import memory_mb, reset_peak, write_result

from sinklab.core.sinks import STATES
from sinklab.lab.records import STUDY_DIMS, Arrays, Contents, RunWriter, open_run
from sinklab.lab.records.storage import dense
from sinklab.lab.reports import as_studies, report
from sinklab.lab.studies.trace.recording import facts_of

WORDS = [" the", " of", ",", ".", "\n", " and", " a", " house", " old", "1"]


def attention(shape: argparse.Namespace) -> dict[str, np.ndarray]:
    """One sample: an exponential background and one sink per head that walks to the right."""
    rng = np.random.default_rng(0)
    steps, layers, heads, keys = shape.steps, shape.layers, shape.heads, shape.positions
    received = np.empty((steps, layers, heads, keys), np.float16)
    places = rng.integers(0, keys // 2, (layers, heads))
    for step in range(steps):
        row = rng.exponential(1.0, (layers, heads, keys)).astype(np.float32)
        np.put_along_axis(row, ((places + step // 4) % keys)[..., None], 20.0, axis=-1)
        received[step] = row * (keys / row.sum(-1, keepdims=True))
    grouped = (steps, 3, layers, heads)
    return {
        "received": received,
        "visible": np.full((steps, keys), keys, np.float32),
        "positions": np.full(steps, keys, np.float32),
        "step_number": np.arange(steps, dtype=np.int32),
        "value_norm": rng.gamma(4.0, 1.0, (steps, layers, keys)).astype(np.float16),
        "key_norm": rng.gamma(4.0, 1.0, (steps, layers, keys)).astype(np.float16),
        "row_entropy": rng.random(grouped).astype(np.float16),
    }


def tokens(shape: argparse.Namespace, sample: int) -> dict[str, Any]:
    """The canvas of every step: a prompt of a quarter, the rest committed one position a step from
    the left.
    """
    steps, keys = shape.steps, shape.positions
    step, position = np.repeat(np.arange(steps), keys), np.tile(np.arange(keys), steps)
    prompt = keys // 4
    written = position < prompt + step * (keys - prompt) // steps
    state = np.where(position < prompt, "prompt", np.where(written, "committed", "masked"))
    ids = np.where(state == "masked", 99, (position * 7 + sample) % len(WORDS))
    return {
        "sample": np.full(len(step), sample),
        "step": step,
        "position": position,
        "token_id": ids,
        "text": np.array([*WORDS, *[""] * 89, "[MASK]"], dtype=object)[ids],
        "state": state.astype(object),
        "special": np.where(state == "masked", "mask", "").astype(object),
        "template": np.zeros(len(step), bool),
    }


def write(folder: Path, shape: argparse.Namespace, arrays: dict[str, np.ndarray]) -> None:
    model = {
        "name": "simulated",
        "family": "diffusion",
        "layers": shape.layers,
        "heads": shape.heads,
        "recorded_layers": list(range(shape.layers)),
        "recorded_heads": list(range(shape.heads)),
        "sink_kind": "none",
        "sink_count": 0,
        "sink_side": "front",
    }
    steps = list(range(shape.steps))
    types = {"visible": "float32", "positions": "float32"}
    floats = {name: one for name, one in arrays.items() if one.dtype.kind == "f"}
    arrays |= {name: one.astype(types.get(name, "float16")) for name, one in floats.items()}
    kept = dense(Arrays(arrays, {name: STUDY_DIMS[name] for name in arrays}))
    with RunWriter(
        folder,
        kind="study",
        model=model,
        settings={"new_tokens": shape.steps},
        seed=0,
        samples=shape.samples,
    ) as run:
        for sample in range(shape.samples):
            text = pd.DataFrame(tokens(shape, sample))
            canvas = (shape.steps, shape.positions)
            tables, facts = facts_of(
                kept,
                text["state"].map(STATES.index).to_numpy(np.int8).reshape(canvas),
                text["text"].to_numpy(object).reshape(canvas),
                sample=sample,
                layers=range(shape.layers),
                heads=range(shape.heads),
                added=0,
                so_far=False,
            )
            columns = {
                "sample": [sample] * len(steps),
                "step": steps,
                "block": [step // 32 for step in steps],
            }
            counts = {
                "masked": steps[::-1],
                "committed": [1] * len(steps),
                "queries": [shape.positions] * len(steps),
            }
            row = {
                "sample": sample,
                "prompt": "simulated",
                "completion": "",
                "rule": "",
            }
            found = {**tables, "tokens": text, "steps": columns | counts, "generations": [row]}
            run.write(sample, {sample: Contents(found, {**facts, "attention": kept})})


def bare_write(folder: Path, arrays: dict[str, np.ndarray], samples: int) -> None:
    """The same bytes through one file a sample, synchronised: what any writer must pay."""
    folder.mkdir()
    for sample in range(samples):
        with open(folder / f"{sample}.bin", "wb") as handle:
            for array in arrays.values():
                array.tofile(handle)
            os.fsync(handle.fileno())


def bare_read(folder: Path, samples: int) -> None:
    for sample in range(samples):
        np.fromfile(folder / f"{sample}.bin", np.uint8)


def timed(what: str, run: Any, taken: dict[str, float]) -> Any:
    began = time.perf_counter()
    result = run()
    taken[what] = time.perf_counter() - began
    print(f"{what}: {taken[what]:.2f} s", flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (
        ("samples", 30),
        ("steps", 128),
        ("layers", 32),
        ("heads", 32),
        ("positions", 256),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument(
        "--folder", type=Path, help="where to write; a temporary folder when left out"
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="two samples of 8 steps, 3 layers and 4 heads, no result",
    )
    shape = parser.parse_args()
    if shape.quick:
        shape.samples, shape.steps, shape.layers, shape.heads, shape.positions = 2, 8, 3, 4, 32
    arrays = attention(shape)
    size = sum(array.nbytes for array in arrays.values()) * shape.samples
    print(f"{size / 1e9:.2f} GB of arrays", flush=True)
    root = Path(tempfile.mkdtemp(dir=shape.folder))
    seconds: dict[str, float] = {}
    try:
        timed(
            "write the bare bytes",
            lambda: bare_write(root / "bare", arrays, shape.samples),
            seconds,
        )
        timed("write the run", lambda: write(root / "run", shape, arrays), seconds)
        timed("read the bare bytes", lambda: bare_read(root / "bare", shape.samples), seconds)
        run = timed("open the run", lambda: open_run(root / "run"), seconds)
        timed("read received of every sample", lambda: _read(run), seconds)
        timed("read the tokens of every sample", lambda: run.table("tokens"), seconds)
        reset_peak()
        processor = sum(os.times()[:4])
        page = timed("write its page", lambda: report(run, root / "report"), seconds)
        processor, peak = sum(os.times()[:4]) - processor, memory_mb()["peak"]
        worker = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e3
        timed("of this, measure every sample", lambda: as_studies(run)[0].measured, seconds)
        print(f"page: {processor:.2f} s of processors, {peak:.0f} MB at most", flush=True)
        result = {
            "what": "a simulated run: one sample a part, float16, synchronised files",
            "shape": {
                key: value for key, value in vars(shape).items() if key not in ("folder", "quick")
            },
            "arrays_gb": round(size / 1e9, 3),
            "seconds": {what: round(taken, 3) for what, taken in seconds.items()},
            "write_over_bare": round(seconds["write the run"] / seconds["write the bare bytes"], 3),
            "page_mb": round(page.stat().st_size / 1e6, 3),
            "processor_seconds_of_the_page": round(processor, 3),
            "peak_mb_while_writing_the_page": round(peak, 1),
            "peak_mb_of_a_worker": round(worker, 1),
        }
    finally:
        shutil.rmtree(root)
    if not shape.quick:
        print(f"written to {write_result('runs', result)}")


def _read(run: Any) -> None:
    for sample in run.samples:
        run.array("attention", "received", sample)


if __name__ == "__main__":
    main()
