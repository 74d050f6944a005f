"""The sink-token paper at laptop scale: one causal model a seed becomes a diffusion model in seven
variants.

    python studies/sink_variants.py base SEED CORPUS HELDOUT           an autoregressive model; the
                                                                       twin of Qwen2.5
    python studies/sink_variants.py train VARIANT SEED CORPUS HELDOUT  one variant, from that model
    python studies/sink_variants.py retrofit KIND SEED CORPUS HELDOUT  a sink (token or kv) for \\
        the frozen plain model
    python studies/sink_variants.py score HELDOUT                      every finished run: losses, a
                                                                       traced study

Each of the first three goes on where it was stopped.

Everything is kept under runs/variants (or $SINKLAB_STUDY). What made the tables and figures of
sink_variants.md of it was removed after commit d6d5ce19 (sink_variants_tables.py).
"""

import argparse
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sinklab.lab.checkpoints import load
from sinklab.lab.records import open_run
from sinklab.lab.scoring import arm_losses, heldout_rows
from sinklab.lab.studies.trace.study import StudySettings, study
from sinklab.lab.training import TrainSettings, recipe, train

RUNS = Path(os.environ.get("SINKLAB_STUDY", "runs/variants"))
TOKENIZER = (
    Path(__file__).parents[1] / "src" / "sinklab" / "lab" / "checkpoints" / "packaged" / "tiny"
)
RETROFITS = {"token": "sink", "kv": "kv"}
SIZES = {"hidden_size": 128, "layers": 6, "heads": 4, "mlp_size": 352, "length": 256, "batch": 16}
HOW = {
    "compile": True,
    "log_every": 20,
    "save_every": 200,
}
BASE_STEPS, STEPS, RETROFIT_STEPS = 1500, 800, 200


def base(seed: int, corpus: str, heldout: str) -> TrainSettings:
    """The causal model that all variants of a seed start from: 6.1M tokens."""
    return recipe(
        "laptop-causal",
        backbone="llama",
        kv_heads=None,
        corpus=corpus,
        heldout=heldout,
        tokenizer=str(TOKENIZER),
        steps=BASE_STEPS,
        seed=seed,
        out=str(RUNS / f"causal-{seed}"),
        **SIZES,
        **{**HOW, "save_every": 500},
    )


def variant(name: str, seed: int, corpus: str, heldout: str) -> TrainSettings:
    """3.3M more tokens as a diffusion model; variants of a seed differ in the variant alone."""
    return recipe(
        "laptop-from-causal",
        name,
        init_from=str(RUNS / f"causal-{seed}" / "model"),
        steps=STEPS,
        lr=2e-3,
        **_kept(f"{name}-{seed}", seed, corpus, heldout),
    )


def retrofit(kind: str, seed: int, corpus: str, heldout: str) -> TrainSettings:
    """A sink for the plain model of this seed, whose weights stay as they are."""
    return recipe(
        "laptop-retrofit",
        RETROFITS[kind],
        init_from=str(RUNS / f"plain-{seed}" / "model"),
        steps=RETROFIT_STEPS,
        **_kept(f"retrofit-{kind}-{seed}", seed, corpus, heldout),
    )


def _kept(name: str, seed: int, corpus: str, heldout: str) -> dict[str, Any]:
    """What all runs that start from a model have in common."""
    rows = {"length": SIZES["length"], "batch": SIZES["batch"], "monitor_every": 50}
    return {
        "corpus": corpus,
        "heldout": heldout,
        "seed": seed,
        "out": str(RUNS / name),
        **rows,
        **HOW,
    }


def run(settings: TrainSettings) -> None:
    """Train, or go on where it was stopped."""
    torch.set_num_threads(1)
    train(settings, progress=lambda text: print(text, flush=True))


def score(heldout: str) -> None:
    """Per-row losses on all held-out books and a traced study, for every finished run that has none
    yet.
    """
    torch.set_num_threads(1)
    for folder in sorted(path.parent for path in RUNS.glob("*/run.json")):
        info = open_run(folder).info
        if info.kind != "training" or info.status != "complete":
            continue
        loaded = load(folder / "model")
        if loaded.family != "diffusion":
            continue
        if not (folder / "losses.npy").exists():
            text = heldout_rows(loaded, heldout, rows=10**9, length=SIZES["length"])
            scored = arm_losses(loaded, {"none": []}, text.ids_RS.tolist())
            losses_R = np.array([one.loss for one in scored])
            np.save(folder / "losses.npy", losses_R)
            print(folder.name, f"{losses_R.mean():.4f} nats per token", flush=True)
        if not (RUNS / "traced" / folder.name / "run.json").exists():
            settings = StudySettings(statistics=("received", "value_norm"))
            study(loaded, RUNS / "traced" / folder.name, settings)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=["base", "train", "retrofit", "score"])
    parser.add_argument("rest", nargs="*")
    given = parser.parse_args()
    if given.command == "base":
        seed, *text = given.rest
        run(base(int(seed), *text))
    elif given.command in ("train", "retrofit"):
        name, seed, *text = given.rest
        run((variant if given.command == "train" else retrofit)(name, int(seed), *text))
    else:
        score(given.rest[0])


if __name__ == "__main__":
    main()
