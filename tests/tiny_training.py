"""Training runs of seconds: a little text, a tiny model, and settings that the tests vary."""

import json

from sinklab.lab.training import TrainSettings
from tiny_diffusion import TEXT, tiny_tokenizer


def repeated_text(folder):
    """A corpus that repeats itself, so that a little training shows."""
    corpus = folder / "text.txt"
    corpus.write_text(TEXT * 60)
    return corpus


def uneven_documents(folder):
    """Documents of unequal length: a stream that lost its place would show."""
    corpus = folder / "text.jsonl"
    corpus.write_text(
        "\n".join(
            json.dumps({"text": f"{number} " + TEXT[: 20 + number % 70]}) for number in range(120)
        )
    )
    return corpus


def tiny_settings(corpus, **changes):
    """Settings of a run on this corpus, with a tokenizer beside it."""
    tokenizer = corpus.parent / "tokenizer"
    tiny_tokenizer().save_pretrained(tokenizer)
    fields = {
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
        "out": "run",
    }
    return TrainSettings(**(fields | changes))
