"""The cost of blocking keys while text is written: how far texts are apart from those written with
nothing blocked.
"""

# R texts
import itertools
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pandas as pd
from torch import Tensor

from sinklab.core.probing import BlockKeys
from sinklab.core.sampling import DecodingSettings
from sinklab.lab.analysis.doses import told_apart
from sinklab.lab.checkpoints import Loaded
from sinklab.lab.measures import by_protocol
from sinklab.lab.records import Run
from sinklab.lab.reports import number, percent, write_page
from sinklab.lab.scoring import (
    LikelihoodSettings,
    Writing,
    WritingRequest,
    by_last_query,
    heldout_rows,
    output_distances,
)
from sinklab.lab.scoring import score as likelihoods
from sinklab.lab.studies import (
    Arm,
    Block,
    Design,
    Progress,
    Rows,
    Trial,
    check_fits,
    deferred,
    heldout_text,
    mean_table,
    of_each,
)
from sinklab.lab.studies.curve.figures import curve_statements, two_digits
from sinklab.lab.studies.curve.study import REMOVALS, CostStudy, CurveSettings

ARM = ["protocol", "removal", "k", "control"]
OUTCOMES = ("agreement", "kl", "same", "worse")
LIMITS = {"agreement": (0, 1), "kl": (0, None), "same": (0, 1)}
DOSE = ("keys", "sinks", "held", "removed", "overlap")
SAMPLES = 16
"""Masks by which a diffusion model judges a text."""


class Distances(CostStudy):
    """Distance of texts written with keys blocked from those that the unedited model writes."""

    kind = "distance"
    parts = "distances"
    defaults: ClassVar = {
        "ks": (1, 5),
        "controls": ("sinks",),
        "removals": REMOVALS,
        "rows": 12,
        "batch": 12,
    }
    reads = (
        "protocols",
        "sink_rule",
        "heldout",
        "prompt_tokens",
        "new_tokens",
        "block_length",
        "seed",
    )

    def filled(self, settings: CurveSettings) -> CurveSettings:
        """The settings with defaults where they are left out. Raises ValueError for no keys."""
        if 0 in settings.ks:
            raise ValueError(
                "texts are always written with nothing blocked too; leave 0 out of ks, got "
                f"{settings.ks}"
            )
        return super().filled(settings)

    def read_samples(self, loaded: Loaded, settings: CurveSettings, progress: Progress) -> Tensor:
        """The prompts, once the model is known to write on from them.

        Raises:
            ValueError: for a model without a mask token or a tokenizer, texts that do not fit its
                context, and more keys than a prompt has.
        """
        length = settings.prompt_tokens + settings.new_tokens
        check_fits(loaded, "distance", length, "ask for fewer tokens")
        most = settings.prompt_tokens // 2
        if max(settings.ks) > most:
            raise ValueError(
                f"k keys and as many others must fit a prompt of {settings.prompt_tokens} tokens, "
                f"but k is {max(settings.ks)}; choose at most {most}, or a longer prompt"
            )
        source = heldout_text(settings.heldout)
        text = heldout_rows(loaded, source, rows=settings.rows or 0, length=length)
        return text.ids_RS[:, : settings.prompt_tokens]

    def arms(
        self, loaded: Loaded, settings: CurveSettings, samples: Tensor
    ) -> dict[Arm, list[BlockKeys]]:
        """Edits by protocol, removal, k and control; an autoregressive model chooses by its last
        query.
        """
        arms: dict[Arm, list[Any]] = {}
        for arm in itertools.product(
            settings.protocols, settings.removals, settings.ks, settings.controls
        ):
            protocol, removal, k, control = arm
            how: dict[str, Any] = {"how": removal, "control": control, "seed": settings.seed}
            arms[arm] = [by_protocol(protocol, k, settings.sink_rule, **how)]
            if not loaded.is_diffusion:
                arms[arm] = [*by_last_query(arms[arm])]
        return arms

    def steps(self, settings: CurveSettings, block: Block) -> int:
        """Counted when its texts are written."""
        return 1

    def control_blocks(self, design: Design) -> list[Block]:
        """None: controls of texts are not written."""
        return []

    def measure(self, trial: Trial) -> Rows:
        """Lines of the table ``distances``, by arm and text: agreement, kl and same (`Distance`);
        worse, nats per token that the text costs the unedited model more than the clean one does (a
        Monte Carlo bound of a diffusion model, under the same masks); the dose removed in the free
        run (`Dose`); the text.
        """
        settings, loaded = trial.settings, trial.loaded
        prompts = trial.samples[trial.rows.start : trial.rows.stop].tolist()
        requests = [WritingRequest(tuple(ids), (), settings.seed) for ids in prompts]
        how = DecodingSettings(seed=settings.seed)
        if loaded.is_diffusion:
            how = DecodingSettings(seed=settings.seed, block_length=settings.block_length)
        texts = Writing(loaded, requests, how, settings.new_tokens, ends=False)
        drawn = output_distances(texts, [(), *trial.arms.values()])
        clean, *found = drawn
        # nats per token of all different texts by the model without edits; masks depend on the row
        written = [
            *dict.fromkeys((row, text) for one in drawn for row, text in enumerate(one.texts))
        ]
        scored = likelihoods(
            loaded,
            [(prompts[row], text) for row, text in written],
            LikelihoodSettings(samples=SAMPLES, seed=settings.seed),
            groups=[row for row, _ in written],
        )
        costs = {text: -one.logprob / one.tokens for text, one in zip(written, scored, strict=True)}
        lines = []
        for arm, one in zip(trial.arms, found, strict=True):
            for row, text in enumerate(one.texts):
                line = dict(zip(ARM, arm, strict=True)) | {"row": trial.rows[row]}
                parts = {"agreement": one.agreement_B, "kl": one.kl_B, "same": one.same_B}
                line |= {name: values_B[row].item() for name, values_B in parts.items()}
                line["worse"] = costs[row, text] - costs[row, clean.texts[row]]
                dose = one.dose(row).row()
                line |= {name: dose[name] for name in DOSE}
                line["text"] = loaded.needed_tokenizer().decode(list(text))
                lines.append(line)
        return {"distances": pd.DataFrame(lines)}

    def contrasts(self, trial: Trial, rows: Rows) -> Rows:
        """The table ``outcomes``."""
        return {"outcomes": outcomes(rows["distances"])}

    sentences = deferred("sinklab.lab.studies.curve.writing:distance_sentences")

    draw = deferred("sinklab.lab.studies.curve.writing:draw_distance")


def outcomes(distances: pd.DataFrame) -> pd.DataFrame:
    """A line per arm: means over texts with 95 % intervals (NaN with fewer than 8 texts), and the
    mean dose.

    told: 1 if texts are worse than without edits, −1 if they are better, 0 if inconclusive
    (`told_apart`, all arms together).
    """
    table = mean_table(distances, ARM, OUTCOMES, DOSE).rename(columns={"rows": "texts"})
    for name, limits in LIMITS.items():
        for end in (f"{name}_low", f"{name}_high"):
            table[end] = table[end].clip(*limits)
    worse = [rows.sort_values("row")["worse"] for _, rows in distances.groupby(ARM, sort=False)]
    return table.assign(told=told_apart(np.stack(worse, 1)))


def distance_table(run: Run) -> pd.DataFrame:
    """The table ``outcomes`` as text for people."""
    lines = []
    for cell in run.table("outcomes").to_dict("records"):
        hidden = cell["control"]
        if hidden == "sinks" and cell["protocol"] != "rule":
            hidden = "top k"
        line = {
            "protocol": cell["protocol"],
            "path": cell["removal"],
            "k": cell["k"],
            "blocked": hidden,
            "keys": number(cell["keys"]),
            **{name: percent(cell[name]) for name in DOSE[1:]},
            "tokens that agree": two_digits(cell, "agreement"),
            "KL at fixed order, nats": two_digits(cell, "kl"),
            "same token at fixed order": two_digits(cell, "same"),
            "worse text, nats": two_digits(cell, "worse"),
        }
        lines.append(line)
    return pd.DataFrame(lines)


@of_each
def distance_sentences(run: Run) -> list[str]:
    """Sentences on each run, protocol and path: how far texts differ, and whether they are worse,
    at the greatest k.
    """
    told = curve_statements()
    cells = run.table("outcomes")
    is_shown = (cells["k"] == cells["k"].max()) & (cells["control"] == cells["control"].iloc[0])
    said = []
    for cell in cells[is_shown].to_dict("records"):
        said += told("distance", run.info.model["name"], cell)
    return said


@of_each
def draw_distance(run: Run, out: Path, options: Any) -> list[Path]:
    """distance.md in each run folder."""
    said = distance_sentences([run])
    return [write_page(run.path / "distance.md", distance_table(run), said)]
