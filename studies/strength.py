"""How strong a model's sinks are, by the protocol of Gu et al. (arXiv 2410.10781).

    python studies/strength.py MODEL              summary.csv, classes.csv, strength.png
    python studies/strength.py MODEL --texts books.jsonl.gz
    python studies/strength.py MODEL --smallest   the same in seconds, with few sequences

100 sequences of 64 tokens each of natural text, of random tokens and of one repeated token, with
and without the model's start token; of diffusion models at several shares of masked tokens. A
token's weight is the mean over the queries that may see it. It is read in two ways: weights
averaged over the sequences first, as published, and each sequence by itself, with an interval.
Results go into runs/strength/MODEL, or --out.
"""

# R sequences, B of them in a forward, T tokens, L layers, H query heads, K keys (added sinks first,
# then tokens)
import argparse
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from torch import Tensor

import sinklab
from sinklab.lab.analysis import mean_over, token_classes
from sinklab.lab.checkpoints import UNTRAINED, special_roles, token_text
from sinklab.lab.data import corpus_documents
from sinklab.lab.studies import heldout_text

KIND = ["input", "start", "ratio"]
"""Columns that name a kind of sequence: its text, whether the start token stands in front, and the
share of tokens that are masked.
"""
INPUTS = ("natural", "random", "repeat")
GREATEST = "massive_activations:top=1"
ADDED = -1
"""Token id of an added sink, which is no token."""
PUBLISHED = {
    "LLaMA3-8B": (99.02, 91.23, 0.0),
    "LLaMA2-7B": (92.47, 90.13, 0.0),
    "Mistral-7B": (97.49, 75.21, 0.0),
    "GPT2-XL": (77.0, 70.29, 62.28),
}
"""Heads whose first token is strong, in per cent, of natural, random and repeated tokens: Gu et
al., Table 1 (64 tokens, 100 sequences, weights averaged first).
"""


@dataclass(frozen=True)
class Settings:
    """The sequences that a model reads, and the weight from which on a token counts as a sink."""

    texts: str | None = None
    inputs: Sequence[str] = INPUTS
    starts: Sequence[str] = ("raw", "start")
    ratios: Sequence[float] = (0.0, 0.15, 0.5, 0.9)
    epsilon: float = 0.3
    rows: int = 100
    length: int = 64
    batch: int = 25
    seed: int = 0


def generator(seed: int, place: int) -> torch.Generator:
    """Random numbers for one place of a run, which do not depend on those drawn elsewhere."""
    return torch.Generator().manual_seed((seed * 0x9E3779B97F4A7C15 + place + 1) & (2**63 - 1))


def sequences(lm: Any, settings: Settings, name: str) -> Tensor:
    """Sequences of an input, ids (R, T): consecutive rows of natural text, none of which reaches
    over the end of a document; tokens drawn from all that stand for text; or one such token each.
    """
    rows, length = settings.rows, settings.length
    if name == "natural":
        found: list[list[int]] = []
        for text in corpus_documents(heldout_text(settings.texts)):
            how = {"add_special_tokens": False, "split_special_tokens": True, "verbose": False}
            ids = lm.tokenizer(text, **how)["input_ids"]
            found += [ids[at : at + length] for at in range(0, len(ids) - length + 1, length)]
            if len(found) >= rows:
                break
        if not found:
            raise ValueError(f"{settings.texts} has no document of {length} tokens")
        return torch.tensor(found[:rows])
    known = set(lm.tokenizer.get_vocab().values()) - set(special_roles(lm))
    ids_V = torch.tensor(sorted(one for one in known if one < lm.config.vocab_size))
    drawn = length if name == "random" else 1
    draws = generator(settings.seed, INPUTS.index(name))
    return ids_V[torch.randint(len(ids_V), (rows, drawn), generator=draws)].expand(rows, length)


def kinds(lm: Any, settings: Settings) -> Iterator[tuple[tuple[str, bool, float], Tensor]]:
    """Every kind of sequence with its ids (R, T)."""
    ratios = settings.ratios if lm.is_diffusion else [0.0]
    starts = [one for one in settings.starts if one == "raw" or lm.special.bos is not None]
    for name, start in itertools.product(settings.inputs, starts):
        ids_RT = sequences(lm, settings, name)
        first = int(start == "start")
        if first:
            front_R1 = torch.full((len(ids_RT), 1), lm.special.bos)
            ids_RT = torch.cat([front_R1, ids_RT[:, :-1]], dim=1)
        # one order for all shares: a larger one masks all that a smaller one masks
        shape = (len(ids_RT), ids_RT.shape[1] - first)
        draws_RT = torch.rand(shape, generator=generator(settings.seed, len(INPUTS)))
        order_RT = draws_RT.argsort(dim=1) + first
        for ratio in ratios:
            masked_RM = order_RT[:, : round(ratio * shape[1])]
            mask_id = lm.config.mask_token_id if ratio else 0
            yield (name, bool(first), ratio), ids_RT.scatter(1, masked_RM, mask_id)


@torch.inference_mode()
def measured(lm: Any, ids_RT: Tensor, batch: int) -> tuple[pd.DataFrame, pd.Series]:
    """A line per sequence, layer and head: first, the mean weight that the first token gets from
    the queries that may see it; strongest, the greatest share of all attention that one key gets;
    at, its position (below 0 for an added sink), and token_id. And per sequence the greatest
    magnitude in the hidden states after any layer, as a ratio to the median of that layer.
    """
    parts, ratios = [], []
    for ids_BT in ids_RT.split(batch):
        with sinklab.trace(lm.model, ("received", GREATEST)) as recording:
            if lm.is_diffusion:
                # few logits are computed: they are of no interest
                wanted_BT = torch.zeros_like(ids_BT, dtype=torch.bool)
                wanted_BT[:, -1] = True
                lm.model.denoiser()(ids_BT, wanted_BT)
            else:
                lm.model(ids_BT, use_cache=False, logits_to_keep=1)
        received_BLHK = recording.received[0].float().numpy()
        visible_BLK = recording.visible_by_layer[0].float().numpy()
        ratios.append(recording.values(GREATEST)[0][:, :, 0, -1].float().nan_to_num(0.0).amax(1))
        added = received_BLHK.shape[-1] - ids_BT.shape[1]
        at_BLH = np.nan_to_num(received_BLHK).argmax(-1)
        named_BK = np.pad(ids_BT.numpy(), ((0, 0), (added, 0)), constant_values=ADDED)
        row, layer, head = np.indices(at_BLH.shape).reshape(3, -1)
        columns = {
            "row": row + sum(map(len, ratios[:-1])),
            "layer": layer,
            "head": head,
            "first": (received_BLHK[..., added] / visible_BLK[:, :, None, added]).ravel(),
            # every query gives 1 in all
            "strongest": np.nanmax(received_BLHK, -1).ravel() / ids_BT.shape[1],
            "at": at_BLH.ravel() - added,
            "token_id": named_BK[row, at_BLH.ravel()],
        }
        parts.append(pd.DataFrame(columns))
    return pd.concat(parts, ignore_index=True), pd.Series(torch.cat(ratios).numpy())


def summary(table: pd.DataFrame, activations: pd.Series, epsilon: float) -> dict[str, Any]:
    """All shares between 0 and 1.

    sink: share of heads that give the first token more than epsilon in the mean over sequences,
    Sink₁^ε of Gu et al.; sink_by_text: the same of each sequence by itself, the mean with its 95 %
    interval; strong: share of heads with more than epsilon on their strongest key, by sequence;
    strongest: its mean share; at_first: share of the strong ones on the first token; activation:
    median of the greatest activation's ratio.
    """
    is_strong = table["strongest"] > epsilon
    line: dict[str, Any] = {
        "sink": (table.groupby(["layer", "head"])["first"].mean() > epsilon).mean(),
        "first": table["first"].mean(),
        "strongest": table["strongest"].mean(),
        "at_first": (table["at"][is_strong] == 0).mean(),
        "activation": activations.median(),
        "rows": len(activations),
    }
    for name, flags in (("sink_by_text", table["first"] > epsilon), ("strong", is_strong)):
        over = mean_over(flags.groupby(table["row"]).mean())
        low, high = np.clip(over.interval, 0, 1)
        line |= {name: over.value, f"{name}_low": low, f"{name}_high": high}
    return line


def classes(lm: Any, table: pd.DataFrame, epsilon: float) -> pd.DataFrame:
    """The tokens on which strong keys stand: text, class, and share of them."""
    counts = table["token_id"][table["strongest"] > epsilon].value_counts()
    roles = special_roles(lm) | {ADDED: "sink"}
    texts = ["added" if one == ADDED else token_text(lm.tokenizer, one) for one in counts.index]
    kinds_N: Any = (
        token_classes(texts, [roles.get(one, "") for one in counts.index]) if texts else []
    )
    return pd.DataFrame({"token": texts, "class": kinds_N, "share": counts / counts.sum()})


def drawn(table: pd.DataFrame) -> Figure:
    """Layer × head: the weight of the first token, and of the strongest key, in per cent."""
    figure = Figure((7, 3.2), layout="constrained")
    means = table.groupby(["layer", "head"])[["first", "strongest"]].mean()
    for axes, name in zip(figure.subplots(1, 2), means, strict=True):
        image = axes.imshow(100 * means[name].unstack(), vmin=0, vmax=100, aspect="auto")
        axes.set(xlabel="head", ylabel="layer", title=f"{name}, %")
    figure.colorbar(image)
    return figure


def strength(lm: Any, settings: Settings, out: Path) -> pd.DataFrame:
    """Write everything of one model, and return the summary: a line per kind of sequence, and one
    per control (both untrained) for natural text without start token and masks.
    """
    lines, named = [], []
    plain = replace(settings, inputs=("natural",), starts=("raw",), ratios=(0.0,))
    runs = [("", lm, settings)] + [(name, make(lm, 0), plain) for name, make in UNTRAINED.items()]
    for control, one, what in runs:
        for kind, ids_RT in kinds(one, what):
            table, activations = measured(one, ids_RT, what.batch)
            about = dict(zip(KIND, kind, strict=True)) | {"control": control}
            lines.append(about | summary(table, activations, what.epsilon))
            if not control:
                named.append(classes(one, table, what.epsilon).assign(**about))
            if len(lines) == 1:
                drawn(table).savefig(out / "strength.png", dpi=150)
    found = pd.DataFrame(lines)
    found.to_csv(out / "summary.csv", index=False)
    pd.concat(named).to_csv(out / "classes.csv", index=False)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--texts", help="corpus of natural text; else the excerpt in the package")
    parser.add_argument("--inputs", nargs="+", choices=INPUTS)
    parser.add_argument("--starts", nargs="+", choices=("raw", "start"))
    parser.add_argument("--ratios", nargs="+", type=float, help="masked, of a diffusion model")
    parser.add_argument("--smallest", action="store_true")
    parser.add_argument("--out", type=Path)
    options = vars(parser.parse_args())
    name, out = options.pop("model"), options.pop("out")
    out = out or Path("runs/strength", Path(name).name)
    out.mkdir(parents=True, exist_ok=True)
    smallest: dict[str, Any] = {"rows": 8, "length": 16} if options.pop("smallest") else {}
    given = {key: value for key, value in options.items() if value is not None}
    found = strength(sinklab.load(name), Settings(**given, **smallest), out)
    print((100 * found.set_index([*KIND, "control"])[["sink", "sink_by_text", "strong"]]).round(1))
    print("as published, natural, random, repeat:", PUBLISHED)


if __name__ == "__main__":
    main()
