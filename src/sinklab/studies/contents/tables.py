"""From sampled states to tables: what the lens reads and what probes can tell, with intervals over texts."""

# N sampled states of one place and layer, D hidden size, C target columns, G texts, R resamples, T sampled steps
from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from sinklab.analysis import linear_probes as probes
from sinklab.analysis.intervals import percentile_interval
from sinklab.analysis.linear_probes import Score
from sinklab.records.reading import Run
from sinklab.studies.base import columns_of
from sinklab.studies.contents.lens import MEASURES
from sinklab.studies.contents.samples import PLACES, POPULATIONS
from sinklab.studies.contents.study import TARGETS, ContentsSettings

if TYPE_CHECKING:
    import pandas as pd


MEANS = ("committed", "next")
"""Targets that are mean embeddings, the same for both of a pair."""
READ = (*MEASURES, "first", "norm", "variation")
"""Measures of the table `lens`: those of the lens; how often the written token comes first; the length of the state;
its squared distance to the mean of its population over the mean squared length (0: a constant)."""


@dataclass(frozen=True)
class Slice:
    """The sampled states of one place and layer, sinks and matched positions apart, row i of one beside row i of the
    other.
    """

    place: str
    layer: int
    columns: dict[str, pd.DataFrame]
    """Population -> rows of the table `samples`."""
    states: dict[str, Tensor]
    """Population -> (N, D)."""
    means: dict[str, Tensor]
    """"committed" and "next" -> (N, D), the same for both populations: a pair is of one step."""
    others: dict[str, Tensor]
    """The same of another text at that step: what a probe would score that reads the moment alone."""
    text_N: Tensor

    @property
    def texts(self) -> int:
        """Texts that have a row here."""
        return len(self.text_N.unique())


def slices(run: Run, samples: pd.DataFrame, layer: int) -> list[Slice]:
    """The sampled states of one layer by place, from the table `samples`; memory is that of this layer's states."""
    table = samples[samples["layer"] == layer].reset_index(drop=True)
    if table.empty:
        return []
    parts, texts = run.parts("states"), table.groupby("text", sort=True)["step"]
    # half-way round, and so of another part of the corpus
    another = dict(zip(parts, [*parts[len(parts) // 2 :], *parts[: len(parts) // 2]], strict=True))
    states = [torch.from_numpy(run.array("states", f"layer{layer}", int(text))) for text in texts.groups]
    states_ND, own, other = torch.cat(states), list[dict[str, Tensor]](), list[dict[str, Tensor]]()
    for text, steps in texts:
        own.append(_means(run, int(text), steps.to_numpy()))
        other.append(_means(run, another[int(text)], steps.to_numpy()))
    made = []
    for place in PLACES:
        here = table[table["place"] == place]
        columns = {key: here[here["population"] == key] for key in POPULATIONS}
        if len(columns["sink"]):
            apart = {key: states_ND[rows.index.tolist()] for key, rows in columns.items()}
            rows_N = columns["sink"].index.tolist()
            means, others = (
                {name: torch.cat([one[name] for one in found])[rows_N] for name in MEANS} for found in (own, other)
            )
            text_N = torch.tensor(columns["sink"]["text"].tolist())
            made.append(Slice(place, layer, columns, apart, means, others, text_N))
    return made


def _means(run: Run, text: int, step_N: np.ndarray) -> dict[str, Tensor]:
    """Rows of "committed" and "next" of a text at these steps, (N, D); NaN where it was not sampled then."""
    number_T = run.array("states", "step_number", text)
    place_N = np.searchsorted(number_T, step_N).clip(max=len(number_T) - 1)
    known_N = torch.from_numpy(number_T[place_N] == step_N)
    means = {name: torch.from_numpy(run.array("states", name, text))[place_N] for name in MEANS}
    return {name: values_ND.where(known_N[:, None], torch.nan) for name, values_ND in means.items()}


class Rows:
    """Collects rows of a table of scores: each population, and the first less the second, with intervals."""

    def __init__(self, count_RG: Tensor) -> None:
        self._count_RG = count_RG
        self.rows: list[dict[str, Any]] = []

    def add(self, part: Slice, about: dict[str, Any], scores: dict[str, Score], extra: dict[str, dict]) -> None:
        """The scores of both populations, on the same texts."""
        values = {name: (score.value().item(), score.value(self._count_RG)) for name, score in scores.items()}
        (one, one_R), (other, other_R) = (values[name] for name in POPULATIONS)
        values["difference"] = (one - other, one_R - other_R)
        for population, (value, value_R) in values.items():
            low, high = percentile_interval(value_R)
            row = {"place": part.place, "layer": part.layer, **about, "population": population}
            row |= {"value": value, "low": low, "high": high} | extra.get(population, extra.get("", {}))
            self.rows.append(row)


def lens_rows(part: Slice, texts: int, into: Rows) -> None:
    """What the lens reads, as means over the sampled states."""
    found = {name: {key: _measure(part, key, name) for key in POPULATIONS} for name in READ}
    for name, values in found.items():
        if all(bool(value_N.isfinite().any()) for value_N in values.values()):
            scores = {key: probes.mean_score(value_N, part.text_N, texts) for key, value_N in values.items()}
            into.add(part, {"measure": name}, scores, {"": {"rows": len(part.text_N), "texts": part.texts}})


def _measure(part: Slice, population: str, name: str) -> Tensor:
    if name == "variation":
        states_ND = part.states[population].double()
        length = states_ND.square().sum(1).mean().clamp(min=1e-300)
        return (states_ND - states_ND.mean(0)).square().sum(1) / length
    if name == "first":
        rank_N = torch.tensor(part.columns[population]["log10_rank"].tolist(), dtype=torch.float64)
        return torch.where(rank_N.isnan(), rank_N, (rank_N == 0).double())
    return torch.tensor(part.columns[population][name].tolist(), dtype=torch.float64)


@dataclass(frozen=True)
class _Target:
    """What a probe is asked for, (N, C); rows without an answer are NaN."""

    name: str
    answers: dict[str, Tensor]
    score: Callable[..., Score]
    other: Tensor | None = None
    """The answers of another text at the same step."""

    @property
    def known_N(self) -> Tensor:
        """Rows that everything has an answer for."""
        answers = [*self.answers.values(), *([] if self.other is None else [self.other])]
        return torch.stack([answer_NC.isfinite().all(1) for answer_NC in answers]).all(0)


def probe_rows(part: Slice, fold_G: Tensor, settings: ContentsSettings, into: Rows) -> None:
    """What probes can tell, sinks and matched positions apart; targets for which too little was seen are left out."""
    texts = len(fold_G)
    states = {key: probes.standardised(states_ND, settings.components) for key, states_ND in part.states.items()}
    alike: dict[bytes, list[_Target]] = {}
    for target in _targets(part, settings.classes):
        known_N = target.known_N
        if len(fold_G[part.text_N[known_N]].unique()) == settings.folds and _varies(target, known_N):
            alike.setdefault(known_N.numpy().tobytes(), []).append(target)
    for targets in alike.values():
        known_N = targets[0].known_N
        text_N = part.text_N[known_N]
        held = {
            key: probes.ridge(states[key][known_N], _asked(targets, key, known_N), fold_G[text_N])
            for key in POPULATIONS
        }
        counted = {"rows": int(known_N.sum()), "texts": len(text_N.unique())}
        for target in targets:
            scores: dict[str, Score] = {}
            names = ("accuracy", "shuffled", "other_text")
            extra: dict[str, dict] = {"": dict.fromkeys(names, math.nan) | counted}
            for key in POPULATIONS:
                asked = _asked([target], key, known_N)
                found = {name: target.score(held[key][name], asked[name], text_N, texts) for name in asked}
                scores[key] = found.pop(target.name)
                controls = {name.split()[0]: score.value().item() for name, score in found.items()}
                if target.score is probes.skill:
                    controls["accuracy"] = probes.accuracy(held[key][target.name], asked[target.name])
                extra[key] = extra[""] | controls
            measure = "r2" if target.score is probes.explained else "skill"
            into.add(part, {"target": target.name, "measure": measure}, scores, extra)


def _asked(targets: list[_Target], population: str, known_N: Tensor) -> dict[str, Tensor]:
    """What one regression is asked for: the targets, and their controls."""
    asked: dict[str, Tensor] = {}
    for target in targets:
        answer_NC = target.answers[population][known_N]
        asked |= {target.name: answer_NC, f"shuffled {target.name}": probes.shuffled(answer_NC, seed=1)}
        if target.other is not None:
            asked[f"other_text {target.name}"] = target.other[known_N]
    return asked


def _targets(part: Slice, classes: int) -> list[_Target]:
    def numbers(name: str) -> dict[str, Tensor]:
        return {key: torch.tensor(columns[name].tolist(), dtype=torch.float64) for key, columns in part.columns.items()}

    tokens, blocks = numbers("token"), numbers("block")
    # the same classes for both populations: those that are frequent in the two together
    seen, count = torch.cat([*tokens.values()]).unique(return_counts=True)
    frequent = seen[count.argsort(descending=True, stable=True)[:classes]]
    block = torch.cat([*blocks.values()]).unique()
    made = {
        "token": ({key: _one_hot(value_N, frequent) for key, value_N in tokens.items()}, probes.skill),
        "progress": ({key: value_N[:, None] for key, value_N in numbers("progress").items()}, probes.explained),
        "position": ({key: value_N[:, None] for key, value_N in numbers("position").items()}, probes.explained),
        "block": ({key: _one_hot(value_N, block) for key, value_N in blocks.items()}, probes.skill),
        **{name: (dict.fromkeys(POPULATIONS, part.means[name]), probes.explained) for name in MEANS},
    }
    return [_Target(name, *made[name], part.others.get(name)) for name in TARGETS]


def _one_hot(value_N: Tensor, classes_C: Tensor) -> Tensor:
    """A column a class, and a last one for all others."""
    hot_NC = value_N[:, None] == classes_C
    return torch.cat([hot_NC, ~hot_NC.any(1, keepdim=True)], 1).double()


def _varies(target: _Target, known_N: Tensor) -> bool:
    return all(bool((answer_NC[known_N] != answer_NC[known_N][:1]).any()) for answer_NC in target.answers.values())


def contents_tables(
    run: Run, settings: ContentsSettings, layers: tuple[int, ...], texts: int, progress: Callable[[], object]
) -> dict[str, dict[str, list[Any]]]:
    """The tables `lens` and `probes` of a run whose texts are all sampled; `progress` is called after every layer."""
    count_RG = probes.resamples(texts, settings.draws, settings.seed or 0)
    fold_G = probes.folds_of(torch.arange(texts), settings.folds, settings.seed or 0)
    lens, probed = Rows(count_RG), Rows(count_RG)
    samples = run.table("samples") if "samples" in run.tables else None
    for layer in layers:
        for part in [] if samples is None else slices(run, samples, layer):
            lens_rows(part, texts, lens)
            probe_rows(part, fold_G, settings, probed)
        progress()
    return {name: columns_of(found.rows) for name, found in (("lens", lens), ("probes", probed)) if found.rows}
