"""Does protecting sinks help a block cache at equal budget? Every cache on the packaged pair.

    python studies/sink_caches.py             results.json and figures, into runs/sink_caches
    python studies/sink_caches.py --smallest  the same in seconds; the figures then mean nothing

The caches are in this file, on the public protocol: a session that keeps every key, and an edit
that blocks those that were not chosen, by layer and head: the numbers of a cache that throws them
away, without its speed. ``--plugin studies/sink_caches.py --cache evict:sinks=4`` decodes with one.
"""

# B batch, G key/value heads, H query heads, W queries of the block, S canvas columns, K = added
# sinks + S, M wanted positions (row-major), N new tokens, D head dim
import argparse
import itertools
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn import functional as F

from sinklab import BlockKeys, intervene, trace
from sinklab.core.instrument import Call, Selector
from sinklab.core.registry import caches, selectors
from sinklab.core.subject import Denoiser, Evaluation, Places, Session, cache_of
from sinklab.lab.analysis import effects
from sinklab.lab.caching import DualCache
from sinklab.lab.checkpoints import load
from sinklab.lab.scoring import heldout_rows
from sinklab.lab.studies import heldout_text


@dataclass(frozen=True)
class ChoosingCache(DualCache):
    """Base of caches that choose columns, at the last full evaluation of a block."""

    delay: int = 0
    """Full evaluations of a block before the one that chooses."""

    def columns(self, start: int, stop: int, length: int, nth: int) -> slice | None:
        return None if self.phase(nth) <= self.delay else slice(start, stop)


@caches.register("evict")
@dataclass(frozen=True)
class EvictingCache(ChoosingCache):
    """Keep a share of the columns outside the block, by a score, sinks first; by key head."""

    keep: float = 0.5
    """Share of these columns, rounded down; 1 keeps all."""
    sinks: int = 0
    """So many of them are the columns that receive most attention from the block."""
    protect: str = "now"
    """Whose sinks: of the evaluation that chooses (now), or of the first on this canvas (first)."""
    score: str = "nearest"
    """Order of the rest: one of `SCORES`."""

    def session(self, denoiser: Any) -> Session:
        return EvictingSession(denoiser, self)


@caches.register("sink_refresh")
@dataclass(frozen=True)
class SinkRefreshCache(ChoosingCache):
    """A dual cache that computes the columns that the block attends to most anew with the block."""

    sinks: int = 8

    def session(self, denoiser: Any) -> Session:
        return RefreshingSession(denoiser, self)


@selectors.register("left_out")
@dataclass(frozen=True)
class LeftOut(Selector):
    """The keys that a session of this file leaves out."""

    session: Any = None
    by_attention = False

    def select(self, call: Call) -> Tensor:
        return self.session.left_out(call)


class ChoosingSession(Session):
    """Memory of a cache that chooses: it keeps every key, and an edit sees each attention call."""

    def __init__(self, denoiser: Any, cache: Any) -> None:
        padding_BS, self.model, self.cache = denoiser.attention_BS, denoiser.model, cache
        if padding_BS is not None and not padding_BS.all():
            raise ValueError("these caches take rows without padding: decode rows one by one")
        self.inner = self.model.denoiser().begin()
        self.block: Any = None
        self.number = self.nth = -1

    def find(self, block: slice | None) -> None:
        """Note which evaluation of which block this is, and whether columns are chosen at it."""
        if block != self.block:
            self.block, self.nth = block, -1
            self.number += 1
        self.nth += 1
        self.is_choice = self.cache.phase(self.nth) == self.cache.delay

    def watched(self, length: int) -> Any:
        """The context of an evaluation in which `left_out` is asked for the keys to block, bool
        (B, H or 1, K), layer by layer.
        """
        self.layer = -1
        # if logits are shifted the column before the block runs, too
        self.run = slice(max(self.block.start - self.model.config.logit_shift, 0), self.block.stop)
        self.outside_S = torch.ones(length, dtype=torch.bool)
        self.outside_S[self.run] = False
        edit = BlockKeys(LeftOut(self), when="now")
        return intervene(self.model, edit, measure=False, allow_idle=True)


def received(session: ChoosingSession, call: Call) -> Tensor:
    """Attention from the block's queries (B, G, S), summed over the query heads of a key head."""
    queries_BHWD = call.q_BHQD[:, :, session.run].float()
    scale = call.scale
    if scale is None:
        scale = queries_BHWD.shape[-1] ** -0.5
    keys_BHDK = call.expand_kv(call.k_BKSD).float().transpose(2, 3)
    received_BHK = (scale * (queries_BHWD @ keys_BHDK)).softmax(-1).sum(2)
    return received_BHK[..., call.prefix :].unflatten(1, (call.k_BKSD.shape[1], -1)).sum(2)


def nearest(session: ChoosingSession, call: Call) -> Tensor:
    """Nearness to the block; of two equally near columns the left one is nearer."""
    column_S = torch.arange(len(session.outside_S))
    left_S, right_S = session.block.start - column_S, column_S - session.block.stop + 1
    return -torch.where(left_S > 0, 2 * left_S, 2 * right_S + 1)


def aligned(session: ChoosingSession, call: Call) -> Tensor:
    """Mean query of the block · key, mean over heads, no softmax; the highest of 3 neighbours
    (Sparse-dLLM, arXiv 2508.02558).
    """
    heads = call.k_BKSD.shape[1]
    mean_BHD = call.q_BHQD[:, :, session.run].float().mean(2)
    mean_BGD = mean_BHD.unflatten(1, (heads, -1)).mean(2)
    keys_BGSD = call.k_BKSD[:, :, call.prefix :].float()
    dot_BS = torch.einsum("bgd,bgsd->bs", mean_BGD, keys_BGSD) / heads
    return F.max_pool1d(dot_BS.masked_fill(~session.outside_S, -torch.inf)[:, None], 3, 1, 1)


def random(session: ChoosingSession, call: Call) -> Tensor:
    """Well mixed whole numbers (SplitMix64), which do not depend on the length of the canvas."""
    column_S = torch.arange(len(session.outside_S)) - session.block.stop
    head_G = torch.arange(call.k_BKSD.shape[1])
    salt_G = head_G + 1009 * session.layer + 1_000_003 * session.number
    x_GS = salt_G[:, None] * 0x9E3779B97F4A7C1 + column_S
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        x_GS = (x_GS ^ (x_GS >> shift)) * factor
    return x_GS ^ (x_GS >> 31)


# orders of the columns that are not protected; by attention received, sinks keep themselves
SCORES = {one.__name__: one for one in (nearest, aligned, received, random)}


def places(order_BGS: Tensor) -> Tensor:
    """Place of each column in an order, 0 for the highest; of equal ones the left comes first."""
    return order_BGS.argsort(dim=-1, descending=True, stable=True).argsort(-1)


class EvictingSession(ChoosingSession):
    """Columns that were not chosen are blocked until everything is computed anew."""

    def __init__(self, denoiser: Any, cache: EvictingCache) -> None:
        super().__init__(denoiser, cache)
        self.gone: dict[int, Tensor] = {}
        """Keys of a layer that are blocked while the block alone is computed."""
        self.first: dict[int, Tensor] = {}
        """Attention received in a layer at the first choice."""

    def logits(self, ids_BS: Tensor, at: Places, columns: Any = None) -> Tensor:
        self.find(at.columns)
        if columns is None and not self.is_choice:
            return self.inner.logits(ids_BS, at)
        with self.watched(ids_BS.shape[1]):
            return self.inner.logits(ids_BS, at, columns)

    def left_out(self, call: Call) -> Tensor:
        """Nothing when it chooses, and from then on what was not chosen."""
        self.layer += 1
        if not self.is_choice:
            return self.gone[self.layer]
        # a product such as 0.29 * 100 falls short of the whole number it stands for
        count = math.floor(self.cache.keep * int(self.outside_S.sum()) + 1e-9)
        blocked_BGS = (places(self._order(call)) >= count) & self.outside_S
        blocked_BHS = blocked_BGS.repeat_interleave(
            len(call.heads or []) // blocked_BGS.shape[1], dim=1
        )
        # added sinks are always seen
        self.gone[self.layer] = F.pad(blocked_BHS, (call.prefix, 0))
        return torch.zeros_like(self.gone[self.layer])

    def _order(self, call: Call) -> Tensor:
        """Ranks (B, G, S) of the columns: protected sinks, then by the score, then the block."""
        received_BGS = received(self, call).masked_fill(~self.outside_S, -torch.inf)
        score_BGS = SCORES[self.cache.score](self, call).expand_as(received_BGS)
        if self.cache.protect == "first":
            received_BGS = self.first.setdefault(self.layer, received_BGS)
        # of the first choice, columns that are in the block now do not count
        received_BGS = received_BGS.masked_fill(~self.outside_S, -torch.inf)
        is_sink_BGS = places(received_BGS) < self.cache.sinks
        rank_BGS = 2 * len(self.outside_S) * is_sink_BGS - places(score_BGS).float()
        return rank_BGS.masked_fill(~self.outside_S, -torch.inf)


class RefreshingSession(ChoosingSession):
    """The chosen columns run with the block. Each row has its own, so that rows run one by one."""

    def __init__(self, denoiser: Any, cache: SinkRefreshCache) -> None:
        super().__init__(denoiser, cache)
        self.rows: dict[int, tuple[Session, Tensor]] = {}

    def logits(self, ids_BS: Tensor, at: Places, columns: Any = None) -> Tensor:
        self.find(at.columns)
        rows = enumerate(zip(ids_BS.split(1), at.wanted_BS.split(1), strict=True))
        return torch.cat([self._row(row, *one, columns) for row, one in rows])

    def _row(self, row: int, ids_1S: Tensor, wanted_1S: Tensor, columns: Any) -> Tensor:
        if columns is not None:
            session, columns_W = self.rows[row]
            return session(ids_1S, wanted_1S, columns_W)
        session = self.model.denoiser().begin()
        self.total_S = torch.zeros(ids_1S.shape[1])
        with self.watched(ids_1S.shape[1]):
            logits_MV = session(ids_1S, wanted_1S)
        order_S = self.total_S.masked_fill(~self.outside_S, -torch.inf)
        runs_S = ~self.outside_S | (places(order_S) < self.cache.sinks)
        self.rows[row] = session, runs_S.nonzero()[:, 0]
        return logits_MV

    def left_out(self, call: Call) -> Tensor:
        """Nothing; what is received is added up."""
        self.total_S += received(self, call).sum((0, 1))
        return torch.zeros_like(call.seen_B1S)


@dataclass(frozen=True)
class Policy:
    """One way to evaluate a block, at some budget, with some columns protected or recomputed."""

    family: str  # none, prefix, dual, sink_refresh, a score, or window (sparse attention)
    keep: float = 1.0
    sinks: int = 0
    protect: str = ""  # whose sinks: now, first; random: random columns in their place

    @property
    def cache(self) -> Any:
        """The cache; None if everything is computed."""
        if self.family == "sink_refresh":
            return SinkRefreshCache(sinks=self.sinks)
        if self.family not in SCORES:
            return cache_of(self.family.replace("window", "none"))
        # chosen at the second evaluation of a block, as Sparse-dLLM does
        how: dict[str, Any] = {"protect": self.protect or "now", "delay": 1}
        return EvictingCache(keep=self.keep, sinks=self.sinks, score=self.family, **how)

    def denoiser(self, model: Any) -> Any:
        return SparseDenoiser(model, self) if self.family == "window" else model.denoiser()


class SparseDenoiser(Denoiser):
    """Full recomputation in which every query attends to a share of the keys: the sinks of a clean
    pass (or random columns) first, then the nearest.
    """

    def __init__(self, model: Any, policy: Policy) -> None:
        self.model, self.policy = model, policy

    @torch.inference_mode()
    def logits(self, ids_BS: Tensor, at: Places) -> Tensor:
        length = ids_BS.shape[1]
        order_BS = torch.rand(1, length, generator=torch.Generator().manual_seed(0))
        if self.policy.protect == "now":
            with trace(self.model, ("received",)) as recording:
                self.model(ids_BS, logits_to_keep=torch.zeros_like(ids_BS, dtype=torch.bool))
            order_BS = recording.received[0].sum((1, 2))[:, -length:]
        is_sink_BS = places(order_BS) < self.policy.sinks
        column_S = torch.arange(length)
        # twice the distance, so that of two equally near keys the left one is nearer
        far_QS = 2 * (column_S[:, None] - column_S).abs() + (column_S > column_S[:, None])
        # each query sees itself, the sinks, then the nearest
        near_BQS = 8 * length * (far_QS == 0) + 2 * length * is_sink_BS[:, None] - far_QS
        seen_BQS = places(near_BQS) < math.floor(self.policy.keep * length + 1e-9)
        seen_BQS = seen_BQS.expand(len(ids_BS), -1, -1)
        return self.model(ids_BS, logits_to_keep=at.wanted_BS, visible=seen_BQS).logits


@dataclass(frozen=True)
class Settings:
    """What is compared, on which text."""

    keep: tuple[float, ...]
    protect: tuple[str, ...]
    rows: int
    texts: int = 0  # written under each cache; with some, sparse attention is compared as well
    prompt_tokens: int = 192
    new_tokens: int = 32
    block_length: int = 16

    def policies(self) -> list[Policy]:
        """Those to compare, the uncached one first."""
        found = [Policy("none"), Policy("prefix"), Policy("dual"), Policy("nearest")]
        found += [Policy("sink_refresh", sinks=count) for count in (4, 16)]
        for keep in self.keep:
            found += [Policy(score, keep) for score in SCORES]
            for score, whose in itertools.product(SCORES, self.protect):
                # a cache that keeps by attention received keeps the sinks of now by itself
                if (score, whose) != ("received", "now"):
                    found.append(Policy(score, keep, 4, whose))
            if self.texts:
                found.append(Policy("window", keep))
                found += [Policy("window", keep, 4, whose) for whose in ("now", "random")]
        return found


# fidelity on the same half-revealed text; texts written under the smallest budget
FULL = {
    "": Settings((0.5, 0.25, 0.125), ("now", "first"), 12),
    "-written": Settings((0.125,), ("now",), 8, 8),
}
SMALLEST = {
    "": Settings((0.5,), ("now", "first"), 2, 0, 24, 6, 6),
    "-written": Settings((0.125,), ("now",), 2, 1, 24, 6, 6),
}
POLICY = ["family", "keep", "sinks", "protect"]
# over masked tokens: nats of the true one, nats from the uncached distribution, same best token
METRICS = ["loss", "divergence", "same"]


@torch.inference_mode()
def forced(model: Any, ids_BS: Tensor, found: list[Policy], settings: Settings) -> pd.DataFrame:
    """Every policy, and how it differs from the first, on the same text, of which two true tokens
    are revealed at a time: a line per policy and row, over the third and later looks at a block.
    """
    before, mask_id = settings.prompt_tokens, model.config.mask_token_id
    rows, length = ids_BS.shape
    block_S = (torch.arange(length) - before) // settings.block_length
    block_BS = block_S.clamp(min=-1).expand_as(ids_BS)
    # the turn at which a token is revealed: two of a block share one
    draws = [np.random.default_rng([0, row]).random(settings.new_tokens) for row in range(rows)]
    draws_BLN = np.stack(draws).reshape(rows, -1, settings.block_length)
    turn_BN = torch.from_numpy(draws_BLN.argsort(2).argsort(2).reshape(rows, -1) // 2)
    turn_BS = F.pad(turn_BN, (before, 0), value=-1)
    run = {policy: Evaluation(policy.denoiser(model), policy.cache, block_BS) for policy in found}
    sums = {policy: torch.zeros(len(METRICS), rows) for policy in found}
    count_B = torch.zeros(rows)
    for block, nth in np.ndindex(int(block_S.max()) + 1, int(turn_BS.max()) + 1):
        wanted_BS = (block_BS == block) & (turn_BS >= nth)
        noisy_BS = ids_BS.masked_fill(wanted_BS | (block_BS > block), mask_id)
        for policy, evaluate in run.items():
            # what is computed without a cache is not remembered
            if nth > 1 or policy.cache is not None:
                logits_MV = evaluate(noisy_BS, Places.of(wanted_BS), block, nth).float()
            if nth < 2:
                continue
            logits_MV[:, mask_id] = -torch.inf
            log_MV = logits_MV.log_softmax(1)
            if policy is found[0]:
                truth_MV, best_M = log_MV, log_MV.argmax(1)
            loss_M = -log_MV.gather(1, ids_BS[wanted_BS][:, None])[:, 0]
            # [MASK] has probability 0 in both
            apart_M = (truth_MV.exp() * (truth_MV - log_MV).nan_to_num(0.0)).sum(1)
            measured_3M = torch.stack([loss_M, apart_M, (log_MV.argmax(1) == best_M).float()])
            sums[policy].index_add_(1, wanted_BS.nonzero()[:, 0], measured_3M)
        count_B += wanted_BS.sum(1) * (nth > 1)
    tables = [
        pd.DataFrame((sum_3B / count_B).T.numpy(), columns=METRICS).assign(**asdict(policy))
        for policy, sum_3B in sums.items()
    ]
    return pd.concat(tables).rename_axis("row").reset_index()


def mean_table(rows: pd.DataFrame, arm: list[str], names: list[str]) -> pd.DataFrame:
    """A line per arm: means over rows of some columns, with the ends of their 95 % intervals."""
    parts = {name: effects(rows, name, arm=arm, unit="row").set_index(arm) for name in names}
    ends = (("mean", ""), ("low", "_low"), ("high", "_high"))
    means = {name + end: part[own] for name, part in parts.items() for own, end in ends}
    return pd.DataFrame(means | {"rows": parts[names[0]]["n"]}).reset_index()


def compared(name: str, settings: Settings) -> dict[str, Any]:
    """The tables of one model: policies, and what protection changes, paired over rows."""
    loaded, policies = load(name), settings.policies()
    length = settings.prompt_tokens + settings.new_tokens
    ids_BS = heldout_rows(loaded, heldout_text(None), rows=settings.rows, length=length).ids_RS
    rows = forced(loaded.model, ids_BS, policies, settings)
    table = mean_table(rows, POLICY, METRICS).assign(agreement=math.nan)
    if settings.texts:
        size = {"max_new_tokens": settings.new_tokens, "block_length": settings.block_length}
        prompts_BS = ids_BS[: settings.texts, : settings.prompt_tokens]
        every = [one.cache for one in policies if one.family != "window"]
        texts_BS = [loaded.model.generate(prompts_BS, cache=one, **size) for one in every]
        texts = [text_BS[:, settings.prompt_tokens :] for text_BS in texts_BS]
        shares = [float((text_BN == texts[0]).double().mean()) for text_BN in texts]
        table.loc[table["family"] != "window", "agreement"] = shares
    bare = rows[rows["protect"] == ""].set_index(["family", "keep", "row"])[METRICS]
    paired = rows[rows["protect"] != ""].set_index(["family", "keep", "row"])
    paired[METRICS] -= bare.loc[paired.index]
    long = paired.reset_index().melt([*POLICY, "row"], METRICS, "metric", "difference")
    protection = mean_table(long, [*POLICY, "metric"], ["difference"])
    protection.columns = protection.columns.str.removeprefix("difference_")
    found = {"model": name, "settings": asdict(settings), "torch": torch.__version__}
    for what, lines in (("policies", table), ("protection", protection)):
        found[what] = json.loads(lines.round(5).to_json(orient="records"))
    return found


def drawn(table: pd.DataFrame) -> Figure:
    """Divergence over the budget; full lines protect the sinks of now."""
    axes = Figure(layout="constrained").subplots()
    some = table[table["family"].isin(SCORES) & (table["keep"] < 1) & (table["protect"] != "first")]
    for (family, whose), part in some.groupby(["family", "protect"]):
        look = {"c": f"C{[*SCORES].index(family)}", "ls": "-" if whose else "--"}
        label = family + " + sinks" * bool(whose)
        axes.loglog(100 * part["keep"], part["divergence"], label=label, **look)
    axes.set(xlabel="columns kept outside the block, %", ylabel="nats per masked token")
    axes.legend()
    return axes.figure


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--smallest", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("runs/sink_caches"))
    options, results = parser.parse_args(), {}
    options.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    for name, size in itertools.product(("tiny", "tiny-sink"), ("", "-written")):
        results[name + size] = compared(name, (SMALLEST if options.smallest else FULL)[size])
        table = pd.DataFrame(results[name + size]["policies"])
        print(name, table.to_string(), sep="\n", flush=True)
        if not size:
            drawn(table).savefig(options.out / f"{name}.png", dpi=150)
    (options.out / "results.json").write_text(json.dumps(results, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
