"""Cost of workers: a trace by a loop and by workers on the same cores, and how many workers one
process can write for.

    python benchmarks/scale.py [--samples 8] [--gpu-seconds 1.1] [--quick]

A random model of LLaDA-8B's layers and heads, but narrow, so that what is recorded has the size of
LLaDA's and is computed fast; 64 steps of 128 positions. `seconds_a_sample`: from runs of n and of
2n samples, so that starting does not count; `start` is the rest. One thread a process: two workers
on two idle cores should take half of the loop. `bytes_a_sample` pass through the process that
writes, which takes `writer_seconds_a_sample` of its processor for each. A GPU takes `--gpu-seconds`
a sample (64 traced steps; benchmarks/tracing.py measures a step), so that one writer keeps
`workers_of_one_writer` of them busy: beyond that, divide by --shard first.
"""

import argparse
import pickle
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measure import write_result
from transformers import LlamaConfig

from sinklab.core.subject import DiffusionLM, DiffusionLMConfig
from sinklab.lab.checkpoints.loading import load
from sinklab.lab.studies.base import begin_worker
from sinklab.lab.studies.trace.study import StudySettings, study

LAYERS = HEADS = 32
STEPS = 64


def save_model(folder: Path, layers: int) -> None:
    """A random diffusion model with the tokenizer of the package's."""
    tiny = load("tiny")
    config = LlamaConfig(
        vocab_size=tiny.config.vocab_size,
        hidden_size=8 * HEADS,
        intermediate_size=256,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        max_position_embeddings=512,
        pad_token_id=0,
        eos_token_id=None,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    made = DiffusionLMConfig(config, mask_token_id=tiny.config.mask_token_id)
    DiffusionLM(made).save_pretrained(folder)
    tiny.needed_tokenizer().save_pretrained(folder)


def asked(samples: int, steps: int) -> StudySettings:
    """Prompts of 64 tokens."""
    tokenizer = load("tiny").needed_tokenizer()
    text = "It was a dark and stormy night, and the house stood at the end of a road. " * 20
    prompt = tokenizer.decode(tokenizer(text)["input_ids"][:64])
    return StudySettings(
        prompts=tuple(f"{number} {prompt}" for number in range(samples)),
        new_tokens=steps,
        block_length=32,
        twin=False,
    )


def timed(folder: Path, settings: StudySettings, root: Path, workers: int) -> dict[str, float]:
    """Seconds of a run, and those of this process's processor."""
    began, own = time.perf_counter(), time.process_time()
    out = tempfile.mkdtemp(dir=root)
    study(partial(load, folder), Path(out) / "run", settings, workers=workers)
    return {"wall": time.perf_counter() - began, "own": time.process_time() - own}


def main() -> None:
    """Measure, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--gpu-seconds", type=float, default=1.1)
    parser.add_argument("--quick", action="store_true", help="tiny sizes; nothing is written")
    given = parser.parse_args()
    samples, layers, steps = given.samples, LAYERS, STEPS
    if given.quick:
        samples, layers, steps = 4, 2, 8
    torch.set_num_threads(1)
    found: dict[str, Any] = {"samples": samples, "steps": steps, "layers": layers}
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        save_model(root / "model", layers)
        few, many = asked(samples, steps), asked(2 * samples, steps)
        for workers in (0, 1, 2):
            first, second = (timed(root / "model", one, root, workers) for one in (few, many))
            rate = {part: (second[part] - first[part]) / samples for part in first}
            found[["loop", "1 worker", "2 workers"][workers]] = {
                "seconds_a_sample": rate["wall"],
                "start": first["wall"] - samples * rate["wall"],
                "writer_seconds_a_sample": rate["own"],
            }
        _, make = begin_worker(study, partial(load, root / "model"), few)
        portion = range(study.together)
        found["bytes_a_sample"] = len(pickle.dumps(make(portion))) / len(portion)
    writer = found["2 workers"]["writer_seconds_a_sample"]
    found["workers_of_one_writer"] = given.gpu_seconds / writer
    found["gpu_seconds_a_sample"] = given.gpu_seconds
    print(found)
    if not given.quick:
        write_result("scale", found)


if __name__ == "__main__":
    main()
