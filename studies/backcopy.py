"""Bigram-Backcopy: does a diffusion model grow the sink that its causal twin grows, and what do
added sinks and masking do to each?

    python studies/backcopy.py                     72 models, an hour and a half of one core
    python studies/backcopy.py --parts variants    part A of the page alone: 30 small models
    python studies/backcopy.py --smallest          seconds, to see that it runs

Parts: `variants` (A), `masking` (B, C, D), `parts` (E, F), as in backcopy/results.json. The numbers
of every model are kept in --out: the same command goes on where it stopped, beside others.
"""

# B rows, S columns (start first), T = S − 1, X tokens, M masks, V ids, H heads, L layers, K keys
import argparse
import copy
import itertools
import json
import math
from dataclasses import dataclass
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, get_scheduler

import sinklab
from sinklab import BlockKeys, Canvas, DiffusionLM, EqualMass, Random, TopKeys, intervene, trace
from sinklab.core.instrument import Positions
from sinklab.lab.analysis import mean_over
from sinklab.lab.data.noise import corrupt, masked_token_loss, sample_times
from sinklab.lab.training import VARIANTS

ADDED = ("sink", "zero", "gate", "logit")
TWINS = CAUSAL, DIFFUSION, CONVERTED = [(x, "plain") for x in ("causal", "diffusion", "converted")]
PARTS: dict[str, tuple[int, int, list[tuple[str, str]]]] = {
    "variants": (1, 400, [CAUSAL, *(("causal", one) for one in ADDED)]),
    "masking": (2, 2500, [CAUSAL, DIFFUSION]),
    "parts": (2, 2500, [CONVERTED, *(("diffusion", one) for one in ADDED)]),
}
"""Layers, steps, and objective and variant; a converted model is the causal one trained on."""
BATCH = 32
LEARNED, MEASURED = 1_000_000, 2_000_000
"""Added to a seed: the rows to learn from, those to measure on and the source share no draws."""
PROTOCOLS = {"paper": "previous", "held": "kept", "rule": "kept", "clean": "clean"}
"""Keys that received most at the step before, were chosen first, are sinks among these by the rule,
or receive most in a clean pass of the same step."""
ONE = TopKeys(1)
IN_PLACE = {"matched": EqualMass(ONE, arm="keys"), "equal_mass": EqualMass(ONE)}
IN_PLACE["random"] = Random(ONE)
ARMS = [("rows", "clean", k, "sinks", TopKeys(k)) for k in (1, 2, 4, 8, 16, 24, 32, 40)]
ARMS += [("rows", "clean", 1, name, keys) for name, keys in IN_PLACE.items()]
ARMS += [
    ("steps", protocol, k, "sinks", sinklab.SinkKeys(k=k) if protocol == "rule" else TopKeys(k))
    for protocol, k in itertools.product(PROTOCOLS, (1, 2, 4, 8, 16))
]
"""Task, protocol, keys a head, control, and the keys that are blocked."""
WEIGHT, NEAR, SEEDS = 0.3, 0.05, 6
"""A sink's weight, how near to the best loss models must come, and seeds that a verdict takes."""
KIND, DOSED = ["objective", "variant"], ["removed", "cost"]


@dataclass(frozen=True)
class Source:
    """Rows of a start token and a chain (Guo et al., arXiv 2410.13835, section 3): after one of the
    triggers, the tokens from 0 on, comes the token before it, after any other a draw from its row
    of a matrix, itself drawn from the seed. Two more tokens stand for the start and for [MASK].
    """

    seed: int = 0
    tokens: int = 32
    triggers: int = 4
    concentration: float = 0.3
    length: int = 48

    @cached_property
    def chances_XX(self) -> Tensor:
        """Chance of a token (column) after another (row); rows of triggers are not used."""
        generator = torch.Generator().manual_seed(self.seed)
        shape = torch.full((self.tokens, self.tokens), self.concentration, dtype=torch.float64)
        drawn_XX = torch._standard_gamma(shape, generator=generator)
        return drawn_XX / drawn_XX.sum(1, keepdim=True)

    def rows(self, count: int, generator: torch.Generator) -> Tensor:
        """New rows, int64 (count, S); the first token drawn is never a trigger."""
        ids_BS = torch.full((count, self.length), self.tokens)
        ids_BS[:, 1] = torch.randint(self.triggers, self.tokens, (count,), generator=generator)
        for place in range(2, self.length):
            before_B, last_B = ids_BS[:, place - 2], ids_BS[:, place - 1]
            next_B = torch.multinomial(self.chances_XX[last_B], 1, generator=generator)[:, 0]
            ids_BS[:, place] = torch.where(last_B < self.triggers, before_B, next_B)
        return ids_BS

    def nats(self, ids_BS: Tensor) -> Tensor:
        """Negative log-likelihood of each row under the source itself, nats a drawn token (B,)."""
        last_BT, next_BT = ids_BS[:, 1:-1], ids_BS[:, 2:]
        chances_BT = torch.where(last_BT < self.triggers, 1, self.chances_XX[last_BT, next_BT])
        return (math.log(self.tokens - self.triggers) - chances_BT.log().sum(1)) / (self.length - 1)

    def posterior(self, noisy_BS: Tensor) -> Tensor:
        """Chance of every token given all that is not masked (B, S, X), by the forward-backward
        algorithm over pairs of a token and the next; nothing in the start token's column.
        """
        is_masked_BS1, copies = (noisy_BS == self.tokens + 1)[..., None], slice(self.triggers)
        fits_BSX = (is_masked_BS1 | (noisy_BS[..., None] == torch.arange(self.tokens))).double()
        pair_BXX = torch.zeros(len(noisy_BS), self.tokens, self.tokens, dtype=torch.float64)
        # what precedes the first token is never asked for: it is no trigger
        pair_BXX[:, 0, self.triggers :] = fits_BSX[:, 1, self.triggers :]
        ahead, behind_BXX = [pair_BXX], torch.ones_like(pair_BXX)
        for place in range(2, self.length):
            moved_BXX = pair_BXX.sum(1)[..., None] * self.chances_XX
            moved_BXX[:, copies] = pair_BXX[..., copies].mT
            pair_BXX = moved_BXX * fits_BSX[:, place, None]
            ahead.append(pair_BXX)
        found_BSX = torch.zeros_like(fits_BSX)
        for place in range(self.length - 1, 0, -1):
            shares_BX = (ahead[place - 1] * behind_BXX).sum(1)
            found_BSX[:, place] = shares_BX / shares_BX.sum(1, keepdim=True)
            fitting_BXX = behind_BXX * fits_BSX[:, place, None]
            moved_BX1 = (fitting_BXX * self.chances_XX).sum(-1, keepdim=True)
            behind_BXX = moved_BX1.mT.repeat(1, self.tokens, 1)
            behind_BXX[..., copies] = fitting_BXX[:, copies].mT
        return found_BSX


@dataclass(frozen=True)
class Rows:
    """Rows of the source, as a kind of model reads them: with noise on a canvas, or as they are."""

    ids_BS: Tensor
    t_B: Tensor
    canvas: Canvas | None = None

    @classmethod
    def of(cls, source: Source, ids_BS: Tensor, noisy: bool, generator: torch.Generator) -> "Rows":
        """These rows; the start token is never masked."""
        t_B = sample_times(len(ids_BS), sampler="low_discrepancy", generator=generator)
        if not noisy:
            return cls(ids_BS, t_B)
        mask_id, maskable_BS = source.tokens + 1, ids_BS != source.tokens
        noise: dict[str, Any] = {"maskable_BS": maskable_BS, "generator": generator}
        noisy_BS, masked_BS = corrupt(ids_BS, t_B, mask_id=mask_id, **noise)
        return cls(ids_BS, t_B, Canvas(noisy_BS, torch.ones_like(masked_BS), masked_BS, mask_id))

    def loss(self, model: Any) -> Tensor:
        """Nats a drawn token: of the next one, or the masked-token bound."""
        if self.canvas is None:
            logits_BSV = model(self.ids_BS, causal=True).logits
            return cross_entropy(logits_BSV[:, :-1].flatten(0, 1), self.ids_BS[:, 1:].flatten())
        return self.bound(model(self.canvas.ids_BS, logits_to_keep=self.canvas.open_BS).logits)

    def bound(self, logits_MV: Tensor) -> Tensor:
        drawn_BS = (torch.arange(self.ids_BS.shape[1]) > 0).expand_as(self.ids_BS)
        where = self.ids_BS, self.canvas.open_BS, self.t_B
        return masked_token_loss(logits_MV, *where, maskable_BS=drawn_BS)

    def best(self, source: Source) -> float:
        """The loss on these rows, under this noise, of a model that knows the source."""
        if self.canvas is None:
            return float(source.nats(self.ids_BS).mean())
        return float(self.bound(source.posterior(self.canvas.ids_BS)[self.canvas.open_BS].log()))


def new_model(source: Source, variant: str, layers: int) -> DiffusionLM:
    """A model before training; weights that a variant does not add depend on the seed alone."""
    shape: dict[str, Any] = {"num_hidden_layers": layers, "num_attention_heads": 2}
    shape |= {"hidden_size": 64, "intermediate_size": 64, "max_position_embeddings": 49}
    ids = {"vocab_size": source.tokens + 2, "bos_token_id": source.tokens, "eos_token_id": None}
    torch.manual_seed(source.seed)
    fields: dict[str, Any] = {"mask_token_id": source.tokens + 1} | VARIANTS[variant]
    return DiffusionLM(sinklab.DiffusionLMConfig(LlamaConfig(**shape, **ids), **fields))


@cache
def trained(source: Source, objective: str, variant: str, layers: int, steps: int) -> DiffusionLM:
    """A model trained with Muon for the matrices of the layers, AdamW for all else, of which norms
    and added sinks do not decay. All models of a seed see the same rows in the same order.
    """
    model = new_model(source, variant, layers)
    if objective == "converted":
        model = copy.deepcopy(trained(source, "causal", variant, layers, steps))
    named = [*model.named_parameters()]
    flat = [name for name, weight in named if weight.ndim != 2 or name.startswith("sink")]
    matrices = [weight for name, weight in named if ".layers." in name and name not in flat]
    tables = [weight for name, weight in named if ".layers." not in name and name not in flat]
    others = [weight for name, weight in named if name in flat]
    decayed = [{"params": tables, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizers = [torch.optim.AdamW(decayed, lr=7e-3, betas=(0.9, 0.95))]
    optimizers += [torch.optim.Muon(matrices, lr=0.02, weight_decay=0.0)]
    shape: dict[str, Any] = {"num_warmup_steps": steps // 20, "num_training_steps": steps}
    shape["scheduler_specific_kwargs"] = {"min_lr_rate": 0.1}
    schedules = [get_scheduler("cosine_with_min_lr", one, **shape) for one in optimizers]
    generator = torch.Generator().manual_seed(LEARNED + source.seed)
    model.train()
    for ids_BS in source.rows(steps * BATCH, generator).split(BATCH):
        loss = Rows.of(source, ids_BS, objective != "causal", generator).loss(model)
        model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for part in (*optimizers, *schedules):
            part.step()
    return model.eval()


def controls(model: DiffusionLM, source: Source, variant: str) -> dict[str, DiffusionLM]:
    """A model before training, and the trained one with the weights of each tensor permuted."""
    permuted, generator = copy.deepcopy(model), torch.Generator().manual_seed(source.seed)
    for weight in permuted.state_dict().values():
        order = torch.randperm(weight.numel(), generator=generator)
        weight.copy_(weight.flatten()[order].view_as(weight))
    fresh = new_model(source, variant, len(model.model.layers))
    return {"fresh": fresh.eval(), "permuted": permuted}


def scored(model: Any, source: Source, rows: Rows) -> dict[str, float]:
    """Loss, the best one on these rows, and the loss with position 0 blocked for every query."""
    loss, best = float(rows.loss(model)), rows.best(source)
    with intervene(model, BlockKeys(Positions((0,)), when="now")):
        hidden = float(rows.loss(model))
    return {"loss": loss, "best": best, "over": loss / best - 1, "hidden": hidden}


def heads(model: Any, rows: Rows) -> list[dict[str, float]]:
    """Attention of every head, from all queries of a causal model, from masked ones of the other.

    ``first``: mean weight on position 0 (the metric of Gu et al., arXiv 2410.10781); ``added``: on
    the added sinks; ``strongest``: mean over rows of the strongest column's share; ``gu``: share of
    rows where that is above 0.3; ``norm``: value norm at position 0 over that of other text.
    """
    canvas = rows.canvas
    text_BS = torch.ones_like(rows.ids_BS, dtype=torch.bool)
    if canvas is None:
        queries_B = text_BS.sum(1)
        with trace(model, ("value_norm", "received")) as seen:
            model(rows.ids_BS, causal=True)
        received_BLHK = seen.received[0]
    else:
        text_BS, queries_B = ~canvas.open_BS, canvas.open_BS.sum(1)
        with trace(model, ("value_norm", "received_by_state"), canvas=canvas) as seen:
            model.denoiser(plain=True)(canvas.ids_BS, canvas.open_BS)
        received_BLHK = seen.values("received_by_state")[0][:, 0]
    norms_BLS = seen.values("value_norm")[0][..., seen.prefix :].double()
    text_BS[:, 0] = False
    others_L = (norms_BLS * text_BS[:, None]).sum((0, 2))
    norm_L = norms_BLS[..., 0].mean(0) / others_L * text_BS.sum()
    kept_B = queries_B >= 8  # of few queries one column is always the strongest by far
    queries_B, received_BLHK = queries_B[kept_B], received_BLHK[kept_B].double()
    strongest_BLH = received_BLHK[..., seen.prefix :].amax(-1) / queries_B[:, None, None]
    found = {
        "first": received_BLHK[..., seen.prefix].sum(0) / queries_B.sum(),
        "added": received_BLHK[..., : seen.prefix].sum((0, -1)) / queries_B.sum(),
        "strongest": strongest_BLH.mean(0),
        "gu": (strongest_BLH > WEIGHT).double().mean(0),
        "norm": norm_L[:, None].expand(strongest_BLH.shape[1:]),
    }
    return [
        {"layer": at[0], "head": at[1]} | {name: float(one[at]) for name, one in found.items()}
        for at in itertools.product(*map(range, strongest_BLH.shape[1:]))
    ]


def masked(model: Any, rows: Rows, seed: int, count: int) -> list[dict[str, Any]]:
    """Loss with keys blocked, and the dose: of whole rows, and of the second half of some as their
    true tokens are revealed one a step, from left to right, or in a diffusion model in an order
    drawn from the seed.
    """
    ids_BS, canvas, half = rows.ids_BS[:count], rows.canvas, rows.ids_BS.shape[1] // 2
    order_BT = half + torch.arange(ids_BS.shape[1] - half).expand(len(ids_BS), -1)
    if canvas is not None:
        generator = torch.Generator().manual_seed(seed)
        order_BT = half + torch.rand(order_BT.shape, generator=generator).argsort(1)

    def step(number: int) -> Tensor:
        if canvas is None:
            logits_BV = model(ids_BS[:, : half + number], causal=True).logits[:, -1]
            return cross_entropy(logits_BV, ids_BS[:, half + number])
        open_BS = torch.zeros_like(ids_BS, dtype=torch.bool).scatter(1, order_BT[:, number:], True)
        now_BS = torch.zeros_like(open_BS).scatter(1, order_BT[:, number : number + 1], True)
        noisy_BS = ids_BS.masked_fill(open_BS, canvas.mask_id)
        return cross_entropy(model(noisy_BS, logits_to_keep=now_BS).logits, ids_BS[now_BS])

    reads = {"rows": [partial(rows.loss, model)]}
    reads["steps"] = [partial(step, number) for number in range(order_BT.shape[1])]

    def loss_of(task: str, log: Any = None) -> float:
        losses = []
        for read in reads[task]:
            if log is not None:
                with log.probing():
                    read()
            losses.append(float(read()))
        return sum(losses) / len(losses)

    none = {"protocol": "clean", "k": 0, "control": "none"}
    cells = [{"task": task} | none | {"loss": loss_of(task)} for task in reads]
    for task, protocol, k, control, keys in ARMS:
        when, limit = PROTOCOLS[protocol], k if PROTOCOLS[protocol] == "kept" else None
        with intervene(model, BlockKeys(keys, when=when, limit=limit)) as log:
            loss = loss_of(task, log if when == "clean" else None)
        cell = {"task": task, "protocol": protocol, "k": k, "control": control, "loss": loss}
        cells.append(cell | log.dose().row())
    return cells


def measured(given: argparse.Namespace, part: str, kind: tuple[str, str], seed: int) -> Any:
    """Rows of the tables models, heads and masking for one model; from --out if they are there."""
    path = given.out / "models" / f"{part}-{'-'.join(kind)}-{seed}.json"
    if path.exists():
        return json.loads(path.read_text())
    (layers, steps, _), source = PARTS[part], Source(seed)
    generator = torch.Generator().manual_seed(MEASURED + seed)
    model = trained(source, *kind, layers, given.steps or steps)
    rows = Rows.of(source, source.rows(given.rows, generator), kind[0] != "causal", generator)
    fact = {"seed": seed} | dict(zip(KIND, kind, strict=True))
    found: dict[str, list[Any]] = {"models": [], "heads": [], "masking": []}
    with torch.no_grad():
        if part == "masking":
            found["masking"] = [fact | cell for cell in masked(model, rows, seed, given.revealed)]
        for state, one in ({"trained": model} | controls(model, source, kind[1])).items():
            found["models"].append(fact | {"state": state} | scored(one, source, rows))
            found["heads"] += [fact | {"state": state} | head for head in heads(one, rows)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found))
    print(f"{path.stem}: {found['models'][0]['over']:.2%} above the best loss", flush=True)
    return found


def verdict(kinds: Any, asked: Any, gaps: Any, same: Any = (), why: str = "") -> dict[str, Any]:
    """Mean and interval over seeds, and what may be said beside the same difference of controls.
    kinds: state, objective and variant -> models by seed.
    """
    found, groups = mean_over(gaps, fewest=SEEDS), [kinds["trained", *kind] for kind in asked]
    word = {None: "inconclusive", True: "more", False: "less"}[found.above()]
    apart = [mean_over(gaps - each, fewest=SEEDS).above() for each in same]
    if any((group["over"] > NEAR).any() for group in groups):
        why = "inconclusive: more than 5 % above the best loss"
    elif CAUSAL in asked and (kinds["trained", *CAUSAL]["first"] <= WEIGHT).any():
        why = "inconclusive: causal models without a sink on position 0"
    elif found.above() is not None and any(one is not found.above() for one in apart):
        why = "no finding: untrained models show it as well"
    numbers = {"mean": found.value, "low": found.low, "high": found.high, "reach": found.reach}
    return numbers | {"verdict": why or word}


def contrasts(kinds: Any) -> pd.DataFrame:
    """Plain kinds against one another, variants against plain, added sinks against even shares."""
    there = [kind for state, *kind in kinds if state == "trained"]
    asked = [(*both, "first") for both in itertools.combinations(TWINS, 2)]
    asked += [((one, "plain"), (one, added), "first") for one, added in there if added != "plain"]
    asked += [(one, other, "strongest") for one, other, _ in asked if other[1] != "plain"]
    lines = []
    for one, other, name in asked:
        if {("trained", *one), ("trained", *other)} <= kinds.keys():
            gaps, *same = (
                kinds[state, *other][name] - kinds[state, *one][name]
                for state in ("trained", "fresh", "permuted")
            )
            line = {"measure": name, "of": " ".join(other), "less": " ".join(one)}
            line |= verdict(kinds, (one, other), gaps, same)
            lines.append(line | {"fresh": same[0].mean(), "permuted": same[1].mean()})
    for kind in there:
        shared = kinds["trained", *kind]["shared"]
        if shared.any():
            line = {"measure": "added", "of": " ".join(kind), "less": "an even share"}
            lines.append(line | verdict(kinds, [tuple(kind)], shared - 1 / (Source().length + 1)))
    return pd.DataFrame(lines)


def at_equal_dose(one: pd.DataFrame, other: pd.DataFrame) -> tuple[float, float]:
    """The dose of one key a head in the one, or the nearest that both have, and the one's cost less
    the other's there, linear between doses; NaN if they have none in common.
    """
    x, y, u, v = (each.sort_values("removed")[name] for each in (one, other) for name in DOSED)
    low, high = max(x.iloc[0], u.iloc[0]), min(x.iloc[-1], u.iloc[-1])
    dose = float(np.clip(one.loc[1, "removed"], low, high)) if low <= high else math.nan
    return dose, float(np.interp(dose, x, y) - np.interp(dose, u, v))


def costs(masking: pd.DataFrame, kinds: Any) -> pd.DataFrame:
    """Cost of blocking keys in nats, causal less diffusion, at one key a head and at equal dose."""
    names, lines = ["seed", "objective", "task"], []
    clean = masking[masking["k"] == 0].set_index(names)["loss"].rename("clean")
    table = masking[masking["control"] == "sinks"].join(clean, on=names).set_index("k")
    table["cost"] = table["loss"] - table["clean"]
    for (task, protocol), cells in table.groupby(["task", "protocol"], sort=False):
        found = []
        for _, both in cells.groupby("seed"):
            one, other = (both[both["objective"] == name] for name in ("causal", "diffusion"))
            found.append((one.loc[1, "cost"] - other.loc[1, "cost"], *at_equal_dose(one, other)))
        counts, doses, gaps = np.array(found).T
        missing, asked = int(np.isnan(doses).sum()), (CAUSAL, DIFFUSION)
        why = f"inconclusive: {missing} seeds without a dose in common" * bool(missing)
        for at, each, no in (("one key", counts, ""), (f"{doses.mean():.3f}", gaps, why)):
            line = {"task": task, "protocol": protocol, "removed": at}
            lines.append(line | verdict(kinds, asked, each, why=no))
    return pd.DataFrame(lines)


def report(tables: dict[str, Any], parts: list[str], out: Path) -> str:
    """What models of as many layers show: their losses, and the largest of each one's heads."""
    models, every, masking = (
        pd.DataFrame([row for part in parts for row in tables[part][name]])
        for name in ("models", "heads", "masking")
    )
    names = ["seed", *KIND, "state"]
    groups = every.sort_values("first", ascending=False, kind="stable").groupby(names, sort=False)
    found = groups[["first", "added", "strongest", "gu"]].max().join(groups["norm"].first())
    found["shared"] = groups["added"].mean()
    whole = models.merge(found.reset_index(), on=names)
    whole["cost"] = whole["hidden"] / whole["loss"] - 1
    kinds = {key: group.set_index("seed") for key, group in whole.groupby(["state", *KIND])}
    columns = ["over", "first", "added", "shared", "strongest", "cost", "norm"]
    said = [whole.groupby(["state", *KIND])[columns].agg(["mean", "min", "max"]), contrasts(kinds)]
    if len(masking):
        said.append(costs(masking, kinds))
    shown = whole[whole["state"] == "trained"].pivot(index="over", columns=KIND, values="first")
    words = {"xlabel": "loss / best loss − 1", "ylabel": "weight on position 0, largest of a head"}
    shown.plot(style="o", **words).figure.savefig(out / f"{parts[0]}.png", dpi=150)
    return "\n\n".join([", ".join(parts), *(one.round(4).to_string() for one in said)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=[*PARTS])
    parser.add_argument("--seeds", type=int, nargs="+", default=[*range(6)])
    parser.add_argument("--out", type=Path, default=Path("runs/backcopy"))
    parser.add_argument("--smallest", action="store_true", help="one seed, 2 steps, 8 rows")
    given = parser.parse_args()
    given.steps, given.rows, given.revealed = None, 512, 128
    if given.smallest:
        given.seeds, given.steps, given.rows, given.revealed = [0], 2, 8, 2
    torch.set_num_threads(1)
    tables: dict[str, Any] = {part: {} for part in given.parts}
    for seed, part in itertools.product(given.seeds, given.parts):
        for kind in PARTS[part][2]:
            for name, rows in measured(given, part, kind, seed).items():
                tables[part].setdefault(name, []).extend(rows)
    (given.out / "results.json").write_text(json.dumps(tables, indent=1))
    # models of two layers, of B to F, are contrasted with one another
    both = [[part for part in PARTS if part in tables and PARTS[part][0] == n] for n in (1, 2)]
    text = "\n\n".join(report(tables, parts, given.out) for parts in both if parts)
    (given.out / "report.txt").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
