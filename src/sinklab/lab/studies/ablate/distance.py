"""Texts written with and without keys blocked: how far apart they are."""

# R texts
from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from torch import Tensor

from sinklab.core.probing.interventions.block_keys import BlockKeys
from sinklab.core.probing.interventions.mask_sinks import by_protocol
from sinklab.core.sampling.settings import DecodingSettings
from sinklab.lab.analysis.doses import told_apart
from sinklab.lab.analysis.estimates import FEWEST, mean_over
from sinklab.lab.checkpoints.loading import Loaded
from sinklab.lab.records.reading import Run, open_run
from sinklab.lab.reports.printed import write_page
from sinklab.lab.reports.words import number, percent
from sinklab.lab.scoring.distance import Distance, output_distances
from sinklab.lab.scoring.heldout import heldout_rows
from sinklab.lab.scoring.likelihood import LikelihoodSettings
from sinklab.lab.scoring.likelihood import score as likelihoods
from sinklab.lab.scoring.writing import Writing, WritingRequest
from sinklab.lab.studies.ablate.study import DistanceSettings
from sinklab.lab.studies.base import Work, check_fits, columns_of, heldout_text
from sinklab.lab.studies.processes import Progress

ARM = ["protocol", "removal", "k", "control"]
OUTCOMES = ("agreement", "kl", "same", "worse")
LIMITS = {"agreement": (0, 1), "kl": (0, np.inf), "same": (0, 1)}
DOSE = ("columns", "sinks", "held", "removed", "overlap")
SAMPLES = 16
"""Masks by which a diffusion model judges a text."""


def prepare(loaded: Loaded, settings: DistanceSettings, progress: Progress) -> tuple[Tensor, ...]:
    """The prompts in batches, once the model is known to write on from them.

    Raises:
        ValueError: for a model without a mask token or a tokenizer, texts that do not fit its
            context, and more keys than a prompt has.
    """
    loaded.needed_tokenizer()
    length = settings.prompt_tokens + settings.new_tokens
    check_fits(loaded, "distance", length, "ask for fewer tokens")
    if max(settings.ks) * 2 > settings.prompt_tokens:
        raise ValueError(
            f"k keys and as many others must fit a prompt of {settings.prompt_tokens} tokens, but "
            "k is "
            f"{max(settings.ks)}; choose at most {settings.prompt_tokens // 2}, or a longer prompt"
        )
    text = heldout_rows(loaded, heldout_text(settings.heldout), rows=settings.rows, length=length)
    return text.ids_RS[:, : settings.prompt_tokens].split(settings.batch)


def arms_of(
    settings: DistanceSettings, *, is_diffusion: bool
) -> dict[tuple[Any, ...], list[BlockKeys]]:
    """The edits by protocol, removal, k and control; an autoregressive model chooses by its last
    query.
    """
    chosen = itertools.product(
        settings.protocols, settings.removals, settings.ks, settings.controls
    )
    fixed = {"seed": settings.seed, "scores": None if is_diffusion else "last_row"}
    return {
        (protocol, removal, k, control): [
            by_protocol(protocol, k, settings.sink_rule, how=removal, control=control, **fixed)
        ]
        for protocol, removal, k, control in chosen
    }


def write_texts(work: Work) -> None:
    """Write a part of the table ``distances`` for every batch of texts that is missing.

    By text and arm: agreement, kl and same (`Distance`); worse, nats per token that the text costs
    the unedited model more than the clean one does (a Monte Carlo bound of a diffusion model, under
    the same masks); the dose removed in the free run (`Dose`); the text.
    """
    settings, loaded = work.settings, work.loaded
    arms = arms_of(settings, is_diffusion=loaded.family == "diffusion")
    count = work.progress.counter(len(work.samples))
    for part in work.samples:
        first, prompts = part * settings.batch, work.plan[part].tolist()
        work.progress.stage(f"texts {first + 1} to {first + len(prompts)}, {1 + len(arms)} ways")
        requests = [WritingRequest(tuple(ids), (), settings.seed) for ids in prompts]
        how = DecodingSettings(seed=settings.seed)
        if loaded.family == "diffusion":
            how = DecodingSettings(seed=settings.seed, block_length=settings.block_length)
        texts = Writing(loaded, requests, how, settings.new_tokens, ends=False)
        clean, *found = output_distances(texts, [(), *arms.values()])
        costs = {
            text: cost for text, cost in _judged(loaded, prompts, [clean, *found], settings.seed)
        }
        rows = []
        for arm, one in zip(arms, found, strict=True):
            for row, text in enumerate(one.texts):
                dose = one.dose(row).row()
                line = dict(zip(ARM, arm, strict=True)) | {"row": first + row}
                line |= {"agreement": one.agreement_B[row].item(), "kl": one.kl_B[row].item()}
                line |= {
                    "same": one.same_B[row].item(),
                    "worse": costs[row, text] - costs[row, clean.texts[row]],
                }
                rows.append(
                    line
                    | {name: dose[name] for name in DOSE}
                    | {"text": loaded.needed_tokenizer().decode(list(text))}
                )
        work.run.table("distances", columns_of(rows), part=part)
        count()


def _judged(
    loaded: Loaded, prompts: list[list[int]], found: list[Distance], seed: int
) -> Iterable[Any]:
    """((row, text), nats per token) of all different texts, by the model without edits; masks
    depend on the row.
    """
    texts = [*dict.fromkeys((row, text) for one in found for row, text in enumerate(one.texts))]
    how = LikelihoodSettings(samples=SAMPLES, seed=seed)
    asked = [(prompts[row], text) for row, text in texts]
    scored = likelihoods(loaded, asked, how, groups=[row for row, _ in texts])
    return zip(texts, (-one.logprob / one.tokens for one in scored), strict=True)


def summarize(work: Work) -> None:
    """Write the table ``outcomes`` of all texts."""
    work.run.table("outcomes", outcomes(open_run(work.run.path).table("distances")))


def outcomes(distances: pd.DataFrame) -> pd.DataFrame:
    """A line per arm: means over texts with 95 % intervals (NaN with fewer than 8 texts), and the
    mean dose.

    told: 1 if texts are worse than without edits, −1 if they are better, 0 if inconclusive
    (`told_apart`, all arms together).
    """
    lines, groups = [], distances.groupby(ARM, sort=False)
    told = told_apart(np.stack([rows.sort_values("row")["worse"] for _, rows in groups], 1))
    for (arm, rows), one in zip(groups, told, strict=True):
        line: dict[str, Any] = dict(zip(ARM, arm, strict=True)) | {"texts": len(rows)}
        for name in OUTCOMES:
            found = mean_over(rows[name])
            ends = np.clip(found.interval, *LIMITS.get(name, (-np.inf, np.inf)))
            line |= dict(
                zip((name, f"{name}_low", f"{name}_high"), (found.value, *ends), strict=True)
            )
        lines.append(line | {name: rows[name].mean() for name in DOSE} | {"told": one})
    return pd.DataFrame(lines)


def distance_table(run: Run) -> pd.DataFrame:
    """The table ``outcomes`` as text for people."""
    lines = []
    for cell in run.table("outcomes").to_dict("records"):
        line = {
            "protocol": cell["protocol"],
            "path": cell["removal"],
            "k": cell["k"],
            "hidden": cell["control"],
        }
        line |= {
            "hidden": "top k"
            if line["hidden"] == "sinks" and line["protocol"] != "rule"
            else line["hidden"]
        }
        line |= {
            "keys": number(cell["columns"]),
            **{name: percent(cell[name]) for name in DOSE[1:]},
        }
        line |= {
            "tokens that agree": _interval(cell, "agreement"),
            "KL at fixed order, nats": _interval(cell, "kl"),
        }
        line |= {
            "same token at fixed order": _interval(cell, "same"),
            "worse text, nats": _interval(cell, "worse"),
        }
        lines.append(line)
    return pd.DataFrame(lines)


def _interval(cell: dict[str, Any], name: str) -> str:
    ends = [cell[name], cell[f"{name}_low"], cell[f"{name}_high"]]
    words = [number(one, 2) for one in ends]
    return words[0] if np.isnan(ends[1]) else f"{words[0]} ({words[1]} … {words[2]})"


def distance_sentences(runs: Iterable[Run]) -> list[str]:
    """Sentences on each run, protocol and path: how far texts differ, and whether they are worse,
    at the greatest k.
    """
    said = []
    for run in runs:
        cells = run.table("outcomes")
        cells = cells[
            (cells["k"] == cells["k"].max()) & (cells["control"] == cells["control"].iloc[0])
        ]
        for cell in cells.to_dict("records"):
            worse = {1: "worse", -1: "better", 0: "not to be told from as good"}[int(cell["told"])]
            few = (
                f", {cell['texts']} texts are too few to tell (at least {FEWEST})"
                if cell["texts"] < FEWEST
                else ""
            )
            said.append(
                f"{run.info.model['name']}, protocol {cell['protocol']}, {cell['removal']}, k = "
                f"{cell['k']} ({number(cell['columns'])} keys a head, {percent(cell['removed'])} "
                f"of the attention removed): {percent(cell['agreement'])} of the tokens agree, KL "
                f"at fixed order {number(cell['kl'], 2)} nats a token; to the unedited model the "
                f"texts are {worse} ({_interval(cell, 'worse')} nats a token){few}."
            )
    return said


def draw_tables(runs: Iterable[Run], out: Path, options: Any) -> list[Path]:
    """distance.md in each run folder."""
    return [
        write_page(run.path / "distance.md", distance_table(run), distance_sentences([run]))
        for run in runs
    ]
