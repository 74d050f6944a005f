"""Growth of the processor time of watching, a curve, a page and training with length, layers and
samples, measured, fitted and drawn.

    python benchmarks/growth.py [--repeats 3] [--quick]

A random model 128 wide with 4 heads; one size grows while the others stay at the middle of their
values. Fitted: seconds = const · size^exponent by least squares of logarithms; the error is the
standard error of the exponent. From forwards that were timed on an H100 and the number of forwards
of a task follow the times of a model of 8 billion parameters there: they are extrapolated.
"""

import argparse
import json
import math
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from measure import RESULTS, write_result
from transformers import LlamaConfig

from sinklab.core.subject import DiffusionLM, DiffusionLMConfig
from sinklab.lab.checkpoints import Loaded
from sinklab.lab.checkpoints.loading import load
from sinklab.lab.records import open_run
from sinklab.lab.reports import report
from sinklab.lab.studies.curve.study import CurveSettings, masking_curve
from sinklab.lab.studies.trace.study import StudySettings, study

SIZES = {"length": (64, 128, 256), "layers": (2, 4, 8), "samples": (2, 4, 8)}
STEPS = 8
PICTURE = Path(__file__).resolve().parent.parent / "docs" / "growth.png"


def model_of(layers: int) -> Loaded:
    """A random diffusion model with the tokenizer of the package's."""
    loaded = load("tiny")
    config = LlamaConfig(
        vocab_size=loaded.model.config.vocab_size,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=512,
        pad_token_id=0,
        eos_token_id=None,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    mask = loaded.model.config.mask_token_id
    return Loaded(
        DiffusionLM(DiffusionLMConfig(config, mask_token_id=mask)).eval(),
        loaded.tokenizer,
        "random",
        None,
        "diffusion",
    )


def jobs(length: int, layers: int, samples: int, root: Path) -> dict[str, Callable[[], object]]:
    """The four tasks at one size; the page is that of what was watched."""
    loaded = model_of(layers)
    words = loaded.needed_tokenizer()
    text = "It was a dark and stormy night, and the house stood at the end of a road. " * 40
    ids = words(text)["input_ids"][: length - STEPS]
    prompt = words.decode(ids)
    asked = StudySettings(prompts=(prompt,) * samples, new_tokens=STEPS, twin=False)
    read = CurveSettings(
        ks=(1, 5), controls=("sinks",), rows=samples, length=length, batch=samples, twin=False
    )
    ids_BS = torch.randint(3, 256, (samples, length))
    masked_BS = torch.rand(ids_BS.shape) < 0.5
    noisy_BS = ids_BS.masked_fill(masked_BS, loaded.model.config.mask_token_id)
    labels_BS = ids_BS.masked_fill(~masked_BS, -100)
    optimizer = torch.optim.AdamW(loaded.model.parameters(), lr=0.0)

    def watch() -> None:
        shutil.rmtree(root / "watched", ignore_errors=True)
        study(loaded, root / "watched", asked)

    def curve() -> None:
        shutil.rmtree(root / "curve", ignore_errors=True)
        masking_curve(loaded, root / "curve", read)

    def page() -> None:
        report(open_run(root / "watched"), root / "page")

    def train() -> None:
        loaded.model(noisy_BS, labels=labels_BS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return {"watch": watch, "curve": curve, "page": page, "train": train}


def seconds(run: Callable[[], object], repeats: int) -> float:
    """Median processor time."""
    taken = []
    for _ in range(repeats):
        started = time.process_time()
        run()
        taken.append(time.process_time() - started)
    return median(taken)


def fitted(sizes: Any, times: Any) -> dict[str, float]:
    """Exponent of growth and its standard error."""
    x, y = np.log(sizes), np.log(times)
    exponent, start = np.polyfit(x, y, 1)
    left = y - exponent * x - start
    error = math.sqrt((left**2).sum() / (len(x) - 2) / ((x - x.mean()) ** 2).sum())
    return {"exponent": round(float(exponent), 2), "error": round(error, 2)}


def extrapolated() -> dict[str, Any]:
    """Seconds of an 8B model on an H100, low, middle and high, from timed forwards and their
    number.
    """
    known = json.loads((RESULTS / "tracing_cuda_2026-11-23.json").read_text())["time"]["llada"]
    found: dict[str, Any] = {}
    for length in ("1024", "4096"):
        plain_s = known[length]["untraced"]["median_wall_s"]
        ratio = known[length]["ratio"]["study"]
        low, middle, high = (512 * plain_s * ratio[end] for end in ("min", "median", "max"))
        found[f"watch, 4 prompts × 128 steps, S = {length}"] = [low, middle, high]
        # not timed on a GPU: LLaDA-8B's shape took 1.13 with a key blocked on a CPU, and an edit
        # measures no more than a study does
        ways_s = 48 * 7 * plain_s
        low, high = 1.13 * ways_s, ratio["max"] * ways_s
        found[f"curve, 48 rows × 7 ways, S = {length}"] = [low, math.sqrt(low * high), high]
    return {name: [round(one) for one in some] for name, some in found.items()}


def draw(points: dict[str, Any]) -> None:
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, len(SIZES), figsize=(9, 3), sharey=True, layout="constrained")
    for axis, (size, values) in zip(axes, SIZES.items(), strict=True):
        for task, times in points[size].items():
            axis.loglog(values, times["seconds"], marker="o", label=task)
        axis.set_xlabel(size)
        axis.set_xticks(values, [str(value) for value in values])
        axis.minorticks_off()
    axes[0].set_ylabel("seconds of processor")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right upper")
    figure.savefig(PICTURE, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one turn, written down nowhere")
    options = parser.parse_args()
    torch.set_num_threads(1)
    middle = {size: values[1] for size, values in SIZES.items()}
    taken: dict[tuple[int, ...], dict[str, float]] = {}
    points: dict[str, Any] = {}
    for size, values in SIZES.items():
        points[size] = {}
        for value in values:
            at = middle | {size: value}
            key = tuple(at.values())
            if key not in taken:
                with tempfile.TemporaryDirectory() as folder:
                    tasks = jobs(**at, root=Path(folder))
                    if not taken:
                        # what is imported later does not count
                        for run in tasks.values():
                            run()
                    repeats = 1 if options.quick else options.repeats
                    taken[key] = {name: seconds(run, repeats) for name, run in tasks.items()}
            for task, one in taken[key].items():
                points[size].setdefault(task, {"seconds": []})["seconds"].append(round(one, 4))
        for task, times in points[size].items():
            times |= fitted(values, times["seconds"])
            print(size, task, times, flush=True)
    ends = extrapolated()
    print(ends)
    if not options.quick:
        about = {"sizes": SIZES, "middle": middle, "steps": STEPS, "repeats": options.repeats}
        more = {"growth": points, "8B on an H100, extrapolated, s: low, middle, high": ends}
        print(f"written to {write_result('growth', about | more)}")
        draw(points)


if __name__ == "__main__":
    main()
