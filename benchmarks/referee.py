"""Whether margins and a probe's noise foretell how many texts rounding changes: fitted on half of
the models, judged on the other half.

    python benchmarks/referee.py [--keep FILE] [--write]

Each model decodes the same texts twice, the second time with one thing different: the attention
backend, the fast decoder, the batch and its padding, threads, the type of the numbers. A text
counts as changed where a choice (which position, which token) differs anywhere. Of the first half
of the models it is read how large rounding errors of margins are, as multiples of what a jitter
moves them by; of the other half, other texts, how many texts change is foretold from their margins
and that multiple. Beside it stands what is foretold when a kind of difference changes a constant
share of texts. ``--write`` puts the table into docs/reproducibility.md and the result into
benchmarks/results.

How large the rounding error of a margin is, for this model at this place, is asked by Monte Carlo
arithmetic (Parker 1997): every module's output is moved by a random relative error of known size,
and the margins are read again.
"""

# B batch rows, S canvas positions, M candidates in row-major order, V vocabulary, N texts or rows
# under jitter, D quantiles of the noise

from __future__ import annotations

import argparse
import copy
import datetime
import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import scipy
import torch
from measure import RESULTS, environment
from torch import Tensor, nn
from transformers import LlamaConfig, Qwen3Config

from sinklab.core.subject import Canvas, DecodingSettings, Step, UnmaskingRule
from sinklab.core.subject.config import DiffusionLMConfig
from sinklab.core.subject.diffusion_lm import DiffusionLM
from sinklab.lab.analysis.estimates import LEVEL
from sinklab.lab.checkpoints.loading import Loaded, load
from sinklab.lab.scoring.writing import sample_seed

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reproducibility.md"
MARK, END = "<!-- referee -->\n", "<!-- end -->"
NEW_TOKENS, BATCH, PADDING = 16, 16, 8
TYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
HOW = (
    DecodingSettings(seed=0),
    DecodingSettings(rule="topk_margin", seed=0),
    DecodingSettings(steps=NEW_TOKENS // 2, seed=0),
    DecodingSettings(rule="entropy", block_length=12, seed=0),
    DecodingSettings(schedule="threshold:threshold=0.5", seed=0),
)
"""Decoders, dealt to the models in turn."""


KINDS = ("token", "order", "threshold")
"""Kinds of margins. token: logit of the committed token less that of the runner-up. order: score of
the last position chosen less that of the best not chosen. threshold: distance of a confidence to
the threshold of the schedule.
"""
JITTER = 2.0**-9
"""Relative error of a probe, or the type's own if that is coarser: far above rounding in float32,
and still small enough that margins move in proportion.
"""
PROBES = 4


QUANTILES = 99
WITHIN = ("backend", "fast", "batch")
"""Possible differences between runs with one type of numbers; another number of threads changed
nothing.
"""


@dataclass(eq=False)
class Watch(UnmaskingRule):
    """A rule that lets its candidates be read."""

    rule: Any
    seen: Any = None
    """The candidates of the last evaluation."""

    def __post_init__(self) -> None:
        # those of the rule, on which schedules and sampling depend
        self.measure = self.rule.measure  # type: ignore[misc]
        self.sees_truncation = self.rule.sees_truncation
        self.usual_schedule = self.rule.usual_schedule

    def __call__(self, candidates: Any) -> Tensor:
        """The scores of the rule."""
        self.seen = candidates
        return self.rule(candidates)


def _order(score: np.ndarray, taken: np.ndarray, left: np.ndarray) -> float:
    return score[taken].min() - score[left].max()


def _threshold(score: np.ndarray, rest: np.ndarray, sides: np.ndarray, bound: float) -> float:
    return (sides * (score[rest] - bound)).min()


def watched_steps(
    loaded: Loaded, canvas: Canvas, settings: DecodingSettings, plain: bool = False
) -> Iterator[tuple[Step, Any]]:
    """The steps of a greedy decoder, each with the `Candidates` that it chose from; never by a
    fast decoder if plain.
    """
    watch = Watch(settings.values()["rule"])
    denoiser = loaded.model.denoiser(canvas.attention_mask, plain=plain)
    for step in settings.decode(denoiser, canvas, rule=watch, **loaded.model.config.decoding):
        yield step, watch.seen


@contextmanager
def jittered(model: nn.Module, size: float, seed: int) -> Iterator[None]:
    """Every leaf module's output times 1 + size × u within the block, u uniform in −1 … 1 and new
    at every call.
    """
    device = next(model.parameters()).device
    source = torch.Generator(device).manual_seed(seed)

    def move(module: nn.Module, given: Any, out: Any) -> Any:
        if not isinstance(out, Tensor) or not out.is_floating_point():
            return out
        noise = torch.rand(out.shape, generator=source, device=device, dtype=torch.float32)
        return out * (1 + size * (2 * noise - 1)).to(out.dtype)

    with ExitStack() as hooks:
        for module in model.modules():
            if not any(True for _ in module.children()) and any(True for _ in module.parameters()):
                hooks.callback(module.register_forward_hook(move).remove)
        yield


class Choices:
    """Choices of one step, a line for each token and then for each row; their margins under any
    logits.
    """

    def __init__(self, step: Step, seen: Any, threshold: float | None) -> None:
        self.mask_id, self.seen = seen.mask_id, seen
        self.chosen_M = step.committed_BS[step.candidates_BS]
        self.token_N1 = seen.tokens_M[self.chosen_M][:, None].clone()
        tensors = (seen.rows_M, self.chosen_M, step.score_M.double(), seen.columns_M)
        rows, chosen, score, columns = (one.cpu().numpy() for one in tensors)
        written = (
            rows[chosen],
            columns[chosen],
            self.token_N1[:, 0].tolist(),
            self._tokens(seen.logits_MV)[1],
        )
        lines: list[Any] = [(row, "token", *more) for row, *more in zip(*written, strict=True)]
        self._ranked: list[Callable[[np.ndarray], float]] = []
        bound = np.inf if threshold in (None, 1) else threshold
        for row in {*rows[chosen].tolist()}:
            here = np.flatnonzero(rows == row)
            taken, left = here[chosen[here]], here[~chosen[here]]
            # the best is written whatever the threshold says of it
            rest = here[here != here[score[here].argmax()]]
            sides = np.where(score[rest] >= bound, 1, -1)
            sure = int((sides > 0).sum())
            if not sure or len(taken) > sure + 1:
                # one, or a quota, is filled in order; what is left may pass the threshold as well
                rest, sides = left, np.full(len(left), -1)
            if len(left) and rest is left:
                self._ranked.append(partial(_order, taken=taken, left=left))
                last, next_ = taken[score[taken].argmin()], left[score[left].argmax()]
                lines.append((row, "order", columns[last], -1, columns[next_]))
            if len(rest) and bound < np.inf:
                self._ranked.append(partial(_threshold, rest=rest, sides=sides, bound=bound))
                nearest = columns[rest[np.abs(score[rest] - bound).argmin()]]
                lines.append((row, "threshold", nearest, -1, nearest))
        self.lines = pd.DataFrame(lines, columns=["row", "kind", "column", "token", "other"])

    def margins(self, logits_MV: Tensor, score_M: Tensor) -> np.ndarray:
        """Margin of each line; below 0 if such logits choose otherwise."""
        score = score_M.double().cpu().numpy()
        return np.concatenate(
            [self._tokens(logits_MV)[0], [margin(score) for margin in self._ranked]]
        )

    def again(self, rule: Any, logits_MV: Tensor) -> np.ndarray:
        """The margins under other logits of the same canvas, in which the same tokens are
        barred.
        """
        never_MV = self.seen.logits_MV == -torch.inf
        other = replace(
            self.seen, logits_MV=logits_MV[:, : never_MV.shape[1]].masked_fill(never_MV, -torch.inf)
        )
        return self.margins(other.logits_MV, rule(other))

    def _tokens(self, logits_MV: Tensor) -> tuple[np.ndarray, np.ndarray]:
        """Margins of the committed tokens, and their runners-up."""
        rest_NV = logits_MV[self.chosen_M].double()
        own_N = rest_NV.gather(1, self.token_N1)[:, 0]
        rest_NV.scatter_(1, self.token_N1, -torch.inf)
        rest_NV[:, self.mask_id : self.mask_id + 1] = -torch.inf
        best_N, other_N = rest_NV.max(1)
        return (own_N - best_N).cpu().numpy(), other_N.cpu().numpy()


def measure_margins(
    loaded: Loaded,
    canvas: Canvas,
    settings: DecodingSettings,
    *,
    seed: int = 0,
    probes: int = PROBES,
    plain: bool = False,
) -> tuple[Tensor, pd.DataFrame]:
    """The decoded ids (B, S) and the margin of every choice, a line each.

    Columns: row, step (of this row, which may wait for others), kind (`KINDS`), column (of the
    canvas; of the last position chosen), token (committed), other (the runner-up: its id, or the
    column of the best position not chosen), margin, and noise: how far a jitter of `JITTER` moves
    the margin, root mean square over the probes, NaN without.

    Args:
        loaded: a diffusion model.
        canvas: to be written, in one batch.
        settings: how; greedy.
        probes: copies of the batch that are read under jitter at each step.
        seed: of the jitter.
        plain: never by a fast decoder.
    """
    model: Any = loaded.model
    values = settings.values()
    rule, threshold = values["rule"], getattr(values["schedule"], "threshold", None)
    size = max(JITTER, torch.finfo(model.dtype).eps)
    still = model.denoiser(canvas.attention_BS.repeat(probes, 1) if probes else None, plain=True)
    uncached = None if settings.cache == "none" else model.denoiser(canvas.attention_BS, plain=True)
    tables, ids_BS, own_B = list[pd.DataFrame](), canvas.ids_BS, torch.tensor(-1)
    for step, seen in watched_steps(loaded, canvas, settings, plain):
        here, noise = Choices(step, seen, threshold), np.nan
        margin = here.margins(seen.logits_MV, step.score_M)
        if probes:
            wanted_BS = step.candidates_BS
            # keys that a cache has kept are no rounding: beside them the jitter is that of a canvas
            # read whole
            base = (
                margin
                if uncached is None
                else here.again(rule, uncached(step.before_BS, wanted_BS))
            )
            with jittered(model, size, sample_seed(seed, step.index)):
                logits_NV = still(step.before_BS.repeat(probes, 1), wanted_BS.repeat(probes, 1))
            shifts = [here.again(rule, logits_MV) - base for logits_MV in logits_NV.chunk(probes)]
            noise = np.sqrt(np.mean(np.square(shifts), 0)) * JITTER / size
        own_B = own_B + step.candidates_BS.any(1).cpu()
        numbers = own_B[here.lines["row"].tolist()].tolist()
        tables.append(here.lines.assign(step=numbers, margin=margin, noise=noise))
        ids_BS = step.ids_BS
    return ids_BS, pd.concat(tables, ignore_index=True)


def first_difference(one: pd.DataFrame, other: pd.DataFrame) -> pd.Series:
    """First step, by row, at which two tables of `margins` chose differently; NaN if they never
    did.
    """
    tokens = (
        table.loc[table["kind"] == "token", ["row", "step", "column", "token"]]
        for table in (one, other)
    )
    pair = pd.merge(*tokens, how="outer", indicator="where")
    apart = pair[pair["where"] != "both"].groupby("row")["step"].min()
    return apart.reindex(sorted({*one["row"]}))


@dataclass(frozen=True)
class Noise:
    """Rounding error of a margin under one difference, as multiples of its change under a jitter.

    Fitted over models: the logarithm of the multiple is Student's t over
    models.
    """

    kind: str
    """Type of the numbers and the difference, such as bfloat16.batch or float32.float16."""
    log: float
    """Mean over models of the natural logarithm of the multiple."""
    spread: float
    """Standard deviation of a further model's."""
    freedom: int
    """Degrees of freedom of the spread."""

    def multiples(self) -> np.ndarray:
        """Equally likely values for a further model (D,)."""
        places = (np.arange(QUANTILES) + 0.5) / QUANTILES
        return np.exp(self.log + self.spread * scipy.stats.t.ppf(places, self.freedom))


def pooled_noise(noise: np.ndarray, probes: int) -> tuple[np.ndarray, float]:
    """The noise of each margin drawn towards that of all, and its degrees of freedom.

    A few probes know the noise of one margin badly; how much the margins of one kind differ in
    truth says how far they may learn from one another (Smyth 2004, empirical Bayes of variances).
    Noise of 0 stays 0.
    """
    known, digamma = np.square(noise[noise > 0]), scipy.special.digamma
    if len(known) < 2:
        return noise, float(probes)
    level = np.log(known) - digamma(probes / 2) + math.log(probes / 2)
    excess = float(level.var(ddof=1) - scipy.special.polygamma(1, probes / 2))
    # the prior's freedom is where the trigamma function of its half is the excess
    half = scipy.optimize.brentq(
        lambda x: scipy.special.polygamma(1, x) - max(excess, 0.02), 1e-3, 100
    )
    middle = math.exp(level.mean() + digamma(half) - math.log(half))
    whole = (2 * half * middle + probes * np.square(noise)) / (2 * half + probes)
    return np.where(noise > 0, np.sqrt(whole), 0.0), 2 * half + probes


def change_chances(margins: pd.DataFrame, noise: Noise, probes: int) -> np.ndarray:
    """The chance of each text to take another way somewhere, for each of the `Noise.multiples` (D,
    N).

    Args:
        margins: of all texts, with the noise that so many probes found.
        noise: of the kind of difference.
        probes: how many.
    """
    multiples, (_, place) = noise.multiples(), np.unique(margins["row"], return_inverse=True)
    stays = np.zeros((len(multiples), place.max() + 1))
    for kind in margins["kind"].unique():
        here = (margins["kind"] == kind).to_numpy()
        scale, freedom = pooled_noise(margins["noise"].to_numpy()[here], probes)
        margin = margins["margin"].to_numpy()[here]
        for number, one in enumerate(multiples):
            ratio = np.divide(
                margin, scale * one, out=np.full(len(margin), np.inf), where=scale > 0
            )
            kept = np.log1p(-scipy.stats.t.sf(ratio, freedom))
            stays[number] += np.bincount(place[here], kept, stays.shape[1])
    return 1 - np.exp(stays)


def counted(chances_DN: np.ndarray, level: float = LEVEL) -> tuple[float, int, int]:
    """Mean and interval of how many of N independent events happen, their chances being any of D
    sets.
    """
    total = np.zeros(chances_DN.shape[1] + 1)
    for chances_N in chances_DN:
        counts = np.ones(1)
        for chance in chances_N:
            counts = np.convolve(counts, [1 - chance, chance])
        total += counts / len(chances_DN)
    below = total.cumsum()
    low, high = (int(np.searchsorted(below, share)) for share in ((1 - level) / 2, (1 + level) / 2))
    return float(chances_DN.sum(1).mean()), low, min(high, chances_DN.shape[1])


def random_model(number: int) -> Loaded:
    """A model of a random shape with random weights, some with a sink or a gate, the same for the
    same number.
    """
    draw = np.random.default_rng([7, number])
    heads, kind = int(draw.choice([2, 4])), draw.choice(["none", "none", "token", "kv"])
    width = heads * 16
    shape: dict[str, Any] = {
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_attention_heads": heads,
    }
    shape |= {
        "num_key_value_heads": int(draw.choice([1, heads])),
        "num_hidden_layers": int(draw.choice([2, 3])),
    }
    shape |= {"vocab_size": int(draw.choice([60, 200, 600])), "max_position_embeddings": 128}
    config = (Qwen3Config if number % 2 else LlamaConfig)(
        initializer_range=float(draw.uniform(0.08, 0.3)), **shape
    )
    extra = {} if kind == "none" else {"sink_kind": str(kind), "sink_count": 1}
    extra |= {"gate": "elementwise"} if draw.random() < 0.2 else {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(number)
        model = DiffusionLM(DiffusionLMConfig(config, mask_token_id=2, **extra)).eval()
    return replace(load("tiny"), model=model, tokenizer=None, name=f"random-{number}")


def models() -> dict[str, Callable[[], Loaded]]:
    """All of them; every other one is for the fit."""
    first: dict[str, Callable[[], Loaded]] = {
        "tiny": lambda: load("tiny"),
        "tiny-sink": lambda: load("tiny-sink"),
    }
    return {
        f"random-{number}": (lambda number=number: random_model(number)) for number in range(10)
    } | first


def canvas_for(loaded: Loaded, texts: int, seed: int) -> Canvas:
    """Prompts of 4 to 12 tokens: of the excerpt in the package, or random ids where there is no
    tokenizer.
    """
    draw, config = np.random.default_rng(seed), loaded.model.config
    lengths = draw.integers(4, 13, texts)
    if loaded.tokenizer is None:
        prompts = [
            draw.integers(3, config.backbone.vocab_size, length).tolist() for length in lengths
        ]
    else:
        path = ROOT / "src/sinklab/lab/checkpoints/packaged/heldout.jsonl"
        whole = " ".join(
            json.loads(line)["text"] for line in path.read_text("utf-8").splitlines()[:40]
        )
        ids: Any = loaded.tokenizer(whole, add_special_tokens=False)["input_ids"]
        starts = draw.integers(0, len(ids) - 20, texts)
        prompts = [
            ids[start : start + length] for start, length in zip(starts, lengths, strict=True)
        ]
    return Canvas.from_prompts(
        prompts, new_tokens=NEW_TOKENS, mask_id=config.mask_token_id, pad_id=0
    )


def rows_of(canvas: Canvas, rows: slice, padding: int = 0) -> Canvas:
    """Some rows, with columns of padding in front."""
    front = torch.zeros(len(canvas.ids_BS[rows]), padding, dtype=torch.long)
    whole = (canvas.ids_BS, canvas.attention_BS, canvas.open_BS)
    return Canvas(
        *(torch.cat([front.to(one.dtype), one[rows]], 1) for one in whole), canvas.mask_id
    )


def decoded(
    loaded: Loaded,
    canvas: Canvas,
    how: DecodingSettings,
    *,
    size: int = BATCH,
    padding: int = 0,
    **more: Any,
) -> pd.DataFrame:
    """The margins of all texts, written in batches of so many rows; columns are those of the
    canvas.
    """
    tables = []
    for start in range(0, len(canvas.ids_BS), size):
        part = rows_of(canvas, slice(start, start + size), padding)
        table = measure_margins(loaded, part, how, **{"probes": 0, "plain": True} | more)[1]
        places = table["kind"] != "token"
        table["column"] -= padding
        table.loc[places, "other"] -= padding
        tables.append(table.assign(row=table["row"] + start))
    return pd.concat(tables, ignore_index=True)


@contextmanager
def eager(loaded: Loaded) -> Iterator[None]:
    """The other attention backend for the length of the block."""
    loaded.model.set_attn_implementation("eager")
    yield
    loaded.model.set_attn_implementation("sdpa")


@contextmanager
def two_threads() -> Iterator[None]:
    """Two threads for the length of the block."""
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


def pairs(
    whole: Loaded, canvas: Canvas, how: DecodingSettings
) -> Iterator[tuple[str, pd.DataFrame, pd.DataFrame]]:
    """(kind, margins of the reference with their noise, margins with one thing different)."""
    of_type = {
        name: replace(whole, model=copy.deepcopy(whole.model).to(dtype))
        for name, dtype in TYPES.items()
    }
    for name in ("float32", "bfloat16"):
        one = of_type[name]
        reference = decoded(one, canvas, how, probes=PROBES)
        yield f"{name}.nothing", reference, decoded(one, canvas, how)
        with eager(one):
            yield f"{name}.backend", reference, decoded(one, canvas, how)
        if one.model.denoiser().is_fast:
            yield f"{name}.fast", reference, decoded(one, canvas, how, plain=False)
        yield f"{name}.batch", reference, decoded(one, canvas, how, size=5, padding=PADDING)
        if name == "float32":
            with two_threads():
                yield f"{name}.threads", reference, decoded(one, canvas, how)
        for other in {"float32": ("float64", "bfloat16", "float16"), "bfloat16": ("float16",)}.get(
            name, ()
        ):
            yield f"{name}.{other}", reference, decoded(of_type[other], canvas, how)
        yield from planted(one, name, reference, canvas, how)


def planted(
    one: Loaded, name: str, reference: pd.DataFrame, canvas: Canvas, how: DecodingSettings
) -> Iterator[tuple[str, pd.DataFrame, pd.DataFrame]]:
    """Differences that are no rounding: what attention adds in the first layer is larger."""
    with _layer(one, 1.02):
        yield f"{name}.planted: a layer 2 % larger", reference, decoded(one, canvas, how)
    with _layer(one, 1.1):
        yield f"{name}.planted: a layer 10 % larger", reference, decoded(one, canvas, how)


@contextmanager
def _layer(loaded: Loaded, factor: float) -> Iterator[None]:
    hook = loaded.model.model.layers[0].self_attn.o_proj.register_forward_hook(
        lambda module, given, out: out * factor
    )
    yield
    hook.remove()


def multiple(reference: pd.DataFrame, other: pd.DataFrame) -> float:
    """Rounding errors of margins as a multiple of the jitter's, over what was chosen before the
    first difference.
    """
    until = reference["row"].map(first_difference(reference, other)).fillna(np.inf)
    keys = ["row", "step", "kind", "column"]
    both = reference[reference["step"] < until].merge(
        other[[*keys, "margin"]], on=keys, suffixes=("", "_other")
    )
    found = []
    for _, lines in both.groupby("kind"):
        error = (lines["margin_other"] - lines["margin"]).abs().sum()
        found.append((error / lines["noise"].sum() if lines["noise"].sum() else np.nan, len(lines)))
    ratios, counts = np.array(found or [(np.nan, 1)]).T
    known = np.isfinite(ratios)
    # of normal errors: mean absolute value over standard deviation
    return (
        float(np.average(ratios[known], weights=counts[known]) / np.sqrt(2 / np.pi))
        if known.any()
        else np.nan
    )


def measured(texts: int, only: int | None) -> pd.DataFrame:
    """A line for each model and kind: the multiple, how many texts changed, and the margins."""
    lines = []
    for number, (name, make) in enumerate([*models().items()][:only]):
        began, loaded = time.process_time(), make()
        canvas, how = canvas_for(loaded, texts, 100 + number), HOW[number // 2 % len(HOW)]
        about = {
            "model": name,
            "half": "judged" if number % 2 else "fit",
            "texts": texts,
            "rule": how.rule,
        }
        for kind, reference, other in pairs(loaded, canvas, how):
            changed = int(first_difference(reference, other).notna().sum())
            line = {
                "kind": kind,
                "changed": changed,
                "multiple": multiple(reference, other),
                "margins": reference,
            }
            lines.append(about | line)
        print(f"{name}: {time.process_time() - began:.0f} s of processor time", flush=True)
    return pd.DataFrame(lines)


def is_rounding(kind: str) -> bool:
    """Whether a kind of difference is one of rounding, not nothing and not planted."""
    return not kind.endswith(".nothing") and "planted" not in kind


def fitted(found: pd.DataFrame) -> dict[str, Noise]:
    """The noise of each kind from the half that is for it; none where nothing moved, or in one
    model alone (threads).

    The spreads of few models learn from one another, as the noise of margins does.
    """
    fit = found[(found["half"] == "fit") & found["kind"].map(is_rounding) & (found["multiple"] > 0)]
    fit = fit[fit.groupby("kind")["model"].transform("count") > 1]
    logs = np.log(fit["multiple"]).groupby(fit["kind"])
    models = int(logs.count().min())
    spreads, freedom = pooled_noise(logs.std().to_numpy(), models - 1)
    further = spreads * math.sqrt(1 + 1 / models)
    return {
        kind: Noise(kind, round(float(log), 3), round(float(spread), 3), round(freedom))
        for (kind, log), spread in zip(logs.mean().items(), further, strict=True)
    }


def constant(found: pd.DataFrame, kind: str, texts: int) -> tuple[int, int]:
    """The interval by a constant share of texts, with the spread between models that the fitting
    half has.
    """
    fit = found[(found["half"] == "fit") & (found["kind"] == kind)]
    share = fit["changed"] / fit["texts"]
    mean = (fit["changed"].sum() + 0.5) / (fit["texts"].sum() + 1)
    excess = max(float(share.var()) - mean * (1 - mean) / texts, 1e-4) / (mean * (1 - mean))
    weight = 1 / min(excess, 0.9) - 1
    law = scipy.stats.betabinom(texts, mean * weight, (1 - mean) * weight)
    return int(law.ppf(0.025)), int(law.ppf(0.975))


def judged(found: pd.DataFrame, noise: dict[str, Noise]) -> pd.DataFrame:
    """A line for each pair of the other half: what was foretold, by margins and by a constant
    share, and what came.
    """
    lines = []
    for one in found[found["half"] == "judged"].to_dict("records"):
        kind, texts = one["kind"], one["texts"]
        line = {
            name: one[name] for name in ("model", "rule", "kind", "texts", "changed", "multiple")
        }
        if is_rounding(kind):
            nothing = 0.0, 0, 0
            told = (
                counted(change_chances(one["margins"], noise[kind], PROBES))
                if kind in noise
                else nothing
            )
            line |= dict(zip(("mean", "low", "high"), told, strict=True))
            line |= dict(
                zip(("constant_low", "constant_high"), constant(found, kind, texts), strict=True)
            )
        elif "planted" in kind:
            # where rows are computed one by one, a batch moves nothing
            names = [f"{kind.split('.')[0]}.{what}" for what in WITHIN]
            within = [noise[name] for name in names if name in noise]
            line["high"] = max(
                counted(change_chances(one["margins"], each, PROBES))[2] for each in within
            )
            line["multiple_high"] = max(
                float(np.quantile(each.multiples(), 0.975)) for each in within
            )
        lines.append(line)
    return pd.DataFrame(lines)


def summary(lines: pd.DataFrame, noise: dict[str, Noise]) -> list[dict[str, Any]]:
    """A line for each kind, and for all together."""
    told = lines[lines["kind"].map(is_rounding)]
    open_ = told[told["mean"] >= 0.5]
    # what is far below any margin needs one line
    fine = [kind for kind in told["kind"].unique() if kind not in noise or noise[kind].log < -5]
    together = "float32." + ", ".join(kind.split(".")[1] for kind in fine)
    groups = [
        *told.groupby(told["kind"].where(~told["kind"].isin(fine), together), sort=False),
        ("all", told),
    ]
    groups.append(("of these, half a text or more is foretold", open_))
    table = []
    for kind, part in groups:
        inside = part["changed"].between(part["low"], part["high"])
        by_share = part["changed"].between(part["constant_low"], part["constant_high"])
        row = {
            "kind": kind,
            "pairs": len(part),
            "foretold": part["mean"].mean(),
            "changed": part["changed"].mean(),
        }
        row |= {"covered": inside.mean(), "width": (part["high"] - part["low"]).mean()}
        row |= {"constant_covered": by_share.mean()}
        row["constant_width"] = (part["constant_high"] - part["constant_low"]).mean()
        row["multiple"] = math.exp(noise[kind].log) if kind in noise else math.nan
        table.append(
            {
                name: round(value, 4) if isinstance(value, float) else value
                for name, value in row.items()
            }
        )
    return table


def printed(table: list[dict[str, Any]]) -> str:
    """The table as it stands in docs/."""
    names = (
        "what differs",
        "pairs",
        "noise",
        "texts changed, mean",
        "foretold",
        "covered",
        "width",
    )
    rows = [
        "| " + " | ".join([*names, "constant share: covered", "width"]) + " |",
        "|" + "---|" * 9,
    ]
    for one in table:
        noise = "–" if math.isnan(one["multiple"]) else f"{one['multiple']:.2g}"
        cells = [
            one["kind"].replace(".", ", ", 1),
            one["pairs"],
            noise,
            f"{one['changed']:.2f}",
            f"{one['foretold']:.2f}",
        ]
        cells += [f"{one['covered']:.1%}", f"{one['width']:.1f}", f"{one['constant_covered']:.1%}"]
        rows.append("| " + " | ".join(map(str, [*cells, f"{one['constant_width']:.1f}"])) + " |")
    return "\n".join(rows) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--texts", type=int, default=12)
    parser.add_argument("--only", type=int, help="the first so many models")
    parser.add_argument(
        "--keep",
        type=Path,
        help="file that measurements are kept in, and taken from where it is there",
    )
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    began = time.process_time()
    if given.keep and given.keep.is_file():
        found = pd.read_pickle(given.keep)
    else:
        found = measured(given.texts, given.only)
        found.attrs["processor_s"] = round(time.process_time() - began)
        if given.keep:
            found.to_pickle(given.keep)
    noise = fitted(found)
    lines = judged(found, noise)
    table = summary(lines, noise)
    null, planted_ = (
        lines[lines["kind"].str.endswith(".nothing")],
        lines[lines["kind"].str.contains("planted")],
    )
    facts = {
        "null_pairs": len(null),
        "null_changed": int(null["changed"].sum()),
        "planted_pairs": len(planted_),
    }
    # by how many texts change, and by how large the errors of margins are: beyond the upper ends
    # for rounding
    for kind, part in planted_.groupby("kind"):
        by_texts, by_margins = (
            part["changed"] > part["high"],
            part["multiple"] > part["multiple_high"],
        )
        facts[kind] = {
            "pairs": len(part),
            "found_by_texts": int(by_texts.sum()),
            "by_margins": int(by_margins.sum()),
        }
    print(printed(table), json.dumps(facts))
    if given.write:
        result = {
            "environment": environment(),
            "processor_s": found.attrs["processor_s"],
            "summary": table,
            **facts,
        }
        result |= {
            "noise": {kind: [one.log, one.spread, one.freedom] for kind, one in noise.items()}
        }
        fit = found[(found["half"] == "fit") & found["kind"].map(is_rounding)]
        result["fit"] = fit[["model", "kind", "texts", "changed", "multiple"]].to_dict("records")
        result["judged"] = json.loads(lines.to_json(orient="records"))
        today = datetime.datetime.now(datetime.UTC).date()
        (RESULTS / f"referee_cpu_{today}.json").write_text(
            json.dumps(result, indent=1) + "\n", "utf-8"
        )
        before, _, rest = PAGE.read_text("utf-8").partition(MARK)
        PAGE.write_text(before + MARK + printed(table) + END + rest.partition(END)[2], "utf-8")


if __name__ == "__main__":
    main()
