"""Costs of edits on some texts, position by position: `LM.compare` and its result."""

# N masks of a text (rows to run), S positions of a text, L maskable tokens, M wanted positions,
# H heads, K keys (added sinks first), V vocabulary
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Any, cast

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from sinklab.core.instrument import BlockKeys, Dose, Intervention, RemovalRecord, trace
from sinklab.core.registry import interventions
from sinklab.lab.analysis.effects import effects
from sinklab.lab.analysis.estimates import FEWEST, mean_over
from sinklab.lab.analysis.movement import STRONG
from sinklab.lab.analysis.words import CONTROLS, counted
from sinklab.lab.checkpoints.controls import UNTRAINED
from sinklab.lab.checkpoints.loading import Loaded
from sinklab.lab.measures.controls import other_arm
from sinklab.lab.scoring.heldout import BATCH, heldout_rows, under_arms
from sinklab.lab.scoring.prompts import ids_to_score
from sinklab.lab.scoring.requests import (
    check_ids,
    check_positions,
    digest,
    limit_of,
    monte_carlo,
    scoring_edits,
)
from sinklab.lab.scoring.settings import LikelihoodSettings
from sinklab.lab.studies.settings import heldout_text

NONE = "none"
"""Arm without edits, which every comparison has."""
TEXTS, LENGTH = 8, 64
"""Texts that are compared when none are given, and tokens of each."""
Edits = Intervention | str | Sequence[Intervention | str]


@dataclass(frozen=True)
class Summary:
    """Results of a comparison: sentences when printed, and numbers."""

    sentences: tuple[str, ...]
    table: pd.DataFrame
    """A line per arm less no edit, then per pair of the first arm and another, as `effects` makes
    them of nats per token; beside them the means of nats, removed and regrown. The verdict is
    costs, helps or inconclusive.
    """

    def __str__(self) -> str:
        return "\n".join(self.sentences)

    def _repr_html_(self) -> str:
        paragraphs = "".join(f"<p>{escape(sentence)}</p>" for sentence in self.sentences)
        return paragraphs + self.table.to_html(index=False)


@dataclass(frozen=True, repr=False)
class Comparison:
    """Losses of texts under several arms, by position; returned by ``lm.compare``."""

    rows: pd.DataFrame
    baselines: dict[str, str]
    """Arm -> the arm without edits of the same model."""

    def __repr__(self) -> str:
        arms = ", ".join(self.rows["arm"].unique())
        return f"Comparison ({arms}; {self.rows['text'].nunique()} texts)"

    def _repr_html_(self) -> str:
        return self.summary()._repr_html_()

    def to_pandas(self) -> pd.DataFrame:
        """A row per arm, text and position: nats, the loss of the token there; and of the arm on
        the whole text, removed, the share of attention (0 to 1) that its edits took away, and
        regrown, the share of heads (0 to 1) in which another key became a sink: the strongest key
        under the edits holds more than 30 % of the attention, and held less without them.
        """
        return self.rows.copy()

    def costs(self, arm: str, other: str | None = None) -> pd.Series:
        """Nats per token of each text under an arm, less those under another; no edit if left
        out.

        Raises ValueError for an arm that was not compared.
        """
        known = [*self.rows["arm"].unique()]
        for name in (arm, other or arm):
            if name not in known:
                raise ValueError(
                    f"arms of this comparison are {', '.join(map(repr, known))}, got {name!r}"
                )
        nats = self.rows.groupby(["arm", "text"], sort=False)["nats"].mean()
        return nats[arm] - nats[self.baselines[arm] if other is None else other]

    def summary(self) -> Summary:
        """Cost of each arm, and whether the first costs more than the others (`effects`).

        The sample is the text: with fewer than 8 texts a cost has no interval and no verdict.
        """
        first, base = next(iter(self.baselines.items()))
        pairs = [*self.baselines.items()]
        pairs += [(first, arm) for arm, other in pairs[1:] if other == base]
        doses = ("nats", "removed", "regrown")
        how: dict[str, Any] = {"unit": "text", "pairs": pairs, "words": ("costs", "helps")}
        table = effects(self.rows, "nats", doses=doses, **how)
        is_pair = table["less"] != table["arm"].map(self.baselines)
        lines = zip(table.to_dict("records"), is_pair, strict=True)
        return Summary(tuple(_sentence(line, is_pair=pair) for line, pair in lines), table)

    def plot(self, axes: Any = None) -> Any:
        """Draw the cost of each arm over positions, means over texts with 95 % intervals; returns
        the axes.
        """
        from sinklab.lab.reports.drawing import draw_lines, finish, own_axes
        from sinklab.lab.reports.style import themed

        parts = []
        nats = self.rows.set_index(["arm", "text", "position"])["nats"]
        for arm in self.baselines:
            costs = (nats[arm] - nats[self.baselines[arm]]).unstack("text").dropna(how="all")
            estimates = [mean_over(costs_T) for costs_T in costs.to_numpy()]
            low, high = np.transpose([one.interval for one in estimates])
            means = [one.value for one in estimates]
            about = {"run": "", "line": arm, "position": costs.index, "value": means}
            parts.append(pd.DataFrame(about | {"low": low, "high": high}))
        with themed():
            drawn = axes or own_axes(4.8, 3.2)
            draw_lines(drawn, pd.concat(parts))
            drawn.set(xlabel="position", ylabel="cost, nats per token")
            finish(drawn, grow=axes is None)
        return drawn


def _sentence(line: dict[str, Any], *, is_pair: bool) -> str:
    parts = [counted(line["n"], "text")]
    is_interval = not math.isnan(line["low"])
    if is_interval:
        parts.append(f"95 % {line['low']:+.3f} … {line['high']:+.3f}")
    else:
        parts.append(f"{FEWEST} needed for a verdict")
    if line["caution"]:
        parts.append(line["caution"])
    number = f"{line['mean']:+.3f} nats per token ({', '.join(parts)})".replace("-", "−")
    words = {"costs": "costs more than", "helps": "costs less than"}
    if is_pair:
        said = words.get(line["verdict"], "is not distinguishable from")
        if not is_interval:
            said = "against"
        return f"{line['arm']} {said} {line['less']}: {number}."
    if is_interval:
        number += f", {line['verdict']}"
    return (
        f"{line['arm']}: {number}; {100 * line['removed']:.1f} % of the attention removed, "
        f"a new sink in {100 * line['regrown']:.1f} % of heads."
    )


def compare(
    lm: Loaded,
    arms: Mapping[str, Edits],
    texts: Sequence[str | Sequence[int]] | None,
    *,
    read: str | Sequence[int] = "all",
    samples: int = 32,
    seed: int = 0,
    controls: bool = False,
    progress: Callable[[str], object] | None = None,
) -> Comparison:
    """The comparison that `LM.compare` describes."""
    if (
        not isinstance(arms, Mapping)
        or not arms
        or NONE in arms
        or not all(isinstance(name, str) for name in arms)
    ):
        raise ValueError(
            f"a comparison needs arms {{name: edits}}, and {NONE!r} is always one; got "
            f"{', '.join(map(repr, arms)) or 'no arm'}"
        )
    if texts is None:
        rows = heldout_rows(lm, heldout_text(None), rows=TEXTS, length=LENGTH)
        texts = rows.ids_RS.tolist()
    if isinstance(texts, str) or not len(texts):
        raise ValueError("texts must be several, and each of them a text or a list of ids")
    models: dict[str, Loaded] = {"": lm}
    if controls:
        for kind, make in UNTRAINED.items():
            models[f" ({CONTROLS[kind]})"] = make(lm, seed)
    # the sample is the text: one that is given twice counts once
    every = [_ids_of(lm, text, number) for number, text in enumerate(texts)]
    encoded = [*map(list, dict.fromkeys(map(tuple, every)))]
    _check_read(read, max(map(len, encoded)))
    frames, baselines = [], {}
    for suffix, model in models.items():
        is_diffusion = model.family == "diffusion"
        edits: dict[str, tuple[Intervention, ...]] = {NONE + suffix: ()}
        for name, given in arms.items():
            if name + suffix in baselines:
                raise ValueError(
                    f"{name + suffix!r} is the name of an arm and of a control; rename the arm"
                )
            several = [given] if isinstance(given, str) or hasattr(given, "handler") else given
            edits[name + suffix] = scoring_edits(several, is_diffusion=is_diffusion)
            baselines[name + suffix] = NONE + suffix
            check_positions(edits[name + suffix], [len(ids) for ids in encoded])
        _check_both_arms(edits)
        for number, ids in enumerate(encoded):
            if progress is not None:
                progress(f"text {number + 1} of {len(encoded)}{suffix}")
            for name, found in _under_arms(model, edits, ids, read, (seed, number), samples):
                frames.append(found.assign(arm=name, text=number))
    rows = pd.concat(frames, ignore_index=True)
    columns = ["arm", "text", "position", "nats", "removed", "regrown"]
    return Comparison(rows[columns], baselines)


def _check_both_arms(edits: Mapping[str, Sequence[Intervention]]) -> None:
    """Raise ValueError for one arm of a comparison at equal mass without the other: each is over
    the heads alone that have a control, so that nothing else is comparable with it.
    """
    every = [edit for some in edits.values() for edit in some]
    for name, some in edits.items():
        for edit in some:
            keys = None
            if isinstance(edit, BlockKeys):
                keys = other_arm(edit.keys)
            if keys is None:
                continue
            other = replace(cast("BlockKeys", edit), keys=keys)
            if other not in every:
                missing = interventions.as_text(other)
                raise ValueError(
                    f"the arm {name!r} is over the heads alone that have a control of equal mass, "
                    f"and the other arm over the same heads is not there: give {missing!r} too"
                )


def _ids_of(lm: Loaded, text: str | Sequence[int], number: int) -> list[int]:
    ids = ids_to_score(lm, text)
    limit = limit_of(lm)
    if not 2 <= len(ids) <= limit:
        raise ValueError(
            f"a text to compare has 2 to {limit} tokens with {lm.name}, but one has {len(ids)}; "
            "cut it"
        )
    check_ids(lm, f"text {number}", (), without_closing(lm.model, ids))
    return ids


def _check_read(read: str | Sequence[int], length: int) -> None:
    """Raise ValueError for positions that no text has."""
    for one in () if isinstance(read, str) else read:
        if isinstance(one, bool) or one not in range(length):
            raise ValueError(
                f"read names positions of the texts, 0 to {length - 1} here, but {one!r} is none"
            )


def without_closing(model: Any, ids: list[int]) -> list[int]:
    """Ids of a text without the ones that the model sees behind every text, if they end it."""
    closing = getattr(model.config, "closing_ids", ())
    if closing and ids[-len(closing) :] == [*closing]:
        return ids[: -len(closing)]
    return ids


def positions_read(read: str | Sequence[int], length: int) -> Tensor:
    """Positions whose tokens count, bool (S,).

    Args:
        read: "all", "from32" (from position 32 on; `From` makes it), or numbers of positions.
        length: of the text.

    Raises:
        ValueError: for other words, and for positions that leave nothing to read.
    """
    position_S = torch.arange(length)
    if isinstance(read, str):
        first = {"all": "0"}.get(read, read.removeprefix("from"))
        if not first.isdecimal():
            raise ValueError(f"read is all, from and a number, or positions, got {read!r}")
        read_S = position_S >= int(first)
    else:
        read_S = torch.isin(position_S, torch.tensor([*read]))
    if not read_S.any():
        raise ValueError(f"read={read!r} leaves nothing of a text of {length} tokens")
    return read_S


def _under_arms(
    loaded: Loaded,
    edits: dict[str, tuple[Intervention, ...]],
    ids: list[int],
    read: str | Sequence[int],
    place: tuple[int, int],
    samples: int,
) -> Iterator[tuple[str, pd.DataFrame]]:
    """Rows of one text under every arm, by the arm's name."""
    ids_S = torch.tensor(ids)
    read_S = positions_read(read, len(ids))
    scored_S = scored_tokens(loaded, ids)
    read_S &= scored_S
    if not read_S.any():
        raise ValueError(
            f"read={read!r} leaves nothing of a text of {len(ids)} tokens, of which "
            f"{int(scored_S.sum())} are scored: a first token, or [CLS] and [SEP], are given"
        )
    is_diffusion = loaded.is_diffusion
    masked_NS, weight_N = torch.zeros(1, len(ids), dtype=torch.bool), torch.ones(1)
    if is_diffusion:
        masked_NS, weight_N = _masks(loaded, ids, scored_S, place[0], samples)
    nats = {name: torch.zeros(len(ids), dtype=torch.float64) for name in edits}
    doses: dict[str, list[Dose]] = {name: [] for name in edits}
    regrown: dict[str, list[Tensor]] = {name: [] for name in edits}
    for start in range(0, len(masked_NS), BATCH):
        some_NS = masked_NS[start : start + BATCH]
        weight_B = weight_N[start : start + BATCH]
        places = [(*place, start + row) for row in range(len(some_NS))]

        def run(some_NS: Tensor = some_NS, weight_B: Tensor = weight_B) -> Tensor:
            losses = _denoised if is_diffusion else _continued
            nats_BS = losses(loaded.model, ids_S, some_NS, read_S)
            return (nats_BS.double() * weight_B[:, None].double()).sum(0)

        clean: list[Tensor] = []

        def run_clean(run: Callable[[], Tensor] = run, clean: list[Tensor] = clean) -> Tensor:
            with trace(loaded.model, ("received",)) as recording:
                nats_S = run()
            clean.append(recording.received[0].float().cpu() / len(ids))
            return nats_S

        with torch.inference_mode():
            found = under_arms(loaded.model, [*edits.values()], places, run, run_clean)
            for name, (nats_S, records) in zip(edits, found, strict=True):
                # the arm "none" has no edits, so a clean pass came first
                (before_BLHK,) = clean
                nats[name] += nats_S
                doses[name].append(Dose.of(records))
                regrown[name].append(_regrown(records, before_BLHK))
    for name in edits:
        if bool(nats[name].isnan().any()):
            raise ValueError(
                f"{loaded.name} gave NaN logits under the arm {name!r}; try another dtype"
            )
        removed = Dose.pooled(doses[name]).removed if edits[name] else 0.0
        columns: dict[str, Any] = {
            "position": read_S.nonzero()[:, 0].numpy(),
            "nats": nats[name][read_S].numpy(),
            "removed": 0.0 if math.isnan(removed) else removed,
            "regrown": torch.cat(regrown[name]).mean().item(),
        }
        yield name, pd.DataFrame(columns)


def scored_tokens(loaded: Loaded, ids: list[int]) -> Tensor:
    """Tokens of a text that have a loss, bool (S,): all but the first of a causal model, or a start
    token and the closing of a text, which are given.
    """
    scored_S = torch.ones(len(ids), dtype=torch.bool)
    scored_S[len(without_closing(loaded.model, ids)) :] = False
    if not loaded.is_diffusion or ids[0] == loaded.special.bos:
        scored_S[0] = False
    return scored_S


def _masks(
    loaded: Loaded, ids: list[int], scored_S: Tensor, seed: int, samples: int
) -> tuple[Tensor, Tensor]:
    """Random masks of a text (N, S) and their weights (N,), so that the weighted losses of masked
    tokens add up to the Monte Carlo bound (LLaDA, arXiv 2502.09992, Eq. 6).
    """
    # groups as in `score` and `rolling`, so that the masks are those of `LM.loss`
    if scored_S[0]:
        group = digest(without_closing(loaded.model, ids), (0,))
    else:
        group = digest(ids[:1], ())
    settings = LikelihoodSettings(samples=samples, seed=seed)
    plan = monte_carlo(int(scored_S.sum()), group, settings, merge=False)
    masked_NS = torch.zeros(len(plan.masked_NL), len(scored_S), dtype=torch.bool)
    masked_NS[:, scored_S] = plan.masked_NL
    return masked_NS, torch.from_numpy(plan.weights_n[plan.numbers_N]) / samples


def _denoised(model: Any, ids_S: Tensor, masked_BS: Tensor, read_S: Tensor) -> Tensor:
    """Losses of the masked tokens that are read, (B, S); 0 elsewhere."""
    ids_BS = ids_S.expand(masked_BS.shape)
    noisy_BS = ids_BS.masked_fill(masked_BS, model.config.mask_token_id).to(model.device)
    wanted_BS = masked_BS & read_S
    logits_MV = model.denoiser().scored(
        noisy_BS, wanted_BS.to(model.device), ids_BS.to(model.device)
    )
    nats_BS = torch.zeros(masked_BS.shape)
    nats_BS[wanted_BS] = cross_entropy(logits_MV.float().cpu(), ids_BS[wanted_BS], reduction="none")
    return nats_BS


def _continued(model: Any, ids_S: Tensor, masked_BS: Tensor, read_S: Tensor) -> Tensor:
    """Next-token losses, (1, S), at the position of the token; 0 at the first."""
    logits_1SV = model(ids_S[None].to(model.device), use_cache=False).logits
    nats_BS = torch.zeros(1, len(ids_S))
    nats_BS[0, 1:] = cross_entropy(logits_1SV[0, :-1].float().cpu(), ids_S[1:], reduction="none")
    return nats_BS


def _regrown(records: Sequence[RemovalRecord], before_BLHK: Tensor) -> Tensor:
    """Share of heads of each row in which another key became a sink, (B,); 0 with nothing edited.

    Args:
        records: of one forward; the last one stands for all edits.
        before_BLHK: share of the attention of each key without edits.
    """
    if not records:
        return torch.zeros(len(before_BLHK))
    last = records[-1]
    own_BLHK = before_BLHK[:, list(last.layer_numbers)][:, :, list(last.heads)]
    at_BLH1 = last["strongest_at"].nan_to_num().long().clamp_min(0)[..., None]
    was_BLH = own_BLHK.gather(-1, at_BLH1)[..., 0]
    grown_BLH = (last["strongest"] > STRONG) & (was_BLH <= STRONG)
    return grown_BLH.float().flatten(1).mean(1)
