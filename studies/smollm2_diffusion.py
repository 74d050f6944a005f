"""A diffusion model made of SmolLM2, and what becomes of its sink: smollm2_diffusion.md has the questions.

    python studies/smollm2_diffusion.py train       every sibling, in the registered order; stop it and repeat it
    python studies/smollm2_diffusion.py measure     what is registered, for every point that was reached
    python studies/smollm2_diffusion.py report      tables and figures from the results, without a model

Folders come from the environment: SINKLAB_STUDY for run folders (runs/smollm2-diffusion when unset), SINKLAB_BASE for
the parent (a Hugging Face folder or the GGUF file), SINKLAB_BOOKS for the public-domain books in .jsonl.gz.
"""

import argparse
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from sinklab.records import open_run
from sinklab.training import TrainSettings, recipe, train

RUNS = Path(os.environ.get("SINKLAB_STUDY", "runs/smollm2-diffusion"))
BASE = os.environ.get("SINKLAB_BASE", "smollm2")
BOOKS = Path(os.environ.get("SINKLAB_BOOKS", "../shared/data/books_pd"))
RESULTS = Path(__file__).with_suffix("")

SIBLINGS: dict[str, dict[str, Any]] = {
    "iii": {"logit_shift": True},
    "i": {"objective": "autoregressive"},
    "iv": {"logit_shift": True, "sink_kind": "token", "sink_count": 1},
    "ii": {"logit_shift": True, "attention": "causal"},
    "v": {"logit_shift": True, "attention": "first_alone"},
}
"""Name in the study to what distinguishes it, in the order of training."""
SEEDS = (0, 1, 2)


def settings_of(sibling: str, seed: int) -> TrainSettings:
    """The registered settings of the first half million tokens."""
    files = ("train-00.jsonl.gz", "train-01.jsonl.gz")
    return recipe(
        "qwen-0.5b",
        init_from=BASE,
        corpus=str(together(files)),
        heldout=str(BOOKS / "valid.jsonl.gz"),
        heldout_rows=64,
        length=256,
        batch=4,
        micro_batch=4,
        steps=500,
        lr=2e-3,
        warmup=0.04,
        train_only="lora",
        lora_rank=32,
        compile=False,
        streaming=False,
        workers=0,
        save_every=100,
        eval_every=100,
        log_every=20,
        monitor_every=0,
        keep=5,
        log_to="none",
        seed=seed,
        out=str(RUNS / f"{sibling}-{seed}"),
        **SIBLINGS[sibling],
    )


def together(names: tuple[str, ...]) -> Path:
    """A folder that holds these files of the books and no others."""
    folder = RUNS / "-".join(name.split(".")[0] for name in names)
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        link = folder / name
        if not link.exists():
            link.symlink_to((BOOKS / name).resolve())
    return folder


def train_all() -> None:
    """Every sibling of every seed that is not complete; an interrupted one goes on from its last checkpoint."""
    for seed in SEEDS:
        for sibling in SIBLINGS:
            settings = settings_of(sibling, seed)
            folder = Path(settings.out)
            begun = (folder / "run.json").is_file()
            if begun and open_run(folder).info.status == "complete":
                continue
            print(f"{folder.name}: {'goes on' if begun else 'begins'}", flush=True)
            train(replace(settings, resume=begun), progress=lambda text: print(text, flush=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("train",))
    parser.parse_args()
    train_all()


if __name__ == "__main__":
    main()
