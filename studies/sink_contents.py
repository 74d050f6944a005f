"""What a future sink carries: states at sinks, read by the logit lens and by ridge probes.

    python studies/sink_contents.py [--out FOLDER] [--smallest]

While `tiny` and `tiny-sink` write, states of sinks are kept at every sixth step, and beside each
the state of a position that is like it: the nearest of its place, with its token if there is one.
A state of layer l enters that layer; the last one leaves the last layer. Untrained controls of
`tiny` read the same texts. FOLDER gets results.json and pictures; the smallest takes seconds.
"""

import argparse
import json
import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import scipy.stats
import torch
from matplotlib.figure import Figure
from sklearn.linear_model import Ridge
from sklearn.preprocessing import scale
from torch import Tensor

from sinklab import Canvas, Excess, denoise, find_sinks, load, trace
from sinklab.core.instrument import StatesView, Statistic
from sinklab.core.registry import statistics
from sinklab.core.subject import Step
from sinklab.lab.checkpoints import UNTRAINED
from sinklab.lab.data import pack, read_corpus
from sinklab.lab.scoring import sample_seed
from sinklab.lab.studies import heldout_text

# A penalties, C target columns, D width, F folds, G texts, H heads, K keys (added sinks first),
# L layers, N sampled states, P populations, R resamples, S positions, T targets, U sampled steps
CONTROLLED = {"tiny": ("strongest",), "tiny-sink": ()}
"""Model -> choices of keys for which its controls are read too."""
PLACES = ("block", "future", "committed", "prompt")
"""Masked in the block that is written, masked to the right of it, written, given."""
POPULATIONS = ("sink", "matched")
LENS = ("entropy", "log10_rank", "probability", "frequent_probability", "kl", "variation")
MORE = ("frequent_log10_rank", "hidden", "first", "norm")
"""Measures of the lens that are drawn, and more; `kl` to the last layer, `hidden` of [MASK]."""
NUMBERS, MEANS = ("token", "progress", "position", "block"), ("committed", "next")
"""Targets of probes; the latter are mean embeddings."""
SKILLS = ("token", "block")  # classes; the score of all others is R²
PENALTIES = 10.0 ** np.arange(-3, 5)  # for columns of deviation 1
EPSILON, PAIRS, CLASSES, MIXED, SEED = 3.0, 2, 16, 32, 0
FEWEST, FITTED = 8, 1.25
"""Fewest texts of an interval; by how much the coefficients' own error widens one."""
Array, Table = np.ndarray, pd.DataFrame


@dataclass(frozen=True)
class Size:
    """How much is written and read."""

    texts: int = 24
    prompt: int = 32
    new: int = 96
    block: int = 32
    every: int = 6
    folds: int = 5
    resamples: int = 1000
    choices: tuple[str, ...] = ("excess", "strongest")
    """Sinks by the published rule; in each head the key of each place that receives most."""
    depth: int = 1
    """Every so many layers are read."""


SMALLEST = Size(8, 8, 12, 4, 3, 3, 50, ("strongest",), 6)


@statistics.register("layer_states")
class LayerStates(Statistic):
    """The hidden states that leave a decoder layer, whole."""

    axes = ("batch", "layer", "position", "channel")
    of_states = True

    def measure(self, view: StatesView) -> Tensor:
        return view.states_BQD.detach()


def written(lm: Any, prompt: list[int], seed: int, size: Size) -> list[Step]:
    """The steps in which the model writes a text, a token each."""
    mask_id = lm.model.config.mask_token_id
    canvas = Canvas.from_prompts([prompt], new_tokens=size.new, mask_id=mask_id)
    draw = torch.Generator().manual_seed(seed)
    return [*denoise(lm, canvas, block_length=size.block, temperature=1.0, generator=draw)]


def read(lm: Any, step: Step) -> Any:
    """What is seen while a model, the writer or a control, reads the canvas of a step."""
    names = ("received", "layer_states", "key_norm", "value_norm")
    with torch.inference_mode(), trace(lm, names) as recording:
        lm.model.denoiser()(step.before_BS, step.masked_BS)
    return recording


def chosen_keys(recording: Any, place_S: Array, choose: str) -> Array:
    """Whether some head has chosen a text position, bool (L, S)."""
    received_LHK = recording.received[0][0].numpy()
    if choose == "excess":
        visible_L1K = recording.visible_by_layer[0][0].numpy()[:, None]
        found_LHK = np.asarray(find_sinks(received_LHK, Excess(EPSILON), seen_by=visible_L1K))
        return found_LHK[..., recording.prefix :].any(1)
    chosen_LS = np.zeros((len(received_LHK), len(place_S)), bool)
    for place in range(len(PLACES)):
        there = np.flatnonzero(place_S == place)
        if len(there) >= 2:
            best_LH = there[received_LHK[..., recording.prefix + there].argmax(-1)]
            np.put_along_axis(chosen_LS, best_LH, values=True, axis=1)
    return chosen_LS


def matched_pairs(sink_S: Array, place_S: Array, token_S: Array, random: Any) -> Array:
    """Some sinks of every place, each with another position of it, (N, 2): one with the same token
    if there is any left, and the nearest of those. Nothing is matched twice.
    """
    pairs = []
    for place in range(len(PLACES)):
        here_S = place_S == place
        free = np.flatnonzero(here_S & ~sink_S).tolist()
        for sink in random.permutation(np.flatnonzero(here_S & sink_S))[:PAIRS]:
            if not free:
                break
            others = np.array(free)
            cost = np.abs(others - sink) + len(sink_S) * (token_S[others] != token_S[sink])
            match = int(random.choice(others[cost == cost.min()]))
            free.remove(match)
            pairs.append((int(sink), match))
    return np.array(pairs, int).reshape(-1, 2)


def sampled(lm: Any, choose: str, texts: list[list[Step]], size: Size) -> tuple:
    """States at chosen keys and at their matches, of a model that reads these texts: a table with
    a row each; states; those after the last layer; counts; and mean embeddings (G, U, D) of what is
    written so far, and finally in the next block, NaN of nothing.
    """
    looks, frames, states, last, means = [], [], [], [], defaultdict(list)
    embedding_VD = lm.model.get_input_embeddings().weight.detach().float()
    for text, steps in enumerate(texts):
        random = np.random.default_rng([SEED, text])
        open_S, final_S = steps[0].canvas.open_BS[0].numpy(), steps[-1].ids_BS[0].numpy()
        for number, step in enumerate(steps[:: size.every]):
            recording, ids_S = read(lm, step), step.before_BS[0].numpy()
            masked_S, block_S = step.masked_BS[0].numpy(), (np.cumsum(open_S) - 1) // size.block
            place_S = np.select([~open_S, ~masked_S, block_S > step.block], [3, 2, 1], 0)
            chosen_LS = chosen_keys(recording, place_S, choose)
            follow = final_S[open_S][(step.block + 1) * size.block :][: size.block]
            for name, ids in zip(MEANS, (ids_S[place_S == 2], follow), strict=True):
                means[name].append(embedding_VD[torch.tensor(ids)].mean(0).double().numpy())
            states_LSD = torch.cat([embedding_VD[step.before_BS], recording.layer_states[0][0]])
            about = {"text": text, "step": number, "block": step.block}
            about |= {"progress": (place_S < 2).sum() / open_S.sum()}
            about |= {"frequent": np.bincount(ids_S[place_S >= 2]).argmax()}
            for layer in range(0, len(states_LSD), size.depth):
                # what leaves the last layer is read at the sinks of the last layer
                sink_S = chosen_LS[min(layer, len(chosen_LS) - 1)]
                at_N = matched_pairs(sink_S, place_S, ids_S, random).reshape(-1)
                for number_of_place, place in enumerate(PLACES):
                    here_S = place_S == number_of_place
                    look = {"place": place, "layer": layer, "positions": here_S.sum()}
                    look |= {"sinks": sink_S[here_S].sum(), "pairs": here_S[at_N[::2]].sum()}
                    look |= {"texts": text if look["sinks"] else math.nan}
                    looks += [look] * bool(here_S.any())
                row = {"layer": layer, "population": np.resize(POPULATIONS, len(at_N))}
                row |= {"place": np.array(PLACES)[place_S[at_N]], "token": final_S[at_N]}
                row |= {"position": at_N}
                frames.append(Table(about | row))
                states.append(states_LSD[layer, at_N])
                last.append(states_LSD[-1, at_N])
    rows = pd.concat(frames, ignore_index=True)
    shape = (len(texts), -1, embedding_VD.shape[1])
    mean_GUD = {name: np.reshape(mean, shape) for name, mean in means.items()}
    return rows, torch.cat(states), torch.cat(last), Table(looks), mean_GUD


@torch.inference_mode()
def lens(lm: Any, rows: Table, states_ND: Tensor, last_ND: Tensor) -> Table:
    """What the model's own norm and head say of states of any layer; [MASK] cannot be written."""
    norm, head = lm.model.base_model.norm, lm.model.get_output_embeddings()
    mask_id = torch.tensor(lm.model.config.mask_token_id)
    frames = []
    for first in range(0, len(rows), 256):
        here = slice(first, first + 256)
        both = [head(norm(x_ND[here])).float() for x_ND in (states_ND, last_ND)]
        found = {"hidden": both[0].softmax(1)[:, mask_id], "norm": states_ND[here].norm(dim=1)}
        log_NV, last_NV = (one.index_fill(1, mask_id, -1e30).log_softmax(1) for one in both)
        found["entropy"] = torch.special.entr(log_NV.exp()).sum(1)
        found["kl"] = (last_NV.exp() * (last_NV - log_NV)).sum(1).clamp(min=0)
        for name, prefix in (("token", ""), ("frequent", "frequent_")):
            own_N1 = log_NV.gather(1, torch.tensor(rows[name].to_numpy()[here])[:, None])
            found[f"{prefix}probability"] = own_N1[:, 0].exp()
            found[f"{prefix}log10_rank"] = (1 + (log_NV > own_N1).sum(1)).float().log10()
        found["first"] = found["log10_rank"] == 0
        frames.append(Table({name: of.double().numpy() for name, of in found.items()}))
    return pd.concat(frames, ignore_index=True)


@dataclass(frozen=True)
class Score:
    """A ratio of sums over texts, so that texts can be resampled."""

    top_AG: Array
    bottom_G: Array
    choice_FAG: Array
    """The penalty for the texts of a fold is the one with the least sum, in each resample anew."""
    fold_G: Array
    is_error: bool = True

    def values(self, count_RG: Array) -> Array:
        """The score, if texts are taken so many times, (R,); of errors it is 1 less the ratio."""
        best_RF = np.einsum("rg,fag->rfa", count_RG, self.choice_FAG).argmin(-1)
        top_RG = self.top_AG[best_RF[:, self.fold_G], np.arange(len(self.fold_G))]
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio_R = (count_RG * top_RG).sum(1) / (count_RG * self.bottom_G).sum(1)
        return 1 - ratio_R if self.is_error else ratio_R


def lens_scores(two: list[Table], states_PND: Array, fold_G: Array) -> Iterator:
    """Means; "variation" is the squared distance to the mean state over mean squared length."""
    text_N = two[0]["text"].to_numpy()
    by_text_NG = np.eye(len(fold_G))[text_N]
    length_P1 = np.square(states_PND).sum(2).mean(1, keepdims=True)
    apart_PN = np.square(states_PND - states_PND.mean(1, keepdims=True)).sum(2) / length_P1
    how = (by_text_NG.sum(0), np.zeros((1, 1, len(fold_G))), np.zeros_like(fold_G), False)
    fact = {"rows": len(text_N), "texts": len(np.unique(text_N))}
    for name in LENS + MORE:
        value_PN = apart_PN if name == "variation" else [of[name].to_numpy() for of in two]
        scores = [Score((value_N @ by_text_NG)[None], *how) for value_N in value_PN]
        yield {"measure": name}, scores, [fact] * 3


def shuffled(target_NC: Array, text_N: Array) -> Array:
    """The target with whole texts exchanged, whose rows are alike: what is read of nothing."""
    draw = torch.Generator().manual_seed(1)
    texts = [np.flatnonzero(text_N == text) for text in np.unique(text_N)]
    order = torch.randperm(len(texts), generator=draw).tolist()
    mixed_NC = np.empty_like(target_NC)
    for own, other in zip(order, [*order[1:], order[0]], strict=True):
        first = int(torch.randint(len(texts[other]), (), generator=draw))
        place_N = (first + np.arange(len(texts[own]))) % len(texts[other])
        mixed_NC[texts[own]] = target_NC[texts[other][place_N]]
    return mixed_NC


def mixed(target_NC: Array) -> Array:
    """Random mixtures of the columns of a wide target, whose errors estimate its own."""
    if target_NC.shape[1] <= MIXED:
        return target_NC
    draw = torch.Generator().manual_seed(0)
    mixing_CM = torch.randn(target_NC.shape[1], MIXED, generator=draw, dtype=torch.float64)
    return target_NC @ mixing_CM.numpy() / MIXED**0.5


def fitted(x_ND: Array, y_NC: Array, seen_N: Array, asked_N: Array) -> Any:
    """Predictions of ridge regressions on the rows that were seen, for others, (A, N, C)."""
    penalty_C = np.repeat(PENALTIES * seen_N.sum(), y_NC.shape[1])
    y_NC = np.tile(y_NC[seen_N], len(PENALTIES))
    said_NC = Ridge(penalty_C, solver="svd").fit(x_ND[seen_N], y_NC).predict(x_ND[asked_N])
    return said_NC.reshape(len(said_NC), len(PENALTIES), -1).transpose(1, 0, 2)


def ridge_scores(x_ND: Array, targets: dict, text_N: Array, fold_G: Array) -> dict[Any, Score]:
    """Scores of ridge regressions of several targets, each fold predicted from the others. The
    penalty is the one that predicts best when each of those is left out in turn.
    """
    y_NC, mixed_NM = (np.hstack([*map(how, targets.values())]) for how in (np.asarray, mixed))
    sizes = [y.shape[1] for y in targets.values()]
    first_T = np.cumsum([0, *np.minimum(sizes, MIXED)])[:-1]
    fold_N, folds = fold_G[text_N], fold_G.max() + 1
    choice_TFAN = np.zeros((len(sizes), folds, len(PENALTIES), len(x_ND)))
    top_TAN, bottom_TN = np.zeros_like(choice_TFAN[:, 0]), np.zeros((len(sizes), len(x_ND)))
    for fold in range(folds):
        left_N = fold_N != fold
        for inner in {*range(folds)} - {fold}:
            asked_N = fold_N == inner
            said_ANM = fitted(x_ND, mixed_NM, left_N & ~asked_N, asked_N)
            error_ANT = np.add.reduceat(np.square(said_ANM - mixed_NM[asked_N]), first_T, axis=2)
            choice_TFAN[:, fold][..., asked_N] = error_ANT.transpose(2, 0, 1)
        said = np.split(fitted(x_ND, y_NC, left_N, ~left_N), np.cumsum(sizes)[:-1], axis=2)
        for number, ((name, _), own_NC) in enumerate(targets.items()):
            wanted_NC, mean_C = own_NC[~left_N], own_NC[left_N].mean(0)
            if name in SKILLS:
                # to be avoided are the mistakes of the most frequent answer that was seen
                top_AN = said[number].argmax(2) != wanted_NC.argmax(1)
                bottom_N = mean_C.argmax() != wanted_NC.argmax(1)
            else:
                top_AN = np.square(said[number] - wanted_NC).sum(2)
                bottom_N = np.square(mean_C - wanted_NC).sum(1)
            top_TAN[number][:, ~left_N], bottom_TN[number, ~left_N] = top_AN, bottom_N
    by_text_NG = np.eye(len(fold_G))[text_N]
    sums = (part @ by_text_NG for part in (top_TAN, bottom_TN, choice_TFAN))
    return {name: Score(*one, fold_G) for name, *one in zip(targets, *sums, strict=True)}


def probe_scores(means: dict, two: list[Table], states_PND: Array, fold_G: Array) -> Iterator:
    """Scores of probes of each target, from the states of either population."""
    text_N, step_N = (two[0][name].to_numpy() for name in ("text", "step"))
    # of a text half-way round, and so of another part of the corpus
    other_N, once_1G = (text_N + len(fold_G) // 2) % len(fold_G), np.ones((1, len(fold_G)))
    asked = {name: np.stack([means[name][text_N, step_N]] * 2) for name in MEANS}
    for name in NUMBERS:
        asked[name] = np.stack([of[name].to_numpy(float) for of in two])[..., None]
        if name in SKILLS:
            seen, count = np.unique(asked[name], return_counts=True)
            frequent = np.argsort(-count, kind="stable")[:CLASSES]
            hot_PNC = asked[name] == seen[frequent if name == "token" else ...]
            # the last column is that of all other classes
            asked[name] = np.dstack([hot_PNC, ~hot_PNC.any(2)]).astype(float)
    for names in (NUMBERS, MEANS[:1], MEANS[1:]):
        known_N = np.isfinite(asked[names[0]]).all((0, 2))
        of_N, held = text_N[known_N], []
        answers = {name: asked[name][:, known_N] for name in names}
        answers = {name: y for name, y in answers.items() if (y != y[:, :1]).any((1, 2)).all()}
        if not answers or len(np.unique(fold_G[of_N])) <= fold_G.max():
            continue
        for population, x_ND in enumerate(map(scale, states_PND)):
            targets = {}
            for name, y_PNC in answers.items():
                targets[name, "true"] = y_PNC[population]
                targets[name, "shuffled"] = shuffled(y_PNC[population], of_N)
                if name in MEANS:
                    targets[name, "other_text"] = means[name][other_N, step_N][known_N]
            held.append(ridge_scores(x_ND[known_N], targets, of_N, fold_G))
        for name in answers:
            facts = [{}, {}, {}]
            for fact, one in zip(facts, held, strict=False):
                fact |= {
                    kind: it.values(once_1G)[0] for (of, kind), it in one.items() if of == name
                }
                wrong = (1 - fact.pop("true")) * one[name, "true"].bottom_G.sum()
                fact["accuracy"] = 1 - wrong / len(of_N) if name in SKILLS else math.nan
            counted = {"rows": len(of_N), "texts": len(np.unique(of_N))}
            about = {"target": name, "measure": "skill" if name in SKILLS else "r2"}
            yield about, [one[name, "true"] for one in held], [fact | counted for fact in facts]


def with_intervals(scores: list[Score], facts: list[dict], count_RG: Array) -> Iterator[dict]:
    """Rows of both populations and of the first less the second; of 95 % intervals over texts the
    distances of percentiles are stretched as Student's t is wider than the normal distribution.
    """
    once_1G = np.ones((1, count_RG.shape[1]))
    values = [(one.values(once_1G)[0], one.values(count_RG)) for one in scores]
    values.append(tuple(one - other for one, other in zip(*values, strict=True)))
    names = (*POPULATIONS, "difference")
    for name, (value, value_R), fact in zip(names, values, facts, strict=True):
        texts, low, high = fact["texts"], math.nan, math.nan
        apart_R = value_R[np.isfinite(value_R)] - value
        if texts >= FEWEST and len(apart_R) and math.isfinite(value):
            wider = scipy.stats.t.ppf(0.975, texts - 1) / scipy.stats.norm.ppf(0.975)
            wider *= math.sqrt(texts / (texts - 1)) * (FITTED if scores[0].is_error else 1)
            low, high = value + wider * np.quantile(apart_R, [0.025, 0.975])
        yield {"population": name, "value": value, "low": low, "high": high} | fact


def tables_of(lm: Any, choose: str, texts: list, size: Size, places: Any = PLACES) -> dict:
    """How many keys were chosen, and what the lens and probes read in them, by place and layer."""
    rows, states_ND, last_ND, looks, means = sampled(lm, choose, texts, size)
    grouped = looks.groupby(["place", "layer"])
    counted = grouped.mean().assign(looks=grouped.size(), texts=grouped["texts"].nunique())
    found = {"looks": counted.reset_index()}
    draw, shape = torch.Generator(), (size.resamples, size.texts)
    taken_RG = torch.randint(size.texts, shape, generator=draw.manual_seed(SEED)).numpy()
    count_RG = np.stack([np.bincount(one, minlength=size.texts) for one in taken_RG])
    order_G = torch.randperm(size.texts, generator=draw.manual_seed(SEED))
    fold_G = order_G.argsort().numpy() % size.folds
    rows = rows.join(lens(lm, rows, states_ND, last_ND))
    tables = defaultdict(list)
    for (layer, place), here in rows[rows["place"].isin(places)].groupby(["layer", "place"]):
        two = [here[here["population"] == one] for one in POPULATIONS]
        states_PND = np.stack([states_ND[of.index].double().numpy() for of in two])
        read_lens = lens_scores(two, states_PND, fold_G)
        read_probes = probe_scores(means, two, states_PND, fold_G)
        for name, reading in (("lens", read_lens), ("probes", read_probes)):
            for about, scores, facts in reading:
                where = {"place": place, "layer": layer} | about
                tables[name] += [where | row for row in with_intervals(scores, facts, count_RG)]
    return found | {name: Table(table) for name, table in tables.items()}


def added_sink(lm: Any, texts: list[list[Step]], size: Size) -> Table:
    """By layer the share of attention, and how far the norms of key and value ever differ."""
    seen = [read(lm, step) for steps in texts for step in steps[:: size.every]]
    received_NLHK = np.stack([one.received[0][0].double().numpy() for one in seen])
    share_L = (received_NLHK[..., 0].mean(2) / received_NLHK.sum(3).mean(2)).mean(0)
    norms_N2L = np.stack([[one.key_norm[0][0, :, 0], one.value_norm[0][0, :, 0]] for one in seen])
    spread_L = np.abs(norms_N2L - norms_N2L[0]).max((0, 1)).astype(float)
    return Table({"layer": np.arange(len(share_L)), "share": share_L, "spread": spread_L})


def drawn(tables: dict[str, Table], place: str) -> Figure:
    """Lens and probes at a place; sinks are red, dotted targets shuffled, dashed of other texts."""
    figure = Figure(figsize=(10.5, 11))
    figure.subplots_adjust(0.05, 0.03, 0.99, 0.97, hspace=0.28)
    for panel, name in zip(figure.subplots(4, 3).flat, LENS + NUMBERS + MEANS, strict=True):
        table, about = ("lens", "measure") if name in LENS else ("probes", "target")
        here = tables[table][(tables[table]["place"] == place) & (tables[table][about] == name)]
        panel.set_title(" ".join([name, *here["measure"].unique()[: name not in LENS]]))
        for population, colour in zip(POPULATIONS, ("tab:red", "tab:blue"), strict=True):
            # at layer 0, the bare embedding, kl is tens of nats
            rows = here[(here["population"] == population) & (here["layer"] >= (name == "kl"))]
            panel.plot(rows["layer"], rows["value"], "o-", color=colour)
            panel.fill_between(rows["layer"], rows["low"], rows["high"], color=colour, alpha=0.2)
            for control, style in (("shuffled", ":"), ("other_text", "--")):
                if control in rows:
                    panel.plot(rows["layer"], rows[control], style, color=colour)
    return figure


def main(size: Size, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for model, controlled in CONTROLLED.items():
        lm = load(model)
        rows_RS = pack(read_corpus(heldout_text(None)), lm.tokenizer, size.prompt)
        chosen = np.linspace(0, len(rows_RS) - 1, size.texts).round().astype(int)
        prompts = enumerate(rows_RS[chosen].tolist())
        texts = [written(lm, ids, sample_seed(SEED, text), size) for text, ids in prompts]
        for choose in size.choices:
            name = f"{model}-{choose}"
            tables = tables_of(lm, choose, texts, size)
            if lm.model.config.sink_count:
                tables["added"] = added_sink(lm, texts, size)
            if choose in controlled:
                for kind, make in UNTRAINED.items():
                    ahead = tables_of(make(lm, SEED), choose, texts, size, ["future"])
                    tables |= {f"{one}-{kind}": ahead[one] for one in ("lens", "probes")}
            found[name] = {"settings": asdict(size) | {"choose": choose}}
            for table, frame in tables.items():
                found[name][table] = frame.astype(object).where(frame.notna(), None).to_dict("list")
            for place in ("future", "committed"):
                drawn(tables, place).savefig(out / f"{name}-contents-{place}.png", dpi=100)
            print(name, flush=True)
        (out / "results.json").write_text(json.dumps(found, allow_nan=False) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs/contents"))
    parser.add_argument("--smallest", action="store_true", help="8 short texts, in seconds")
    given = parser.parse_args()
    main(SMALLEST if given.smallest else Size(), given.out)
