"""Contents of a model's sinks: states at sinks beside states at positions that are like them, along
its writing.
"""

# P populations (sinks, matched positions), N sampled states of one place and layer (or added
# sinks), D hidden size, L layers, C target columns, G texts, R resamples, T sampled steps
import math
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from sinklab.lab.analysis import linear_probes as probes
from sinklab.lab.analysis.linear_probes import Score
from sinklab.lab.checkpoints import Loaded, token_text
from sinklab.lab.data import pack, read_corpus
from sinklab.lab.records import Run, of_twin, open_run
from sinklab.lab.scoring import Moment, Prompt, Task, encode, sample_seed
from sinklab.lab.studies import (
    Meter,
    Progress,
    Row,
    Tick,
    Work,
    heldout_text,
    nothing,
    text_of,
    write_twins,
)
from sinklab.lab.studies.contents.lens import MEASURES, LogitLens, residual_states
from sinklab.lab.studies.contents.samples import PLACES, POPULATIONS, sample_text
from sinklab.lab.studies.contents.study import TARGETS, ContentsSettings

NUMBERS = ("progress", "position")
MEANS = ("committed", "next")
"""Targets that are mean embeddings, the same for both of a pair."""
READ = (*MEASURES, "first", "norm", "variation")
"""Measures of the table `lens`: those of the lens; how often the written token comes first; the
length of the state; its squared distance to the mean of its population over the mean squared length
(0: a constant).
"""


@dataclass(frozen=True)
class Slice:
    """The sampled states of one place and layer, row i of the sinks beside row i of the matched
    positions.
    """

    place: str
    layer: int
    rows: list[pd.DataFrame]
    """Rows of the table `samples` of each of `POPULATIONS`."""
    states_PND: Tensor
    means: dict[tuple[str, str], Tensor]
    """("committed" or "next", "own" or "other") -> (N, D), the same for both populations: a pair is
    of one step. Those of another text at that step are the targets of a probe that reads the moment
    alone.
    """
    text_N: Tensor

    def column(self, name: str) -> Tensor:
        """Numbers of a column of the table, float64 (P, N)."""
        return torch.tensor(np.stack([rows[name].to_numpy(float) for rows in self.rows]))


def slices(run: Run, samples: pd.DataFrame, layer: int, kind: str = "") -> list[Slice]:
    """The sampled states of one layer by place, from the table `samples` of the model or its twin
    of a kind; memory is that of this layer's states.
    """
    table = samples[samples["layer"] == layer].reset_index(drop=True)
    if table.empty:
        return []
    name = of_twin("states", kind)
    parts = run.parts(name)
    # half-way round, and so of another part of the corpus
    half = len(parts) // 2
    another = dict(zip(parts, [*parts[half:], *parts[:half]], strict=True))
    states = []
    means = defaultdict(list)
    for text, step_N in table.groupby("text")["step"]:
        states.append(torch.from_numpy(run.array(name, f"layer{layer}", int(text))))
        for mean in MEANS:
            means[mean, "own"].append(_mean(run, (name, mean, int(text)), step_N))
            means[mean, "other"].append(_mean(run, (name, mean, another[text]), step_N))
    states_ND = torch.cat(states)
    found = []
    for place in PLACES:
        here = table[table["place"] == place]
        if len(here):
            rows = [here[here["population"] == one] for one in POPULATIONS]
            at_PN = torch.tensor(np.stack([of.index for of in rows]))
            own = {key: torch.cat(parts)[at_PN[0]] for key, parts in means.items()}
            text_N = torch.tensor(rows[0]["text"].to_numpy())
            found.append(Slice(place, layer, rows, states_ND[at_PN], own, text_N))
    return found


def _mean(run: Run, where: tuple[str, str, int], step_N: pd.Series) -> Tensor:
    """Rows of states' "committed" or "next" of a text at these steps, (N, D); NaN if it was not
    sampled then.
    """
    number_T = run.array(where[0], "step_number", where[2])
    row_N = np.searchsorted(number_T, step_N).clip(max=len(number_T) - 1)
    known_N1 = torch.from_numpy(number_T[row_N] == step_N.to_numpy())[:, None]
    return torch.from_numpy(run.array(*where))[row_N].where(known_N1, torch.nan)


def scored(
    part: Slice,
    about: Row,
    scores: list[Score],
    facts: list[Row],
    count_RG: Tensor,
) -> list[Row]:
    """Rows of a table of scores: both populations and the first less the second, with intervals
    over the same texts.

    Args:
        scores: of each of `POPULATIONS`.
        facts: more columns, of each population and of their difference.
    """
    values = [(score.value().item(), score.value(count_RG)) for score in scores]
    (one, one_R), (other, other_R) = values
    values.append((one - other, one_R - other_R))
    rows = []
    for population, (value, value_R), more in zip(
        (*POPULATIONS, "difference"), values, facts, strict=True
    ):
        low, high = probes.interval(value, value_R, more["texts"], fitted=scores[0].is_error)
        row = {"place": part.place, "layer": part.layer, **about, "population": population}
        rows.append(row | {"value": value, "low": low, "high": high} | more)
    return rows


def lens_rows(part: Slice, count_RG: Tensor) -> list[Row]:
    """Measures of the lens, as means over the sampled states."""
    counted = {"rows": len(part.text_N), "texts": len(part.text_N.unique())}
    found = []
    for name in READ:
        value_PN = _measure(part, name)
        if bool(value_PN.isfinite().any(1).all()):
            texts = count_RG.shape[1]
            scores = [probes.mean_score(value_N, part.text_N, texts) for value_N in value_PN]
            found += scored(part, {"measure": name}, scores, [counted] * 3, count_RG)
    return found


def _measure(part: Slice, name: str) -> Tensor:
    if name == "variation":
        states_PND = part.states_PND.double()
        length_P1 = states_PND.square().sum(2).mean(1, keepdim=True).clamp(min=1e-300)
        return (states_PND - states_PND.mean(1, keepdim=True)).square().sum(2) / length_P1
    if name == "first":
        rank_PN = part.column("log10_rank")
        return torch.where(rank_PN.isnan(), rank_PN, (rank_PN == 0).double())
    return part.column(name)


@dataclass(frozen=True)
class _Target:
    """Target of a probe; rows without an answer are NaN."""

    name: str
    score: Callable[..., Score]
    answer_PNC: Tensor
    other_NC: Tensor | None = None
    """The answers of another text at the same step."""

    def asked(self, answer_NC: Tensor, known_N: Tensor, text_N: Tensor) -> dict[str, Tensor]:
        """Targets of a regression in these rows: answers of a population, and their controls."""
        known_NC = answer_NC[known_N]
        asked = {"true": known_NC, "shuffled": probes.shuffled(known_NC, text_N, seed=1)}
        if self.other_NC is not None:
            asked["other_text"] = self.other_NC[known_N]
        return asked

    def varies(self, known_N: Tensor) -> bool:
        """Whether both populations have more than one answer in these rows."""
        known_PNC = self.answer_PNC[:, known_N]
        return bool((known_PNC != known_PNC[:, :1]).flatten(1).any(1).all())

    @property
    def known_N(self) -> Tensor:
        """Rows that everything has an answer for."""
        known_N = self.answer_PNC.isfinite().all(2).all(0)
        if self.other_NC is not None:
            known_N &= self.other_NC.isfinite().all(1)
        return known_N


def probe_rows(
    part: Slice, fold_G: Tensor, settings: ContentsSettings, count_RG: Tensor
) -> list[Row]:
    """Scores of probes, sinks and matched positions apart; targets with too few samples are left
    out.
    """
    texts = len(fold_G)
    found = []
    states = [probes.standardised(states_ND, settings.components) for states_ND in part.states_PND]
    alike = defaultdict(list)
    for target in _targets(part, settings.classes):
        known_N = target.known_N
        if len(fold_G[part.text_N[known_N]].unique()) == settings.folds and target.varies(known_N):
            alike[known_N.numpy().tobytes()].append(target)
    # targets with answers in the same rows are asked for at once
    for targets in alike.values():
        known_N = targets[0].known_N
        text_N = part.text_N[known_N]
        counted = dict.fromkeys(("accuracy", "shuffled", "other_text"), math.nan)
        counted |= {"rows": int(known_N.sum()), "texts": len(text_N.unique())}
        pairs: dict[str, list[Row]] = {target.name: [] for target in targets}
        for population, states_ND in enumerate(states):
            asked = {
                (one.name, kind): y_NC
                for one in targets
                for kind, y_NC in one.asked(one.answer_PNC[population], known_N, text_N).items()
            }
            held = probes.ridge(states_ND[known_N], asked, fold_G[text_N])
            for name in pairs:
                own = {
                    kind: (held[name, kind], asked[of, kind]) for of, kind in asked if of == name
                }
                pairs[name].append(own)
        for target in targets:
            scores = []
            facts = []
            for own in pairs[target.name]:
                values = {kind: target.score(*pair, text_N, texts) for kind, pair in own.items()}
                scores.append(values.pop("true"))
                more = {kind: score.value().item() for kind, score in values.items()}
                if target.score is probes.skill:
                    more["accuracy"] = probes.accuracy(*own["true"])
                facts.append(counted | more)
            measure = {probes.explained: "r2"}.get(target.score, "skill")
            about = {"target": target.name, "measure": measure}
            found += scored(part, about, scores, [*facts, counted], count_RG)
    return found


def _targets(part: Slice, classes: int) -> list[_Target]:
    token_PN = part.column("token")
    block_PN = part.column("block")
    # the same classes for both populations: those that are frequent in the two together
    seen, count = token_PN.unique(return_counts=True)
    frequent = seen[count.argsort(descending=True, stable=True)[:classes]]
    answers = {name: part.column(name)[..., None] for name in NUMBERS}
    answers |= {name: part.means[name, "own"].expand(2, -1, -1) for name in MEANS}
    answers |= {"token": _one_hot(token_PN, frequent)}
    answers |= {"block": _one_hot(block_PN, block_PN.unique())}
    scores = {"token": probes.skill, "block": probes.skill}
    return [
        _Target(
            name,
            scores.get(name, probes.explained),
            answers[name],
            part.means.get((name, "other")),
        )
        for name in TARGETS
    ]


def _one_hot(value_PN: Tensor, classes_C: Tensor) -> Tensor:
    """A column a class, and a last one for all others."""
    hot_PNC = value_PN[..., None] == classes_C
    return torch.cat([hot_PNC, ~hot_PNC.any(-1, keepdim=True)], -1).double()


def write_readings(work: Work, kind: str = "") -> None:
    """The tables `lens` and `probes` of a run with all texts sampled, or of its control of a
    kind.
    """
    done = open_run(work.run.path)
    settings = work.settings
    texts = len(work.plan.tasks)
    work.progress.stage("reading the states")
    progress = work.progress.counter(len(work.plan.layers))
    count_RG = probes.resamples(texts, settings.resamples, settings.seed or 0)
    fold_G = probes.folds_of(torch.arange(texts), settings.folds, settings.seed or 0)
    found: dict[str, list[Row]] = {"lens": [], "probes": []}
    name = of_twin("samples", kind)
    samples = pd.DataFrame({"layer": []})
    if name in done.tables:
        samples = done.table(name)
    for layer in work.plan.layers:
        for part in slices(done, samples, layer, kind):
            found["lens"] += lens_rows(part, count_RG)
            found["probes"] += probe_rows(part, fold_G, settings, count_RG)
        progress()
    for name, rows in found.items():
        if rows:
            work.run.table(of_twin(name, kind), rows)


@dataclass(frozen=True)
class Plan:
    """Texts to write, layers to read, and the lens."""

    tasks: list[Task]
    layers: tuple[int, ...]
    lens: LogitLens


def prepare(loaded: Loaded, settings: ContentsSettings, progress: Progress) -> Plan:
    """The texts, the layers and the lens.

    Raises:
        ValueError: for an autoregressive model, a cache, layers that are not there, fewer texts
            than folds, and anything that the decoder refuses.
    """
    if not loaded.is_diffusion:
        raise ValueError(
            f"what a future sink carries is asked of models that denoise, but {loaded.name} is "
            f"{loaded.family}: it has no positions that are still to come"
        )
    with residual_states(loaded.model) as states:
        known = range(states.layers + 1)
    layers = tuple(sorted({*(settings.layers or known)}))
    wrong = [layer for layer in settings.layers if layer not in known]
    if wrong:
        raise ValueError(
            f"layers are numbers from 0 to {known[-1]}, which leaves the last layer, but "
            f"{wrong[0]} is not"
        )
    if settings.prompts:
        prompts = [encode(loaded, text, settings.chat) for text in settings.prompts]
    else:
        prompts = _beginnings(loaded, settings)
    if len(prompts) < settings.folds:
        raise ValueError(
            f"probes are tested on texts they have not seen, and {settings.folds} folds need as "
            f"many texts, but there are {len(prompts)}; give more prompts or fewer folds"
        )
    tasks = [
        Task(loaded, prompt, settings, sample_seed(settings.seed or 0, text))
        for text, prompt in enumerate(prompts)
    ]
    for task in tasks:
        task.check()
    return Plan(tasks, layers, _lens(loaded, settings))


def _lens(loaded: Loaded, settings: ContentsSettings) -> LogitLens:
    config = loaded.config
    vocabulary = None
    if settings.text_only:
        vocabulary = config.text_vocab_size
    return LogitLens.of(loaded.model, hidden_ids=(config.mask_token_id,), vocabulary=vocabulary)


def _beginnings(loaded: Loaded, settings: ContentsSettings) -> list[Prompt]:
    """Beginnings from a corpus, spread evenly over it. Raises ValueError for one that is too
    short.
    """
    if settings.chat:
        raise ValueError(
            "chat puts prompts into a chat format, but the beginnings come from a corpus; give "
            "prompts"
        )
    if settings.prompt_tokens == 0:
        return [Prompt("", (), ())] * settings.rows
    source = heldout_text(settings.heldout)
    rows_RS = pack(read_corpus(source), loaded.needed_tokenizer(), settings.prompt_tokens)
    if len(rows_RS) < settings.rows:
        raise ValueError(
            f"{source} holds {len(rows_RS)} beginnings of {settings.prompt_tokens} tokens, but "
            f"rows={settings.rows} "
            "are to be written; give another corpus, fewer texts or shorter beginnings"
        )
    chosen = np.linspace(0, len(rows_RS) - 1, settings.rows).round().astype(int)
    texts = loaded.needed_tokenizer().batch_decode(rows_RS[chosen].tolist())
    return [
        Prompt(text, tuple(row), (False,) * len(row))
        for text, row in zip(texts, rows_RS[chosen].tolist(), strict=True)
    ]


def write_texts(work: Work) -> None:
    """Write the texts that are missing, and the samples of each as its part."""
    settings, tasks = work.settings, work.plan.tasks
    meter = Meter(work.progress, len(work.samples), settings.steps or settings.new_tokens)
    for text in work.samples:
        meter.stage(f"writing text {text + 1} of {len(tasks)} and sampling states")
        _sample(work, text, tasks[text], meter.step)
        meter.end()


def _sample(
    work: Work,
    text: int,
    task: Task,
    step: Tick,
    whole: Sequence[Moment] = (),
    kind: str = "",
) -> None:
    """Write everything about one text; the text itself last, so that it marks the end."""
    run = work.run
    random = np.random.default_rng([work.settings.seed or 0, text])
    kept = sample_text(task, work.settings, work.plan.layers, random, step, whole)
    if kept.rows:
        arrays, dims = kept.arrays()
        run.arrays(of_twin("states", kind), arrays, dims, dtype="float32", part=text)
        shift = int(bool(task.loaded.config.logit_shift))
        table = kept.table(text, _lens(task.loaded, work.settings), shift)
        run.table(of_twin("samples", kind), table, part=text)
    for name, rows in {"looks": kept.looks, "added": kept.added}.items():
        if rows:
            table = [{"text": text, **row} for row in rows]
            run.table(of_twin(name, kind), table, part=text)
    if kind:
        return
    written = kept.final_S[kept.open_S]
    about = {
        "text": text,
        "prompt": task.prompt.text,
        "completion": text_of(task.loaded, written),
        "seed": task.seed,
        "token_ids": written.tolist(),
    }
    run.table("texts", [about], part=text)


def read_states(work: Work) -> None:
    """Write the readings of lens and probes in all texts, and in those texts as controls
    read them.
    """
    run = work.run
    plan = work.plan
    done = open_run(run.path)
    if "added" in done.tables and not run.has("added_sinks"):
        run.table("added_sinks", _added_sinks(done, work.loaded, plan.lens))
    started = time.perf_counter()
    if not (run.has("lens") and run.has("probes")):
        write_readings(work)
    reading = time.perf_counter() - started
    # once for both twins: the canvases that the model read, step by step
    moments = lru_cache(None)(lambda text: list(plan.tasks[text].moments()))

    def seconds() -> float:
        started = time.perf_counter()
        moments(0)
        return reading + (time.perf_counter() - started) * len(plan.tasks)

    def write(twin: Loaded, kind: str) -> None:
        for text, task in enumerate(plan.tasks):
            _sample(work, text, replace(task, loaded=twin), nothing, moments(text), kind)
        write_readings(work, kind)

    write_twins(work, seconds, write)


def _added_sinks(run: Run, loaded: Loaded, lens: LogitLens) -> list[Row]:
    """A row per layer and added sink: the attention it gets, how its state differs between texts,
    and its likeliest token.
    """
    share = run.table("added").groupby(["layer", "sink"])["share"].mean()
    seen = []
    if "states" in run.array_files:
        parts = [part for part in run.parts("states") if "added" in run.dims("states", part)]
        seen = [run.array("states", "added", part) for part in parts]
    rows = []
    for (layer, sink), value in share.items():
        row = {"layer": layer, "sink": sink, "share": value, "texts": len(seen)}
        row |= dict.fromkeys(("norm", "spread", "entropy", "top_probability"), math.nan)
        row["top_token"] = ""
        if seen:
            states_TD = torch.from_numpy(np.stack([one[layer, sink] for one in seen]))
            log_V = lens.log_probabilities(lens.logits(states_TD[:1]))[0]
            row |= {
                "norm": float(states_TD[0].norm()),
                "spread": float((states_TD - states_TD[0]).abs().max()),
                "entropy": float(torch.special.entr(log_V.exp()).sum()),
                "top_probability": float(log_V.max().exp()),
                "top_token": token_text(loaded.tokenizer, int(log_V.argmax())),
            }
        rows.append(row)
    return rows
