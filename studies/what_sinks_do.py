"""What a sink does, asked of SmolLM2 and its siblings: what_sinks_do.md has the questions.

    python studies/what_sinks_do.py measure             every question of every model that is there
    python studies/what_sinks_do.py measure iii-0-500 --questions drift --texts 2
    python studies/what_sinks_do.py report              the tables, from the results alone

A question of a model is measured once; with `--texts` it is a try that keeps no result. Folders
come from the environment, as smollm2_diffusion.py has them.
"""

# N texts, D draws of masks, B batch, S positions, L layers, H heads, K keys (added sinks first),
# M masked positions, C channels, F neurons
import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import smollm2_costs as costs
import smollm2_diffusion as siblings
import smollm2_measures as measures
import torch
from smollm2_contrasts import Crossed, crossed
from torch import Tensor
from torch.nn.functional import cross_entropy

from sinklab import Canvas, denoise, find_sinks, intervene, trace
from sinklab.core.instrument.edits.block_keys import BlockKeys
from sinklab.core.instrument.edits.selectors import SinkKeys, TopKeys
from sinklab.lab.analysis.estimates import corrected
from sinklab.lab.files import load_plugin
from sinklab.lab.measures import EqualMass, MaskSinks, Random, WindowAttention
from sinklab.lab.measures.controls import Others
from sinklab.lab.measures.patch import Patch, save_run
from sinklab.lab.measures.statistics import LayerSimilarity

RESULTS = Path(__file__).with_suffix("")
load_plugin(RESULTS / "plugin.py")
plugin = sys.modules["sinklab_plugin_plugin"]
SEEDS = ("iii-0-500", "iii-1-500", "iii-2-500")
"""Training seeds of the model of the primary outcomes."""
MODELS = ("parent", "lifted", "i-0-500", "ii-0-500", *SEEDS, "iv-0-500")
ASKED = "iii-0-500"
"""Model of the primary outcomes."""
TEXTS, DRAWS, RATIO, LENGTH, NEW = 24, 3, 0.15, 64, 32
NO_OPERATION, BROADCAST, RANK = 0.2, (0.5, 1.5), 1.5
"""Limits of arXiv 2606.08105 on ρ and the stable rank."""
SPIKE, TIMES = 100.0, 1000.0
"""Magnitude of a massive activation, and how often the median it must be (arXiv 2402.17762)."""
RADIUS, AGE, NEURONS = 8, 2, 10
NOTHING_KEPT = torch.zeros(0, dtype=torch.int64)


@dataclass(frozen=True)
class Asked:
    """A model with the texts that it is asked about."""

    model: Any
    tokenizer: Any
    attention: str
    reads_masks: bool
    rows_NS: Tensor
    reference_NS: Tensor
    """Other texts of the same books, for reference values."""

    def noisy(self, draw: int = 0) -> Tensor:
        """The texts with `RATIO` of their tokens masked; as they are for a model of next tokens."""
        return self.masked(self.rows_NS, draw)

    def masked(self, rows_NS: Tensor, draw: int = 0) -> Tensor:
        """Any texts in the same way."""
        if not self.reads_masks:
            return rows_NS
        return measures.masked_at(rows_NS, RATIO, self.model.config.mask_token_id, draw)

    @property
    def draws(self) -> range:
        """Draws of masks; one where nothing is masked."""
        return range(DRAWS if self.reads_masks else 1)

    def run(self, ids_BS: Tensor) -> None:
        """A forward without logits."""
        self.model(ids_BS, logits_to_keep=NOTHING_KEPT)


@dataclass(frozen=True)
class Strong:
    """Statistics of all heads of some texts, and which keys are strongest."""

    numbers: dict[str, Tensor]
    """By statistic, (N, L, H, K) or (N, L, H, number)."""
    key_NLH: Tensor
    strong_NLH: Tensor

    def mine(self, name: str) -> Tensor:
        """A number of the strongest key, (N, L, H)."""
        return self.numbers[name].gather(-1, self.key_NLH[..., None])[..., 0]

    def others(self, name: str) -> Tensor:
        """Its mean over the other keys, (N, L, H)."""
        every = self.numbers[name]
        return (every.sum(-1) - self.mine(name)) / (every.shape[-1] - 1)

    def over_strong(self, values_NLH: Tensor) -> list[float]:
        """Mean over the strong heads of each text; NaN without one."""
        values_NLH = values_NLH.double().masked_fill(~self.strong_NLH, torch.nan)
        return values_NLH.flatten(1).nanmean(1).tolist()


@torch.inference_mode()
def strong_keys(asked: Asked, noisy_NS: Tensor, names: tuple[str, ...]) -> Strong:
    """Statistics of these texts, and the strongest key of every head."""
    parts: dict[str, list[Tensor]] = {name: [] for name in ("weight", *names)}
    for ids_BS in noisy_NS.split(8):
        with trace(asked.model, ("received", *names)) as recording:
            asked.run(ids_BS)
        seen_BK = recording.visible[0].float()[:, None, None]
        weight_BLHK = recording.received[0] / seen_BK
        parts["weight"].append(weight_BLHK.masked_fill(seen_BK < measures.FEWEST_QUERIES, -1.0))
        for name in names:
            parts[name].append(recording.values(name)[0])
    numbers = {name: torch.cat(some) for name, some in parts.items()}
    top_NLH, key_NLH = numbers["weight"].max(-1)
    return Strong(numbers, key_NLH, top_NLH > measures.STRONG)


def over_draws(of: Callable[[int], dict[str, list[float]]], draws: range) -> dict[str, list[float]]:
    """Each number of a text as its mean over draws of masks."""
    found = [of(draw) for draw in draws]
    return {name: np.nanmean([one[name] for one in found], 0).tolist() for name in found[0]}


def roles(asked: Asked) -> dict[str, Any]:
    """Question 1: no-operation or broadcast."""

    def of(draw: int) -> dict[str, list[float]]:
        found = strong_keys(asked, asked.noisy(draw), ("value_norm_by_head", "head_output"))
        ratio_NLH = found.mine("value_norm_by_head") / found.others("value_norm_by_head")
        rank_NLH, cosine_NLH = found.numbers["head_output"].unbind(-1)
        none_NLH = ratio_NLH <= NO_OPERATION
        casts_NLH = (ratio_NLH >= BROADCAST[0]) & (ratio_NLH <= BROADCAST[1]) & (rank_NLH <= RANK)
        told = {"no-operation": none_NLH, "broadcast": casts_NLH, "ρ": ratio_NLH}
        told |= {"stable rank": rank_NLH, "cosine of rows": cosine_NLH}
        return {name: found.over_strong(value) for name, value in told.items()}

    numbers = over_draws(of, asked.draws)
    shares = zip(numbers["no-operation"], numbers["broadcast"], strict=True)
    return {"primary": [one - other for one, other in shares], **numbers}


def directions(asked: Asked) -> dict[str, Any]:
    """Question 2: length or direction."""

    def of(draw: int) -> dict[str, list[float]]:
        found = strong_keys(asked, asked.noisy(draw), ("key_norm_by_head", "key_cosine"))
        apart_NLH = found.mine("key_cosine") - found.others("key_cosine")
        length_NLH = found.mine("key_norm_by_head") / found.others("key_norm_by_head")
        told = {"primary": apart_NLH, "length of the key": length_NLH}
        told |= {"cosine": found.mine("key_cosine"), "of the others": found.others("key_cosine")}
        return {name: found.over_strong(value) for name, value in told.items()}

    return over_draws(of, asked.draws)


@torch.inference_mode()
def losses(asked: Asked, edits: tuple[Any, ...], draw: int) -> list[float]:
    """Nats of each text at the places that a draw masks, keys chosen in a clean pass."""
    masked_NS = measures.masked_at(asked.rows_NS, RATIO, -1, draw) == -1
    masked_NS[:, 0] = False
    noisy_NS = asked.noisy(draw)
    found: list[float] = []
    for start in range(0, len(noisy_NS), 8):
        part = slice(start, start + 8)
        ids_BS, wanted_BS = noisy_NS[part], masked_NS[part]
        with ExitStack() as stack:
            if edits:
                log = stack.enter_context(intervene(asked.model, *edits))
                with log.probing():
                    asked.run(ids_BS)
            logits_MV = asked.model(ids_BS, logits_to_keep=wanted_BS).logits
        nats_M = cross_entropy(logits_MV.float(), asked.rows_NS[part][wanted_BS], reduction="none")
        rows_M = wanted_BS.nonzero()[:, 0]
        found += [float(nats_M[rows_M == row].mean()) for row in range(len(ids_BS))]
    return found


def arms(asked: Asked, edits: dict[str, tuple[Any, ...]]) -> dict[str, list[float]]:
    """Loss of each text under each arm, mean over draws."""
    return over_draws(
        lambda draw: {name: losses(asked, some, draw) for name, some in edits.items()},
        range(DRAWS),
    )


def route(asked: Asked) -> dict[str, Any]:
    """Question 3: do the sinks suffice beside a window."""
    sinks = SinkKeys("gu")
    kept = {"sinks": sinks, "random": Random(sinks), "equal mass": EqualMass(sinks)}
    # an added token is not kept beside the window unless an arm chooses it
    window = WindowAttention(radius=RADIUS, keep_prefix=False)
    edits: dict[str, tuple[Any, ...]] = {"full": (), "window": (window,)}
    for name, keys in kept.items():
        edits[name] = (BlockKeys(Others(keys), beyond=RADIUS, when="clean"),)
    nats = {name: np.array(some) for name, some in arms(asked, edits).items()}
    spread = nats["window"] - nats["full"]
    retained = {name: (nats["window"] - nats[name]) / spread for name in kept}
    told = {f"retained by {name}": some.tolist() for name, some in retained.items()}
    told |= {f"loss, {name}": some.tolist() for name, some in nats.items()}
    return {"primary": (retained["sinks"] - retained["random"]).tolist(), **told}


def values(asked: Asked) -> dict[str, Any]:
    """Question 4: does the value matter; and what follows the key, what the value."""
    ways = ["mask", "zero_value"]
    if asked.attention == "full":
        ways += ["pool_value", "shuffle_value"]
    with tempfile.TemporaryDirectory() as folder:
        file = f"{folder}/means.safetensors"
        reference_NS = asked.masked(asked.reference_NS)
        plugin.save_reference_values(asked.model, MaskSinks(k=1), reference_NS.split(8), file)
        edits: dict[str, tuple[Any, ...]] = {"none": ()}
        edits |= {way: (BlockKeys(TopKeys(1), when="clean", how=way),) for way in ways}
        mean = f"mean_value:file={file}"
        edits["mean_value"] = (BlockKeys(TopKeys(1), when="clean", how=mean),)
        edits["random, mask"] = (BlockKeys(Random(TopKeys(1)), when="clean"),)
        nats = {name: np.array(some) for name, some in arms(asked, edits).items()}
        patched = patches(asked, Path(folder))
    told = {
        f"rise, {name}": (some - nats["none"]).tolist()
        for name, some in nats.items()
        if name != "none"
    }
    return {"primary": (nats["zero_value"] - nats["mean_value"]).tolist(), **told, **patched}


@dataclass(frozen=True)
class Place:
    """A text whose modal strongest key is strong, and another position of it."""

    row: int
    ids_1S: Tensor
    sink: int
    other: int
    heads_LH: Tensor
    """Heads in which the sink is strong."""

    def weight(self, asked: Asked, *edits: Any) -> float:
        """Mean weight of the other position in these heads under these edits."""
        weight_LHS = weights(asked, self.ids_1S, *edits)[..., -self.ids_1S.shape[1] :]
        return float(weight_LHS[..., self.other][self.heads_LH].mean())


def places(asked: Asked) -> Iterator[Place]:
    """One of each text that has a strong key in it."""
    noisy_NS = asked.noisy()
    found = strong_keys(asked, noisy_NS, ())
    added = found.numbers["weight"].shape[-1] - noisy_NS.shape[1]
    for row, ids_S in enumerate(noisy_NS):
        strong_LH, key_LH = found.strong_NLH[row], found.key_NLH[row] - added
        counted = Counter(key for key in key_LH[strong_LH].tolist() if key >= 0)
        if not counted:
            continue
        sink = counted.most_common(1)[0][0]
        generator = torch.Generator().manual_seed(row)
        # half of the text away, where its queries see both under a causal mask too
        other = int(torch.randint(LENGTH // 4, LENGTH // 2, (1,), generator=generator))
        other = other + 1 if other == sink else other
        yield Place(row, ids_S[None], sink, other, strong_LH & (key_LH == sink))


@torch.inference_mode()
def patches(asked: Asked, folder: Path) -> dict[str, list[float]]:
    """Weight of another position of a text, over the heads in which its modal strongest key is
    strong: as it is, with that key's key vector, and with its value.
    """
    told: dict[str, list[float]] = {"as it is": [], "its key": [], "its value": []}
    for place in places(asked):
        file = f"{folder}/{place.row}.safetensors"
        save_run(asked.model, file, place.ids_1S, logits_to_keep=NOTHING_KEPT)
        told["as it is"].append(place.weight(asked))
        where = {"file": file, "positions": place.other, "source": place.sink}
        for what in ("key", "value"):
            told[f"its {what}"].append(place.weight(asked, Patch(**where, what=what)))
    return {f"weight of another position, {name}": some for name, some in told.items()}


@torch.inference_mode()
def states(asked: Asked) -> dict[str, Any]:
    """Beside question 4, not registered: the same weight with hidden states behind every layer, of
    the sink, of the parent's sink (its first token), and of one more position, a control.
    """
    told: dict[str, list[float]] = {"as it is": []}
    parent = next(siblings.points()).load().model.eval()
    with tempfile.TemporaryDirectory() as folder:
        for place in places(asked):
            own, its = f"{folder}/{place.row}", f"{folder}/parent, {place.row}"
            save_run(asked.model, own, place.ids_1S, logits_to_keep=NOTHING_KEPT)
            with costs.attending(parent, "causal"):
                row_1S = asked.rows_NS[place.row, None]
                save_run(parent, its, row_1S, logits_to_keep=NOTHING_KEPT)
            control = place.other + 1 + (place.other + 1 == place.sink)
            told["as it is"].append(place.weight(asked))
            for name, file, source in (
                ("the sink's state", own, place.sink),
                ("the parent's sink's state", its, 0),
                ("one more position's state", own, control),
            ):
                edit = Patch(file=file, positions=place.other, source=source, what="state")
                told.setdefault(name, []).append(place.weight(asked, edit))
    return told


@torch.inference_mode()
def spikes(asked: Asked) -> dict[str, Any]:
    """Question 5: sinks without a spike, spikes without a sink."""

    def of(draw: int) -> dict[str, list[float]]:
        noisy_NS = asked.noisy(draw)
        with measures.states_behind(asked.model, measures.SPIKE_LAYER, noisy_NS.shape[1]) as kept:
            found = strong_keys(asked, noisy_NS, ("outliers",))
        size_NSC = torch.cat(kept).abs()
        median_N1 = size_NSC.flatten(1).median(1, keepdim=True).values
        greatest_NS = size_NSC.amax(-1)
        spike_NS = (greatest_NS > SPIKE) & (greatest_NS > TIMES * median_N1)
        added = found.numbers["weight"].shape[-1] - noisy_NS.shape[1]
        # an added token has no hidden state among those of the text
        found = replace(found, strong_NLH=found.strong_NLH & (found.key_NLH >= added))
        place_NLH = (found.key_NLH - added).clamp_min(0)
        at_NLH = spike_NS.gather(1, place_NLH.flatten(1)).view_as(place_NLH)
        lone = []
        for spike_S, place_LH, strong_LH in zip(spike_NS, place_NLH, found.strong_NLH, strict=True):
            spiked = set(spike_S.nonzero()[:, 0].tolist())
            used = set(place_LH[strong_LH].tolist())
            lone.append(len(spiked - used) / len(spiked) if spiked else np.nan)
        outliers_NL2 = found.numbers["outliers"]
        return {
            "primary": found.over_strong((~at_NLH).float()),
            "spikes that are no sinks": lone,
            "spikes of a text": spike_NS.sum(1).tolist(),
            "kurtosis": outliers_NL2[..., 0].amax(1).tolist(),
            "greatest over median": outliers_NL2[..., 1].amax(1).tolist(),
        }

    return over_draws(of, asked.draws)


@torch.inference_mode()
def layers(asked: Asked) -> dict[str, Any]:
    """Question 6: how like the hidden states of two layers are, mean over all pairs."""

    def of(draw: int) -> dict[str, list[float]]:
        found = []
        for ids_BS in asked.noisy(draw).split(8):
            with trace(asked.model, ("layer_similarity",)) as recording:
                asked.run(ids_BS)
            found.append(recording.values("layer_similarity")[0][:, -1])
        return dict(zip(LayerSimilarity.columns, torch.cat(found).T.tolist(), strict=True))

    return over_draws(of, asked.draws)


def agreement(asked: Asked) -> dict[str, Any]:
    """Question 7: Jaccard index of two rules' sinks, over heads in which either finds one."""
    rules = {"soft": "excess:epsilon=2,scale=zscore", "excess": "excess", "gu": "gu", "top": "top"}

    @torch.inference_mode()
    def of(draw: int) -> dict[str, list[float]]:
        flags: dict[str, list[Tensor]] = {name: [] for name in rules}
        for ids_BS in asked.noisy(draw).split(8):
            with trace(asked.model, ("received",)) as recording:
                asked.run(ids_BS)
            visible = recording.visible[0][:, None, None]
            for name, rule in rules.items():
                flags[name].append(find_sinks(recording.received[0], rule, visible))
        found = {name: torch.cat(some) for name, some in flags.items()}
        told = {}
        for name, one, two in (
            ("primary", "soft", "excess"),
            ("soft and gu", "soft", "gu"),
            ("excess and gu", "excess", "gu"),
            ("gu and top", "gu", "top"),
        ):
            either_NLH = (found[one] | found[two]).sum(-1)
            both_NLH = (found[one] & found[two]).sum(-1)
            share_NLH = (both_NLH / either_NLH).masked_fill(either_NLH == 0, torch.nan)
            told[name] = share_NLH.flatten(1).nanmean(1).tolist()
        return told

    return over_draws(of, asked.draws)


@torch.inference_mode()
def drift(asked: Asked) -> dict[str, Any]:
    """Question 8: drift of the strongest key from step to step, against keys of equal age."""
    told: dict[str, list[float]] = {"primary": [], "of values": [], "strongest": [], "others": []}
    mask_id = asked.model.config.mask_token_id
    for ids_S in asked.rows_NS:
        prompt = ids_S[: LENGTH - NEW].tolist()
        canvas = Canvas.from_prompts([prompt], new_tokens=NEW, mask_id=mask_id)
        names = ("received", "drift", "drift:of=value")
        with trace(asked.model, names, canvas=canvas) as recording:
            for step in denoise(asked.model.denoiser(), canvas, steps=NEW):
                recording.mark(step)
        apart: dict[str, list[float]] = {name: [] for name in told}
        states = torch.stack([state_BK[0] for state_BK in recording.key_state])
        # step in which a key was written: the first in which it is no longer masked
        written_K = (states == 0).sum(0)
        for step in range(1, len(states)):
            weight_LHK = recording.received[step][0] / recording.visible[step][0].float()
            top_LH, key_LH = weight_LHK.max(-1)
            key = recording.values("drift")[step][0]
            value = recording.values("drift:of=value")[step][0]
            for layer, head in (top_LH > measures.STRONG).nonzero().tolist():
                mine = int(key_LH[layer, head])
                alike_K = states[step] == states[step, mine]
                alike_K &= (written_K - written_K[mine]).abs() <= AGE
                alike_K[mine] = False
                if not bool(alike_K.any()):
                    continue
                for name, vectors in (("primary", key), ("of values", value)):
                    own = vectors[layer, head]
                    apart[name].append(float(own[mine] - own[alike_K].mean()))
                apart["strongest"].append(float(key[layer, head, mine]))
                apart["others"].append(float(key[layer, head][alike_K].mean()))
        for name, some in apart.items():
            told[name].append(float(np.mean(some)) if some else np.nan)
    return told


@torch.inference_mode()
def registers(asked: Asked) -> dict[str, Any]:
    """Question 9: the neurons of the sink, moved to an added token (arXiv 2506.08010)."""
    told: dict[str, list[float]] = {"as it is": [], "its neurons": [], "random neurons": []}
    mask_id = asked.model.config.mask_token_id
    with tempfile.TemporaryDirectory() as folder:
        for row, ids_S in enumerate(asked.noisy()):
            ids_1S = torch.cat([torch.tensor([mask_id]), ids_S])[None]
            weight_LHK = weights(asked, ids_1S)
            added = weight_LHK.shape[-1] - LENGTH - 1
            top_LH, key_LH = weight_LHK[..., added + 1 :].max(-1)
            counted = Counter(key_LH[top_LH > measures.STRONG].tolist())
            if not counted:
                continue
            sink = 1 + counted.most_common(1)[0][0]
            told["as it is"].append(float(weight_LHK[..., added].mean()))
            for name, seed in (("its neurons", None), ("random neurons", row)):
                file = f"{folder}/{row}, {name}"
                kept = {"count": NEURONS, "seed": seed, "logits_to_keep": NOTHING_KEPT}
                plugin.save_neurons(asked.model, file, sink, ids_1S, **kept)
                moved_LHK = weights(asked, ids_1S, plugin.MoveNeurons(file=file))
                told[name].append(float(moved_LHK[..., added].mean()))
    apart = zip(told["its neurons"], told["as it is"], strict=True)
    return {"primary": [one - other for one, other in apart], **told}


def weights(asked: Asked, ids_1S: Tensor, *edits: Any) -> Tensor:
    """Mean weight of every key of one text under these edits, (L, H, K)."""
    with intervene(asked.model, *edits, measure=False), trace(asked.model) as recording:
        asked.run(ids_1S)
    return recording.received[0][0] / recording.visible[0][0].float()


QUESTIONS: dict[str, tuple[Callable[[Asked], dict[str, Any]], int]] = {
    "roles": (roles, LENGTH),
    "directions": (directions, LENGTH),
    "route": (route, 128),
    "values": (values, LENGTH),
    "states": (states, LENGTH),
    "spikes": (spikes, LENGTH),
    "layers": (layers, LENGTH),
    "agreement": (agreement, LENGTH),
    "drift": (drift, LENGTH),
    "registers": (registers, LENGTH),
}
"""Name of a question -> its measurement, and the tokens of its texts; in the order of the page."""
OF_DIFFUSION = ("drift", "registers")
"""Questions that need a model that sees both sides and writes."""


def measure(only: list[str], questions: list[str], texts: int | None) -> None:
    """Every question that has no result yet."""
    there = {point.name: point for point in siblings.points()}
    for name in MODELS:
        point = there.get(name)
        if point is None or (only and name not in only):
            continue
        file = RESULTS / f"{name}.json"
        found = json.loads(file.read_text("utf-8")) if file.is_file() else {}
        missing = [one for one in questions or QUESTIONS if texts or one not in found]
        if point.attention == "causal":
            missing = [one for one in missing if one not in OF_DIFFUSION]
        if not missing:
            continue
        loaded = point.load()
        loaded.model.eval()
        for question in missing:
            function, length = QUESTIONS[question]
            books = siblings.BOOKS / "valid.jsonl.gz"
            every_NS = measures.book_rows(loaded.needed_tokenizer(), books, length, 8)
            spread_NS = siblings.runs.spread_over_books(every_NS, 8, len(every_NS))
            asked = Asked(
                loaded.model,
                loaded.needed_tokenizer(),
                point.attention,
                not point.is_autoregressive,
                spread_NS[: texts or TEXTS],
                spread_NS[TEXTS:],
            )
            begun = time.perf_counter()
            with costs.attending(loaded.model, point.attention):
                told = function(asked)
            print(f"{name}, {question}: {time.perf_counter() - begun:.0f} s", flush=True)
            if texts:
                print(json.dumps(told)[:2000], flush=True)
                continue
            found[question] = told
            RESULTS.mkdir(exist_ok=True)
            file.write_text(json.dumps(found, indent=1) + "\n", "utf-8")


def estimate(values: list[float]) -> tuple[float, float, float]:
    """Mean over texts with its 95 % interval (Student's t); NaN left out, and for fewer than 8."""
    if np.count_nonzero(~np.isnan(values)) < 8:
        return np.nan, np.nan, np.nan
    found = measures.interval(values)
    return found["mean"], found["low"], found["high"]


def shown(values: list[float]) -> str:
    """An estimate as the tables have it."""
    mean, low, high = estimate(values)
    return f"{mean:.3f} ({low:.3f} … {high:.3f})".replace("-", "−")


def primaries(results: dict[str, Any], model: str = ASKED) -> dict[str, list[float]]:
    """The nine primary outcomes of a model, a number a text; without those that it was not
    asked.
    """
    mine = results.get(model, {})
    found = {name: some["primary"] for name, some in mine.items() if "primary" in some}
    if "layers" in mine:
        pairs = zip(mine["layers"]["raw"], results["parent"]["layers"]["raw"], strict=True)
        found["layers"] = [one - other for one, other in pairs]
    return {name: found[name] for name in QUESTIONS if name in found}


def over_seeds(results: dict[str, Any]) -> dict[str, Crossed]:
    """The nine primary outcomes over texts crossed with the training seeds that were measured; a
    text without strong heads in one of them is left out.
    """
    seeds = [primaries(results, model) for model in SEEDS]
    found = {}
    for name in seeds[0]:
        values_ST = np.array([one[name] for one in seeds if name in one])
        known_T = ~np.isnan(values_ST).any(0)
        # the agreement of rules is compared with 0.8, all others with no difference
        found[name] = crossed(values_ST[:, known_T], 0.8 if name == "agreement" else 0.0)
    return found


def report() -> None:
    """Tables of all numbers, and the primary outcomes with Holm's correction."""
    files = {name: RESULTS / f"{name}.json" for name in MODELS}
    results = {
        name: json.loads(file.read_text("utf-8")) for name, file in files.items() if file.is_file()
    }
    outcomes = over_seeds(results)
    p = dict(zip(outcomes, corrected([one.p for one in outcomes.values()]), strict=True))
    lines: list[str] = []
    seeds = [primaries(results, model) for model in SEEDS]
    heads = ["question", "seeds × texts", "could have been seen", "p (Holm)"]
    heads += [f"seed {number}" for number in range(len(SEEDS))]
    lines += ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for name, one in outcomes.items():
        cells = [name, str(one), f"{one.reach:.3f}", f"{p[name]:.2g}"]
        cells += [shown(some[name]) if name in some else "–" for some in seeds]
        lines.append("| " + " | ".join(cells) + " |")
    for question in QUESTIONS:
        asked = {name: one[question] for name, one in results.items() if question in one}
        if not asked:
            continue
        columns = list(dict.fromkeys(column for one in asked.values() for column in one))
        lines += ["", f"## {question}", "", "| | " + " | ".join(asked) + " |"]
        lines.append("|---" * (len(asked) + 1) + "|")
        for column in columns:
            cells = [shown(one[column]) if column in one else "–" for one in asked.values()]
            lines.append(f"| {column} | " + " | ".join(cells) + " |")
    print("\n".join(lines))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=("measure", "report"))
    parser.add_argument("models", nargs="*", help="models; all when left out")
    parser.add_argument("--questions", nargs="+", choices=tuple(QUESTIONS), default=[])
    parser.add_argument("--texts", type=int, help="a try on so many texts")
    given = parser.parse_args()
    if given.command == "report":
        report()
    else:
        measure(given.models, given.questions, given.texts)


if __name__ == "__main__":
    main()
