"""The numbers of runs as tables, in memory and as files, and of two runs side by side."""

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from sinklab.core.errors import one_of
from sinklab.lab.analysis import Verdict, holm, mean_over, ninety_six, start_only
from sinklab.lab.analysis.estimates import FEWEST, SEEDS, jackknife
from sinklab.lab.analysis.words import CONTROLS
from sinklab.lab.records import Run
from sinklab.lab.reports.drawing import write_csv
from sinklab.lab.reports.measured import THREE
from sinklab.lab.reports.runs import Runs, as_shown, as_studies
from sinklab.lab.reports.samples import MASK
from sinklab.lab.reports.study import Study
from sinklab.lab.reports.training import Training


def outcome_table(run: Training) -> pd.DataFrame:
    """A row per run: variant, the held-out loss with its 95 % interval, when sinks emerged, the
    last measurement.
    """
    loss = run.loss or mean_over([])
    low, high = loss.interval
    row: dict[str, Any] = {
        "variant": run.variant,
        "seed": run.run.info.seed,
        "status": run.run.info.status,
    }
    row |= {"heldout_loss": loss.value, "low": low, "high": high, "heldout_rows": loss.samples}
    row |= {"takeover_step": run.takeover, "emergence_step": run.emergence}
    if run.monitor is not None:
        whole = run.monitor[run.monitor["layer"] == -1].sort_values("step")
        row |= whole.iloc[-1].drop(["layer", "causal"]).to_dict()
    return pd.DataFrame([row]).astype({"takeover_step": "Int64", "emergence_step": "Int64"})


def over_seeds(trainings: Sequence[Training]) -> pd.DataFrame:
    """The held-out loss of each variant less that of plain, of the same seed and settings and on
    the same rows: variant, less, mean, low and high (over seeds; of a single one over rows), seeds,
    and a verdict, which takes 6 seeds.
    """
    rows = []
    plain = [run for run in trainings if run.variant == "plain"] or [*trainings[:1]]
    by_seed = {run.design: run for run in plain}
    for variant in dict.fromkeys(run.variant for run in trainings if run not in plain):
        pairs = [
            (run, by_seed[run.design])
            for run in trainings
            if run.variant == variant and run not in plain and run.design in by_seed
        ]
        gaps = [gap for run, other in pairs if (gap := run.against(other)) is not None]
        if not gaps:
            continue
        found = mean_over([gap.value for gap in gaps], fewest=SEEDS)
        word = {True: "worse", False: "better", None: "inconclusive"}[found.above()]
        row = {"variant": variant, "less": plain[0].variant, "mean": found.value}
        ends = found if found.samples > 1 else gaps[0]
        row |= {"low": ends.low, "high": ends.high, "seeds": found.samples}
        rows.append(row | {"verdict": word if found.is_interval else f"takes {SEEDS} seeds"})
    return pd.DataFrame(rows)


TEXT_SINK = "greatest text sink"
MOBILITY = "(0 static, 1 moving)"
BY_CLASS = "attention explained by class of token, %"
SHORT = "value norm, text sinks over other text"


def classes_table(study: Study) -> pd.DataFrame:
    """Enrichment by class of token and by age of the position (masked, just committed, committed,
    prompt); no row without tokens.
    """
    if not study.measured.enriched:
        return pd.DataFrame()
    parts = {by: study.measured.enriched[by] for by in ("class", "age")}
    return pd.concat(parts, names=["by"]).reset_index("by").reset_index(drop=True)


def verdicts_of(study: Study) -> list[Verdict]:
    """The failure signature and the 96 % statement, corrected for their number (``holm``); none
    without attention.
    """
    if not study.layers:
        return []
    return holm([start_only(study.measured.events_NS), ninety_six(study.measured.filtered_N)])


def measures_table(study: Study, verdicts: Sequence[Verdict] | None = None) -> pd.DataFrame:
    """Measures, a row each, and the verdicts: measure, value, low and high (the ends of
    the 95 % interval over samples, the jackknife's), the value of each control, and verdict.

    Args:
        study: the run.
        verdicts: its verdicts, if they are corrected for more than their own number.
    """
    controls = {CONTROLS[kind]: twin for kind, twin in study.twins.items()}
    frame = _side_by_side(("value", *controls), (study, *controls.values()))
    frame = frame.dropna(subset="value").join(_intervals(study))
    words = _verdicts(study)
    frame["verdict"] = [words.get(name, "") for name in frame.index]
    rows = [{"measure": name, **row} for name, row in frame.to_dict("index").items()]
    others = {name: verdicts_of(twin) for name, twin in controls.items()}
    for place, one in enumerate(verdicts or verdicts_of(study)):
        row: dict[str, Any] = {"measure": f"{one.name} (above {100 * one.threshold:g} %), %"}
        found = [one.estimate.value, *one.estimate.interval]
        row |= dict(zip(("value", "low", "high"), np.multiply(100, found).tolist(), strict=True))
        row["verdict"] = one.word
        row |= {name: 100 * others[name][place].estimate.value for name in controls}
        rows.append(row)
    columns = ["measure", "value", "low", "high", *controls, "verdict"]
    return pd.DataFrame(rows, columns=columns)


def _verdicts(study: Study) -> dict[str, str]:
    """The verdict of the measures that have one: how sinks move, what explains them, and whether
    their values are short.
    """
    if not study.layers:
        return {}
    found: dict[str, str | None] = {}
    motion, explained = study.measured.motion, study.measured.explained
    if motion is not None and motion.mobility_over.samples:
        found[f"mobility of the main sink {MOBILITY}"] = motion.word
    if explained is not None:
        found[BY_CLASS] = explained.word
    ratio = study.measured.norm_ratio
    if ratio.samples:
        found[SHORT] = {True: "longer", False: "shorter", None: ""}[ratio.above(1)]
    return {name: word or "inconclusive" for name, word in found.items()}


def _side_by_side(names: Sequence[str], studies: Sequence[Study]) -> pd.DataFrame:
    """`measures` of some studies, a column each; those that none has are left out."""
    columns = [
        pd.Series(measures(study), name=name) for name, study in zip(names, studies, strict=True)
    ]
    frame = pd.concat(columns, axis=1).dropna(how="all")
    if any(study.sink_count for study in studies):
        return frame
    return frame[[TEXT_SINK not in name for name in frame.index]]


TABLES: dict[str, dict[str, Callable[[Any], Any]]] = {
    "study": {
        "sink_tokens": lambda study: study.measured.enriched.get("token"),
        "classes": classes_table,
        "layers": attrgetter("measured.by_layer"),
        "motion": attrgetter("measured.motions"),
        "rules": attrgetter("measured.rules"),
        "curve": attrgetter("measured.curve"),
        "measures": measures_table,
        "answers": attrgetter("answers.table"),
        "statistics": attrgetter("measured.statistics"),
    },
    "training": {
        "outcome": outcome_table,
        "history": attrgetter("history"),
        "monitor": attrgetter("monitor"),
    },
}
"""Kind of run -> tables of a report by name; None or no row for one that it recorded nothing
for."""


def table(run: Runs, name: str) -> pd.DataFrame:
    """One of ``TABLES`` of a run; no row for one that it has nothing for. Raises ValueError for
    another name.
    """
    reader = as_shown(run)[0]
    tables = TABLES[reader.run.info.kind]
    one_of("table of a report", name, tables)
    found = tables[name](reader)
    return pd.DataFrame() if found is None else found


def tables_of(readers: Sequence[Any]) -> dict[str, dict[str, pd.DataFrame]]:
    """All tables of some runs by name and label of the run, but for those without rows; verdicts
    are corrected for the number of all of them.
    """
    found = {}
    for name in TABLES[readers[0].run.info.kind]:
        frames = _judged(readers) if name == "measures" else [table(run, name) for run in readers]
        by_run = {run.label: one for run, one in zip(readers, frames, strict=True) if len(one)}
        if by_run:
            found[name] = by_run
    return found


def _judged(studies: Sequence[Study]) -> list[pd.DataFrame]:
    """The measures of each, with verdicts that are corrected together."""
    each = [verdicts_of(study) for study in studies]
    every = iter(holm([one for verdicts in each for one in verdicts]))
    pairs = zip(studies, each, strict=True)
    return [measures_table(study, [next(every) for _ in some]) for study, some in pairs]


def write_tables(tables: Mapping[str, Mapping[str, pd.DataFrame]], folder: Path) -> list[Path]:
    """Write `tables_of` some runs, NAME.csv each, with the run in the first column; the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    return [
        write_csv(folder / f"{name}.csv", pd.concat(by_run, names=["run"]).reset_index("run"))
        for name, by_run in tables.items()
    ]


def compare(a: Run | Study, b: Run | Study) -> pd.DataFrame:
    """Measures of two runs: columns measure, the labels of the runs, difference (second less
    first), and low and high, the ends of its 95 % interval over prompts.

    Shares are in percent. A measure that neither run has is left out; one that a run lacks is NaN.
    The interval is the jackknife's, of measures of attention in runs of the same prompts in the
    same order, at least 8 of them, not corrected for their number; NaN for others.
    """
    one, other = as_studies([a, b])
    frame = _side_by_side((one.label, other.label), (one, other))
    frame["difference"] = frame.iloc[:, 1] - frame.iloc[:, 0]
    return frame.join(_intervals(one, other)).rename_axis("measure").reset_index()


def _intervals(study: Study, other: Study | None = None) -> pd.DataFrame:
    """Columns low and high of each measure of attention, or of its difference from that of another
    run of the same prompts.
    """
    samples, names = len(study.recorded), [*_of_attention(study.measured)] if study.layers else []
    alike = other is None or prompts_of(study) == prompts_of(other) != []
    if samples < FEWEST or not alike:
        return pd.DataFrame(columns=["low", "high"], dtype=float)

    def measured(places: np.ndarray) -> np.ndarray:
        found = [
            pd.Series(_of_attention(one.measured.of(places))).reindex(names).to_numpy(float)
            for one in (other, study)
            if one is not None
        ]
        return found[-1] if other is None else found[0] - found[1]

    ends = [mean_over(each).interval for each in jackknife(measured, samples)]
    return pd.DataFrame(ends, index=names, columns=["low", "high"])


def prompts_of(study: Study) -> list[str | None]:
    """Prompts of the samples with attention; none if they were not written down."""
    written = study.table("generations")
    if written is None:
        return []
    prompts = written.drop_duplicates("sample").set_index("sample")["prompt"]
    return [prompts.get(study.run.samples[place]) for place in study.recorded]


def measures(study: Study) -> dict[str, float]:
    """The numbers that runs are compared by, name -> value; NaN for numbers that the run did not
    record.
    """
    found: dict[str, float] = {"samples": float(len(study.samples))}
    if study.layers:
        found |= _of_attention(study.measured)
    return found | _removals(study)


def _of_attention(measured: Any) -> dict[str, float]:
    return _sinks(measured) | _motion(measured) | _tokens(measured)


def _sinks(measured: Any) -> dict[str, float]:
    by_layer = measured.by_layer
    means = by_layer.mean(numeric_only=True)
    return {
        "tokens that are no sinks at ε = 3, %": 100 * measured.curve["filtered"][THREE],
        "sinks per head and step": means["sinks"],
        "heads with a sink, %": 100 * measured.rules["heads_with_sink"][0],
        "attention on sinks, %": 100 * means["absorbed"],
        "attention on the added sink, %": 100 * means["added_share"],
        "attention on the greatest text position, %": 100 * means["text_share"],
        "value norm, added sink over other text": means["added_norm"] / means["rest_norm"],
        SHORT: means["sink_norm"] / means["rest_norm"],
        "value norm, masks over visible text": means["mask_norm"] / means["text_norm"],
    }


def _motion(measured: Any) -> dict[str, float]:
    found: dict[str, float] = {}
    # without an added sink every sink is one on text
    for motion, what in (
        (measured.motion, "main sink"),
        (measured.text_motion or measured.motion, TEXT_SINK),
    ):
        found |= {
            f"mobility of the {what} {MOBILITY}": motion.mobility,
            f"moves of the {what}, % of steps at which it is a sink": 100 * motion.moves_per_step,
        }
    return found | {"overlap of sinks with those of the next step, %": 100 * measured.overlap}


def _tokens(measured: Any) -> dict[str, float]:
    found: dict[str, float] = {}
    tokens, explained = measured.enriched.get("token"), measured.explained
    if tokens is not None and tokens["events"].any():
        for mask in tokens[tokens["label"] == MASK].itertuples():
            found["sinks that are masks, %"] = 100 * mask.frequency
            found["enrichment of masks among sinks"] = mask.enrichment
    if explained is not None:
        found[BY_CLASS] = 100 * explained.shares[0]
        found["attention explained by position, %"] = 100 * explained.shares[1]
    return found


def _removals(study: Study) -> dict[str, float]:
    """Keys that each edit blocked: means over samples and forward passes."""
    found: dict[str, float] = {}
    removals = study.table("removals")
    if removals is None:
        return found
    numbers = {"keys": "keys blocked per head", "held": "attention on the blocked keys, %"}
    numbers |= {"removed": "attention removed, %", "overlap": "overlap of blocked keys, %"}
    means = removals.reindex(columns=["edit", *numbers]).groupby("edit", sort=False)
    for edit, row in means.mean().iterrows():
        for name, what in numbers.items():
            found[f"{edit}: {what}"] = row[name] * (1 if name == "keys" else 100)
    return found
