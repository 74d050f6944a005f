"""Train the pair that ships inside the package: the same data, seed, steps and size, without and with one sink token.

    python studies/embedded_pair.py tokenizer CORPUS
    python studies/embedded_pair.py train plain CORPUS HELDOUT     (and: train sink …; each takes one core)
    python studies/embedded_pair.py pack HELDOUT
    python studies/embedded_pair.py compare HELDOUT             (the packaged pair; writes embedded_pair_heldout.json)

The corpus was 115 public-domain English books (see embedded_pair.md); any folder of text will do. On Linux, setting
MALLOC_MMAP_MAX_=0 and MALLOC_TRIM_THRESHOLD_=100000000000 about doubles the speed on a CPU: without them half the time
goes into mapping and clearing the large logits of every step anew.
"""

import argparse
import json
import shutil
from pathlib import Path

import pandas as pd
import torch

from sinklab.checkpoints import load
from sinklab.data import read_corpus, train_tokenizer
from sinklab.models import DiffusionLM
from sinklab.records import weights_hash
from sinklab.scoring import heldout_rows, row_losses
from sinklab.training import TrainSettings, train

RUNS = Path("runs/pair")
PACKAGED = Path(__file__).parents[1] / "src" / "sinklab" / "checkpoints" / "packaged"
NAMES = {"plain": "tiny", "sink": "tiny-sink"}
VOCAB = 4096


def settings(kind: str, corpus: str, heldout: str) -> TrainSettings:
    """The recipe; the two runs differ in the sink alone."""
    return TrainSettings(
        corpus=corpus,
        heldout=heldout,
        out=str(RUNS / kind),
        tokenizer=str(RUNS / "tokenizer"),
        vocab_size=VOCAB,
        hidden_size=192,
        layers=6,
        heads=6,
        mlp_size=512,
        length=256,
        batch=16,
        steps=6400,
        lr=2e-3,
        causal_start=0.4,
        seed=0,
        sink_kind="token" if kind == "sink" else "none",
        sink_count=1 if kind == "sink" else 0,
        compile=True,
        threads=1,
        log_every=50,
        eval_every=400,
        save_every=400,
        resume=(RUNS / kind / "checkpoints").is_dir(),
    )


def pack(heldout: str) -> None:
    """Put both models into the package as bfloat16, with their training record and their loss on all held-out text."""
    for kind, name in NAMES.items():
        run, target = RUNS / kind, PACKAGED / name
        shutil.rmtree(target, ignore_errors=True)
        model = DiffusionLM.from_pretrained(run / "model", dtype=torch.bfloat16)
        model.config._name_or_path = ""
        model.save_pretrained(target)
        (target / "model.safetensors").chmod(0o644)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(RUNS / "tokenizer" / file, target / file)
        (target / "weights.sha256").write_text(weights_hash(model.state_dict()) + "\n")
        record = target / "training"
        record.mkdir()
        shutil.copy(run / "history.parquet", record / "history.parquet")
        info = json.loads((run / "run.json").read_text())
        # names of folders on the machine that trained say nothing to a reader
        info["settings"] |= {"corpus": "books/train", "heldout": "books/valid", "tokenizer": "tokenizer", "out": kind}
        info["tables"] = ["history", "heldout"]
        (record / "run.json").write_text(json.dumps(info, indent=2, ensure_ascii=False) + "\n")
        scored(str(target), heldout).to_parquet(record / "heldout.parquet", index=False)


def compare(heldout: str) -> None:
    """The paired difference of the two packaged models over all rows of the held-out corpus, under the same noise."""
    losses_R, hashes = {}, {}
    for name in NAMES.values():
        loaded = load(name)
        text = heldout_rows(loaded, heldout, rows=10**9, length=256)
        losses_R[name] = row_losses(loaded, text.ids_RS, seed=0).double()
        hashes[name] = weights_hash(loaded.model.state_dict())
    delta_R = losses_R["tiny-sink"] - losses_R["tiny"]
    result = {
        "rows": delta_R.numel(),
        "tokens": text.ids_RS.numel(),
        "nats_per_token": {name: values_R.mean().item() for name, values_R in losses_R.items()},
        "sink_minus_plain": delta_R.mean().item(),
        "stderr_of_the_paired_difference": (delta_R.std() / delta_R.numel() ** 0.5).item(),
        "seed": 0,
        "weights_sha256": hashes,
        "torch": torch.__version__,
    }
    target = Path(__file__).with_name("embedded_pair_heldout.json")
    target.write_text(json.dumps(result, indent=2) + "\n")
    print(target.read_text())


def scored(name: str, heldout: str) -> pd.DataFrame:
    """Loss of the packed weights on all rows of the held-out corpus, nats per token and bits per byte."""
    loaded = load(name)
    text = heldout_rows(loaded, heldout, rows=10**9, length=256)
    losses_R = row_losses(loaded, text.ids_RS, seed=0)
    bits = losses_R.mean().item() * text.ids_RS.numel() / torch.tensor(2.0).log().item() / text.size
    stderr = (losses_R.std() / losses_R.numel() ** 0.5).item()
    table = pd.DataFrame(
        {
            "parameters": [loaded.model.num_parameters()],
            "loss": [losses_R.mean().item()],
            "stderr": [stderr],
            "bits_per_byte": [bits],
            "tokens": [text.ids_RS.numel()],
            "bytes": [text.size],
        }
    )
    print(name, table.to_string(index=False), sep="\n")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["tokenizer", "train", "pack", "compare"])
    parser.add_argument("rest", nargs="+")
    given = parser.parse_args()
    if given.command == "tokenizer":
        train_tokenizer(read_corpus(given.rest[0]), VOCAB).save_pretrained(RUNS / "tokenizer")
    elif given.command == "train":
        train(settings(*given.rest))
    elif given.command == "pack":
        pack(given.rest[0])
    else:
        compare(given.rest[0])


if __name__ == "__main__":
    main()
