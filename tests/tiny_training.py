"""Training runs of seconds: a little text, a tiny model, and settings that the tests vary."""

import json
from pathlib import Path
from typing import Any

from sinklab.lab.training import TrainSettings
from tiny_diffusion import TEXT, tiny_tokenizer


def repeated_text(folder: Path) -> Path:
    """A corpus that repeats itself, so that a little training shows."""
    corpus = folder / "text.txt"
    corpus.write_text(TEXT * 60)
    return corpus


def uneven_documents(folder: Path) -> Path:
    """Documents of unequal length: a stream that lost its place would show."""
    corpus = folder / "text.jsonl"
    corpus.write_text(
        "\n".join(
            json.dumps({"text": f"{number} " + TEXT[: 20 + number % 70]}) for number in range(120)
        )
    )
    return corpus


def tiny_settings(corpus: Path, **changes: Any) -> TrainSettings:
    """Settings of a run on this corpus, with a tokenizer beside it."""
    tokenizer = corpus.parent / "tokenizer"
    tiny_tokenizer().save_pretrained(tokenizer)
    fields: dict[str, Any] = {
        "corpus": str(corpus),
        "tokenizer": str(tokenizer),
        "hidden_size": 32,
        "layers": 2,
        "heads": 2,
        "mlp_size": 48,
        "length": 16,
        "batch": 4,
        "lr": 1e-2,
        "bf16": False,
        "log_every": 1,
        "log_to": "none",
    }
    return TrainSettings(**(fields | changes))
