"""Questions 10 to 12 of what_sinks_do.md: a screen of heads, sinks removed by degree, and states
amplified.

    python studies/screen_and_degree.py measure          what is missing, four texts at a time; stop
                                                         it and repeat it
    python studies/screen_and_degree.py measure heads smollm2 --texts 4

SINKLAB_BOOKS names the folder of public-domain books that the real models read.
"""

# T texts, S positions, L layers, H heads, K keys
import argparse
import itertools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import smollm2_measures as measures
import torch
from torch import Tensor

from sinklab import BlockKeys, intervene, load, trace
from sinklab.core.instrument import TopKeys
from sinklab.lab.measures.amplify import Amplify
from sinklab.lab.measures.partial import Weaken
from sinklab.lab.measures.protocols import in_place_of
from sinklab.lab.measures.screen import screen
from sinklab.lab.scoring.arms import arm_losses, heldout_rows
from sinklab.lab.studies import heldout_text

RESULTS = Path(__file__).with_suffix("")
BOOKS = Path(os.environ.get("SINKLAB_BOOKS", "../shared/data/books_pd"))
REAL = ("smollm2-diffusion", "smollm2")
MODELS = ("tiny", "tiny-sink", "tiny-causal", *REAL)
TEXTS, TOGETHER, LENGTH = 16, 4, 64
BETAS = (0.0, 0.25, 0.5, 0.75)
ARMS = ("sinks", "random", "matched", "equal_mass")
PLACE, RATIO = 30, 0.15
"""Position whose states are amplified, behind the first layer, and the share of masked tokens."""
SCALES, MEANS = (3.0, 10.0, 30.0), ("channels", "positions", "none")
FIRST = 10
"""Heads that a screen is asked for."""


def texts_of(name: str, loaded: Any) -> Tensor:
    """The texts, ids (T, S): of the books, spread over them, or of the packaged excerpt."""
    if name not in REAL:
        return heldout_rows(loaded, heldout_text(None), rows=TEXTS, length=LENGTH).ids_RS
    rows = measures.book_rows(loaded.needed_tokenizer(), BOOKS / "valid.jsonl.gz", LENGTH, 8)
    books = rows.view(-1, 8, LENGTH).transpose(0, 1)
    return books.reshape(-1, LENGTH)[:TEXTS]


def heads(loaded: Any, ids_TS: Tensor, first: int) -> pd.DataFrame:
    """Question 10: the real cost of each head's strongest key, and the screen's, a line a text and
    head; held, the attention of that key.
    """
    layers, each = loaded.backbone.num_hidden_layers, loaded.backbone.num_attention_heads
    places = [*itertools.product(range(layers), range(each))]
    arms: dict[Any, Any] = {None: []}
    for layer, head in places:
        arms[layer, head] = [BlockKeys(TopKeys(1), layers=(layer,), heads=(head,))]
    begun = time.process_time()
    screened_TN = screen(loaded, ids_TS.tolist(), first=first).flatten(1)
    middle = time.process_time()
    found = [*arm_losses(loaded, arms, ids_TS.tolist(), first=first)]
    seconds = {"screen": middle - begun, "blocked": time.process_time() - middle}
    print("  " + ", ".join(f"{name} {value:.1f} s" for name, value in seconds.items()), flush=True)
    lines = []
    for text, screened_N in enumerate(screened_TN):
        clean, *blocked = found[text * len(arms) : (text + 1) * len(arms)]
        for (layer, head), one, cost in zip(places, blocked, screened_N.tolist(), strict=True):
            line = {"layer": layer, "head": head, "real": one.loss - clean.loss, "screen": cost}
            lines.append({"text": first + text, **line, "held": one.about["held"]})
    return pd.DataFrame(lines).assign(**{f"{name}_s": value for name, value in seconds.items()})


def degree(loaded: Any, ids_TS: Tensor, first: int) -> pd.DataFrame:
    """Question 11: loss and dose as each head's strongest key keeps a part of its weight."""
    arms: dict[Any, Any] = {("none", 1.0): []}
    for name, beta in itertools.product(ARMS, BETAS):
        keys = in_place_of(TopKeys(1), name)
        arms[name, beta] = [BlockKeys(keys, how=Weaken(beta=beta))]
    lines = [
        {"text": one.text, "arm": one.arm[0], "beta": one.arm[1], "loss": one.loss, **one.about}
        for one in arm_losses(loaded, arms, ids_TS.tolist(), first=first)
    ]
    return pd.DataFrame(lines)[["text", "arm", "beta", "loss", "held", "removed", "matched"]]


@torch.inference_mode()
def amplify(loaded: Any, ids_TS: Tensor, first: int) -> pd.DataFrame:
    """Question 12: the mean weight of a position in the layers above the one whose output is
    amplified there, and the share of their heads in which it is strong.
    """
    if loaded.is_diffusion:
        mask_id = loaded.model.config.mask_token_id
        before_TS = ids_TS.new_zeros(first, ids_TS.shape[1])
        ids_TS = measures.masked_at(torch.cat([before_TS, ids_TS]), RATIO, mask_id)[first:]
    lines = []
    for scale, mean in [(1.0, "none"), *itertools.product(SCALES, MEANS)]:
        edit = Amplify(positions=(PLACE,), scale=scale, mean=mean, layers=(0,))
        with intervene(loaded.model, edit), trace(loaded.model) as recording:
            loaded.model(ids_TS, logits_to_keep=torch.zeros(0, dtype=torch.int64))
        weight_TLHK = recording.received[0] / recording.visible[0].float()[:, None, None]
        own_TLH = weight_TLHK[:, 1:, :, loaded.added_sinks + PLACE]
        for text, own_LH in enumerate(own_TLH):
            strong = float((own_LH > measures.STRONG).float().mean())
            line = {"text": first + text, "scale": scale, "mean": mean}
            lines.append({**line, "weight": float(own_LH.mean()), "strong": strong})
    return pd.DataFrame(lines)


QUESTIONS: dict[str, Callable[[Any, Tensor, int], pd.DataFrame]] = {
    "amplify": amplify,
    "degree": degree,
    "heads": heads,
}


def measure(questions: list[str], models: list[str], texts: int) -> None:
    """What is missing: every model reads four texts more before any reads another four."""
    for first, name in itertools.product(range(0, texts, TOGETHER), models or MODELS):
        loaded = None
        for question in questions or QUESTIONS:
            file = RESULTS / f"{question}-{name}.csv"
            there = pd.read_csv(file) if file.is_file() else pd.DataFrame({"text": []})
            if first in {*there["text"]}:
                continue
            loaded = loaded or load(name)
            ids_TS = texts_of(name, loaded)[first : first + TOGETHER]
            print(f"{question} of {name}, texts from {first}", flush=True)
            found = QUESTIONS[question](loaded, ids_TS, first)
            RESULTS.mkdir(exist_ok=True)
            every = pd.concat([there, found]).astype({"text": int})
            every.to_csv(file, index=False, float_format="%.5g")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=("measure",))
    parser.add_argument("names", nargs="*", help="questions and models; all when left out")
    parser.add_argument("--texts", type=int, default=TEXTS, help="at most so many texts")
    given = parser.parse_args()
    questions = [name for name in given.names if name in QUESTIONS]
    measure(questions, [name for name in given.names if name in MODELS], given.texts)


if __name__ == "__main__":
    main()
