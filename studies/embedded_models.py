"""Train three twins for the package: one causal start, then models that differ in objective and
sink alone.

    python studies/embedded_models.py tokenizer CORPUS
    python studies/embedded_models.py train start CORPUS HELDOUT       then plain, sink and causal,
                                                                       side by side
    python studies/embedded_models.py pack HELDOUT
    python studies/embedded_models.py compare HELDOUT                  the packaged models; writes
                                                                       embedded_models.json

The corpus was 115 public-domain English books (see embedded_models.md); any folder of text will do.
Minutes on one GPU; days on a CPU, where MALLOC_MMAP_MAX_=0 and MALLOC_TRIM_THRESHOLD_=100000000000
about double the speed on Linux.
"""

# R rows, S sequence, P tokens of a prompt, N tokens written
import argparse
import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import sinklab
from sinklab.core.models import DiffusionLM
from sinklab.lab.checkpoints import load
from sinklab.lab.cli.command import checked
from sinklab.lab.cli.models import WRITING
from sinklab.lab.data import begin_rows, read_corpus, row_start, train_tokenizer
from sinklab.lab.records import weights_hash
from sinklab.lab.scoring import heldout_rows, row_losses
from sinklab.lab.training import TrainSettings, train

RUNS = Path(os.environ.get("EMBEDDED_RUNS", "runs/models"))
PACKAGED = Path(sinklab.__file__).parent / "lab" / "checkpoints" / "packaged"
NAMES = {"plain": "tiny", "sink": "tiny-sink", "causal": "tiny-causal"}
VOCAB = 4096
"""Entries before the start token."""
STEPS = {"start": 600, "plain": 4500, "sink": 4500, "causal": 4500}
PROMPTS, PROMPT, WRITTEN = 32, 32, 64
"""Texts, tokens of each prompt and tokens written, for what the text is like."""


def settings(kind: str, corpus: str, heldout: str) -> TrainSettings:
    """The recipe. The start learns at a constant rate; what goes on from it reads the same rows in
    the same order.
    """
    fields: dict[str, Any] = {
        "start": {"objective": "autoregressive", "min_lr": 1.0},
        "plain": {},
        "sink": {"sink_kind": "token", "sink_count": 1},
        "causal": {"objective": "autoregressive"},
    }[kind]
    if kind == "start":
        fields |= {"tokenizer": str(RUNS / "tokenizer"), "seed": 0, "warmup": 0.02}
    else:
        # another seed: other rows come first than at the start
        fields |= {
            "init_from": str(RUNS / "start" / "model"),
            "seed": 1,
            "warmup": 0.02,
            "min_lr": 0.01,
        }
    return TrainSettings(
        corpus=corpus,
        heldout=heldout,
        out=str(RUNS / kind),
        row_start=True,
        hidden_size=192,
        layers=6,
        heads=6,
        mlp_size=768,
        length=256,
        batch=128,
        steps=STEPS[kind],
        optimizer="muon",
        lr=6e-3,
        compile=True,
        head_chunk=16_384,
        log_every=50,
        eval_every=500,
        save_every=1000,
        heldout_rows=256,
        log_to="none",
        resume=(RUNS / kind / "checkpoints").is_dir(),
        **fields,
    )


def record(run: Path, target: Path, tables: tuple[str, ...] = ("history",)) -> None:
    """A run folder without weights: settings, versions and the whole curve."""
    target.mkdir(parents=True, exist_ok=True)
    shutil.copy(run / "history.parquet", target / "history.parquet")
    info = json.loads((run / "run.json").read_text())
    # names of folders on the machine that trained say nothing to a reader
    said = info["settings"]
    said |= {"corpus": "books/train", "heldout": "books/valid", "out": run.name}
    said |= {
        key: name
        for key, name in (("tokenizer", "tokenizer"), ("init_from", "start/model"))
        if said[key]
    }
    if "init_from" in info["model"]:
        info["model"]["init_from"]["name"] = "start/model"
    info["tables"] = list(tables)
    (target / "run.json").write_text(json.dumps(info, indent=2, ensure_ascii=False) + "\n")


def pack(heldout: str) -> None:
    """Put the models into the package as bfloat16, with their training records and their loss on
    all held-out text.
    """
    record(RUNS / "start", PACKAGED / "start")
    for kind, name in NAMES.items():
        run, target = RUNS / kind, PACKAGED / name
        shutil.rmtree(target, ignore_errors=True)
        reader: Any = AutoModelForCausalLM if kind == "causal" else DiffusionLM
        model = reader.from_pretrained(run / "model", dtype=torch.bfloat16)
        model.config._name_or_path = ""
        model.save_pretrained(target)
        (target / "model.safetensors").chmod(0o644)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(run / "model" / file, target / file)
        (target / "weights.sha256").write_text(weights_hash(model.state_dict()) + "\n")
        record(run, target / "training", ("history", "heldout"))
        table = pd.DataFrame([scored(str(target), heldout)[0]])
        table.to_parquet(target / "training" / "heldout.parquet", index=False)


def scored(name: str, heldout: str) -> tuple[dict[str, Any], Tensor]:
    """Loss of packed weights on all rows of the held-out corpus in nats per token and bits per
    byte, and that of rows.

    The bound of a diffusion model, the exact value of the causal one. Start tokens are given and do
    not count.
    """
    loaded = load(name)
    text = heldout_rows(loaded, heldout, rows=10**9, length=256)
    losses_R = row_losses(loaded, text.ids_RS, seed=0).double()
    tokens = text.ids_RS.numel() - text.ids_RS.shape[0] * len(row_start(loaded.needed_tokenizer()))
    facts = {
        "parameters": loaded.model.num_parameters(),
        "loss": losses_R.mean().item(),
        "stderr": (losses_R.std() / losses_R.numel() ** 0.5).item(),
        "bits_per_byte": losses_R.mean().item() * tokens / math.log(2) / text.size,
        "tokens": tokens,
        "bytes": text.size,
    }
    print(name, facts, flush=True)
    return facts, losses_R


def likelihood(judge: Any, ids_RS: Tensor) -> float:
    """The causal model's nats per token of what follows the prompts."""
    with torch.no_grad():
        logits_RSV = judge.model(ids_RS, use_cache=False).logits[:, PROMPT - 1 : -1].float()
    return torch.nn.functional.cross_entropy(
        logits_RSV.flatten(0, 1), ids_RS[:, PROMPT:].flatten()
    ).item()


def distinct(ids_RN: Tensor) -> dict[str, float]:
    """Share of distinct tokens: within a text on average, and over all texts together."""
    within = [len(set(row)) / len(row) for row in ids_RN.tolist()]
    return {"within": sum(within) / len(within), "pooled": ids_RN.unique().numel() / ids_RN.numel()}


def texts(heldout: str) -> tuple[dict[str, Any], dict[str, list[str]]]:
    """What the diffusion models write after the first tokens of evenly spaced held-out rows, beside
    what is there.
    """
    judge = load(str(PACKAGED / "tiny-causal"))
    rows_RS = heldout_rows(judge, heldout, rows=10**9, length=256).ids_RS
    chosen_RS = rows_RS[:: len(rows_RS) // PROMPTS][:PROMPTS, : PROMPT + WRITTEN]
    found = {
        "held-out text": distinct(chosen_RS[:, PROMPT:]) | {"nats": likelihood(judge, chosen_RS)}
    }
    written: dict[str, list[str]] = {}
    for name in ("tiny", "tiny-sink"):
        loaded = load(str(PACKAGED / name))
        model: Any = loaded.model
        ids_RS = model.generate(
            chosen_RS[:, :PROMPT], max_new_tokens=WRITTEN, settings=checked(WRITING)
        ).cpu()
        found[name] = distinct(ids_RS[:, PROMPT:]) | {"nats": likelihood(judge, ids_RS)}
        decode = loaded.needed_tokenizer().decode
        written[name] = [
            f"{decode(row[1:PROMPT])} ▸ {decode(row[PROMPT:])}" for row in ids_RS.tolist()
        ]
    return found, written


def compare(heldout: str) -> None:
    """The packaged models on all five held-out books, and what they write."""
    found = {name: scored(str(PACKAGED / name), heldout) for name in NAMES.values()}
    delta_R = found["tiny-sink"][1] - found["tiny"][1]
    figures, written = texts(heldout)
    result = {
        "heldout": {name: facts for name, (facts, _) in found.items()},
        "sink_minus_plain": delta_R.mean().item(),
        "stderr_of_the_paired_difference": (delta_R.std() / delta_R.numel() ** 0.5).item(),
        "seed": 0,
        "text": figures,
        "weights_sha256": {
            name: weights_hash(load(str(PACKAGED / name)).model.state_dict())
            for name in NAMES.values()
        },
        "torch": torch.__version__,
    }
    target = Path(__file__).with_suffix(".json")
    target.write_text(json.dumps(result, indent=2) + "\n")
    print(target.read_text())
    samples = "\n".join(
        f"{number}. {text!r}" for number, text in enumerate(written["tiny"][:10], 1)
    )
    print("the first ten texts of tiny:", samples, sep="\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=["tokenizer", "train", "pack", "compare"])
    parser.add_argument("rest", nargs="+")
    given = parser.parse_args()
    if given.command == "tokenizer":
        tokenizer = train_tokenizer(read_corpus(given.rest[0]), VOCAB)
        begin_rows(tokenizer)
        tokenizer.save_pretrained(RUNS / "tokenizer")
    elif given.command == "train":
        train(settings(*given.rest), progress=lambda text: print(text, flush=True))
    elif given.command == "pack":
        pack(given.rest[0])
    else:
        compare(given.rest[0])


if __name__ == "__main__":
    main()
