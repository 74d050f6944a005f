"""Sequences of each kind through a traced model: the weight of the first token in every head, and
its strongest key.
"""

# R sequences, B of them in a forward, T tokens, L layers, H query heads, K keys (added sinks first,
# then tokens)
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from sinklab.core.probing import trace
from sinklab.lab.analysis import mean_over, token_classes
from sinklab.lab.checkpoints import Loaded, special_roles, token_text
from sinklab.lab.data import corpus_documents
from sinklab.lab.data.rows import encode_texts, place_generator
from sinklab.lab.studies import Arm, Block, Progress, Rows, Trial, check_fits, heldout_text
from sinklab.lab.studies.strength.study import INPUTS, StrengthSettings

KIND = ["input", "start", "ratio"]
"""Columns that name a kind of sequence."""
GREATEST = "massive_activations:top=1"
ADDED = -1
"""Token id of an added sink, which is no token."""


def read_samples(
    loaded: Loaded, settings: StrengthSettings, progress: Progress
) -> dict[Arm, Tensor]:
    """The sequences (R, T) of every kind: by input, whether the start token stands in front, and
    the share of tokens that are masked.

    Raises:
        ValueError: for a model without tokenizer or (of a diffusion model) mask token, sequences
            longer than its context, and texts that do not fill one.
    """
    check_fits(loaded, "strength", settings.length, "choose a smaller length")
    start_id = loaded.special.bos
    starts = [start for start in settings.starts if start == "raw" or start_id is not None]
    if not starts:
        raise ValueError(f"{loaded.name} has no start token to put in front; choose --starts raw")
    ratios: Sequence[float] = (0.0,)
    if loaded.is_diffusion:
        ratios = settings.ratios
    found: dict[Arm, Tensor] = {}
    for name in settings.inputs:
        raw_RT = sequences(loaded, settings, name)
        for start in (each == "start" for each in starts):
            ids_RT = raw_RT
            if start:
                first_R1 = torch.full((len(raw_RT), 1), int(start_id or 0))
                ids_RT = torch.cat([first_R1, raw_RT[:, :-1]], dim=1)
            for ratio in ratios:
                found[name, start, ratio] = masked(loaded, ids_RT, ratio, start, settings.seed)
    return found


def arms(
    loaded: Loaded, settings: StrengthSettings, samples: dict[Arm, Tensor]
) -> dict[Arm, Tensor]:
    """The kinds of sequence."""
    return samples


def blocks(
    settings: StrengthSettings, samples: dict[Arm, Tensor], arms: Sequence[Arm]
) -> list[Block]:
    """A block for every kind of sequence."""
    found = []
    for kind, ids_RT in samples.items():
        name, start, ratio = kind
        words = f"{len(ids_RT)} sequences, {name}"
        if start:
            words += ", behind the start token"
        if ratio:
            words += f", {ratio:.0%} masked"
        found.append(Block((kind,), range(len(ids_RT)), words))
    return found


def sequences(loaded: Loaded, settings: StrengthSettings, name: str) -> Tensor:
    """Sequences of an input, ids (R, T): natural text, random tokens, or one repeated token.

    Raises:
        ValueError: for natural text that does not fill a sequence.
    """
    if name == "natural":
        return natural_rows(loaded, settings)
    known = torch.tensor(text_ids(loaded))
    generator = place_generator(settings.seed, INPUTS.index(name))
    drawn = {"random": settings.length, "repeat": 1}[name]
    places_RT = torch.randint(len(known), (settings.rows, drawn), generator=generator)
    return known[places_RT].expand(settings.rows, settings.length).contiguous()


def natural_rows(loaded: Loaded, settings: StrengthSettings) -> Tensor:
    """Consecutive rows of the texts, ids (R, T), none of which reaches over the end of a
    document.
    """
    rows = []
    source, length = heldout_text(settings.texts), settings.length
    for text in corpus_documents(source, start=settings.document):
        (ids,) = encode_texts([text], loaded.needed_tokenizer())
        rows += [ids[at : at + length] for at in range(0, len(ids) - length + 1, length)]
        if len(rows) >= settings.rows:
            break
    if not rows:
        raise ValueError(
            f"{settings.texts or 'the excerpt'} has no document of {length} tokens from number "
            f"{settings.document} on; choose a smaller length or an earlier document"
        )
    return torch.tensor(rows[: settings.rows])


def text_ids(loaded: Loaded) -> list[int]:
    """Every id that stands for text: those of the tokenizer that are not special and have a row in
    the embedding.
    """
    known = set(loaded.needed_tokenizer().get_vocab().values()) - set(special_roles(loaded))
    return sorted(token_id for token_id in known if token_id < loaded.config.vocab_size)


def masked(loaded: Loaded, ids_RT: Tensor, ratio: float, start: bool, seed: int) -> Tensor:
    """The sequences with this share of their tokens masked, never the start token.

    The order in which the tokens of a sequence are masked follows from the seed, so that a larger
    ratio masks all tokens that a smaller one masks.
    """
    if ratio == 0:
        return ids_RT
    first = int(start)
    order_RT = torch.rand(
        ids_RT[:, first:].shape, generator=place_generator(seed, len(INPUTS))
    ).argsort(dim=1)
    count = round(ratio * order_RT.shape[1])
    noisy_RT = ids_RT.clone()
    noisy_RT[:, first:].scatter_(1, order_RT[:, :count], int(loaded.config.mask_token_id))
    return noisy_RT


@torch.inference_mode()
def measure(trial: Trial) -> Rows:
    """Rows of the tables ``activations`` and ``strength`` of a kind of sequence.

    ``strength`` has a line per sequence, layer and head: first, the mean weight that the first
    token gets from the queries that may see it (α of Gu et al.); strongest, the greatest share of
    all attention that one key gets; at, its position (negative for an added sink), and token_id.
    ``activations`` has a line per sequence: the greatest magnitude in the hidden states after any
    layer, as a ratio to the median of that layer, with its value, layer, channel and position.
    """
    loaded, batch = trial.loaded, trial.settings.batch
    ((kind, ids_RT),) = trial.arms.items()
    parts: dict[str, list[pd.DataFrame]] = {"activations": [], "strength": []}
    for start in range(trial.rows.start, trial.rows.stop, batch):
        ids_BT = ids_RT[start : min(start + batch, trial.rows.stop)]
        with trace(loaded.model, ("received", GREATEST)) as recording:
            forward(loaded, ids_BT.to(loaded.model.device))
        received_BLHK = recording.received[0].float().cpu().numpy()
        visible_BLK = recording.visible_by_layer[0].float().cpu().numpy()
        greatest_BLN = recording.values(GREATEST)[0][:, :, 0].float().cpu().numpy()
        weights = _weights(ids_BT.numpy(), received_BLHK, visible_BLK)
        parts["strength"].append(weights.assign(row=weights["row"] + start))
        parts["activations"].append(_activations(greatest_BLN, start))
        trial.step()
    tables = {name: pd.concat(some, ignore_index=True) for name, some in parts.items()}
    names = dict(zip(KIND, kind, strict=True))
    return {
        name: pd.DataFrame(names, index=table.index).join(table) for name, table in tables.items()
    }


def forward(loaded: Loaded, ids_BT: Tensor) -> None:
    """One pass over clean or masked sequences; its logits are of no interest, so few are
    computed.
    """
    model: Any = loaded.model
    if not loaded.is_diffusion:
        model(ids_BT, use_cache=False, logits_to_keep=1)
        return
    wanted_BT = torch.zeros_like(ids_BT, dtype=torch.bool)
    wanted_BT[:, -1] = True
    model.denoiser()(ids_BT, wanted_BT)


def _weights(
    ids_BT: np.ndarray, received_BLHK: np.ndarray, visible_BLK: np.ndarray
) -> pd.DataFrame:
    """A line per sequence, layer and head: the weight of the first token, and the strongest key."""
    batch, layers, heads, keys = received_BLHK.shape
    length = ids_BT.shape[1]
    added = keys - length
    first_BLH = received_BLHK[..., added] / visible_BLK[:, :, None, added]
    at_BLH = np.nan_to_num(received_BLHK).argmax(-1)
    # every query gives 1 in all
    strongest_BLH = np.nanmax(received_BLHK, axis=-1) / length
    named_BK = np.pad(ids_BT, ((0, 0), (added, 0)), constant_values=ADDED)
    token_BLH = np.take_along_axis(named_BK[:, None, None], at_BLH[..., None], axis=-1)[..., 0]
    row, layer, head = np.indices((batch, layers, heads)).reshape(3, -1)
    columns = {
        "row": row,
        "layer": layer,
        "head": head,
        "first": first_BLH.ravel(),
        "strongest": strongest_BLH.ravel(),
        "at": at_BLH.ravel() - added,
        "token_id": token_BLH.ravel(),
    }
    return pd.DataFrame(columns)


def _activations(numbers_BLN: np.ndarray, start: int) -> pd.DataFrame:
    """A line per sequence: its greatest activation, from the layer with the greatest ratio."""
    value, channel, position, ratio = range(4)
    layer_B = np.nan_to_num(numbers_BLN[..., ratio]).argmax(1)
    chosen_BN = numbers_BLN[np.arange(len(layer_B)), layer_B]
    columns = {
        "row": start + np.arange(len(layer_B)),
        "ratio_to_median": chosen_BN[:, ratio],
        "value": chosen_BN[:, value],
        "layer": layer_B,
        "channel": chosen_BN[:, channel].astype(int),
        "position": chosen_BN[:, position].astype(int),
    }
    return pd.DataFrame(columns)


def contrasts(trial: Trial, rows: Rows) -> Rows:
    """The tables ``heads`` (a line per kind, layer and head: means over the sequences of first and
    strongest), ``summary`` and ``classes``.
    """
    strength, epsilon = rows["strength"], trial.settings.epsilon
    heads = strength.groupby([*KIND, "layer", "head"], sort=False)[["first", "strongest"]].mean()
    return {
        "heads": heads.reset_index(),
        "summary": summary(strength, rows["activations"], epsilon),
        "classes": classes(strength, trial.loaded, epsilon),
    }


def summary(table: pd.DataFrame, activations: pd.DataFrame, epsilon: float) -> pd.DataFrame:
    """A line per kind of sequence, all shares between 0 and 1.

    sink: share of heads (layer, head) that give the first token more than epsilon in the mean over
    sequences, Sink₁^ε of Gu et al.; sink_by_text, low, high: the same of each sequence by itself,
    the mean with its 95 % interval; first: mean weight of the first token; strong, strong_low,
    strong_high: share of heads with more than epsilon on their strongest key, wherever it stands,
    by sequence; strongest: its mean share; at_first: share of the strong ones that stand on the
    first token; activation: median over sequences of the greatest activation's ratio; rows:
    sequences.
    """
    rows = []
    for names, part in table.groupby(KIND, sort=False):
        means = part.groupby(["layer", "head"])["first"].mean()
        flagged = part.assign(
            is_sink=part["first"] > epsilon, is_strong=part["strongest"] > epsilon
        )
        by_text = flagged.groupby("row")[["is_sink", "is_strong"]].mean()
        sink, strong = mean_over(by_text["is_sink"]), mean_over(by_text["is_strong"])
        (low, high), (strong_low, strong_high) = np.clip([sink.interval, strong.interval], 0, 1)
        spikes = activations[(activations[KIND] == list(names)).all(axis=1)]
        line = {
            "sink": (means > epsilon).mean(),
            "sink_by_text": sink.value,
            "low": low,
            "high": high,
            "first": part["first"].mean(),
            "strong": strong.value,
            "strong_low": strong_low,
            "strong_high": strong_high,
            "strongest": part["strongest"].mean(),
            "at_first": (part.loc[flagged["is_strong"], "at"] == 0).mean(),
            "activation": spikes["ratio_to_median"].median(),
            "rows": len(by_text),
        }
        rows.append(dict(zip(KIND, names, strict=True)) | line)
    return pd.DataFrame(rows)


def classes(table: pd.DataFrame, loaded: Loaded, epsilon: float) -> pd.DataFrame:
    """A line per kind of sequence and token on which strong keys stand: its text, its class, and
    its share of them.
    """
    strong = table[table["strongest"] > epsilon]
    counts = strong.groupby([*KIND, "token_id"], sort=False).size().rename("heads").reset_index()
    roles = special_roles(loaded) | {ADDED: "sink"}
    texts = ["added sink"] * len(counts)
    for place, one in enumerate(counts["token_id"]):
        if one != ADDED:
            texts[place] = token_text(loaded.tokenizer, one)
    counts["token"] = texts
    counts["class"] = pd.Series(dtype=object)
    if texts:
        counts["class"] = token_classes(texts, [roles.get(one, "") for one in counts["token_id"]])
    counts["share"] = counts["heads"] / counts.groupby(KIND, sort=False)["heads"].transform("sum")
    ascending = [True, True, True, False]
    counts = counts.sort_values([*KIND, "share"], ascending=ascending, kind="stable")
    return counts.reset_index(drop=True)
