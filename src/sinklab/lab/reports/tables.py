"""The numbers of runs as tables, in memory and as Parquet, CSV and Markdown files, and of two side
by side.
"""

# L layers, H heads
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from sinklab.core.errors import one_of
from sinklab.lab.analysis import mean_over
from sinklab.lab.analysis.estimates import FEWEST, SEEDS, jackknife
from sinklab.lab.analysis.verdicts import Verdict
from sinklab.lab.analysis.words import CONTROLS
from sinklab.lab.records import Run, write_beside
from sinklab.lab.reports.recorded import statistics_table
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
    """The held-out loss of each variant less that of plain, of the same seed and on the same rows:
    variant, less, mean, low and high (over seeds; of a single one over rows), seeds, and a verdict,
    which takes 6 seeds.
    """
    rows = []
    plain = [run for run in trainings if run.variant == "plain"] or [*trainings[:1]]
    by_seed = {run.run.info.seed: run for run in plain}
    for variant in dict.fromkeys(run.variant for run in trainings if run not in plain):
        pairs = [
            (run, by_seed.get(run.run.info.seed, plain[0]))
            for run in trainings
            if run.variant == variant and run not in plain
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


def written(run: Training, name: str) -> pd.DataFrame:
    """A table of the run as it is; empty if it was not written."""
    found = run.table(name)
    return pd.DataFrame() if found is None else found


TRAINING_TABLES: dict[str, Callable[[Training], pd.DataFrame]] = {
    "outcome": outcome_table,
    "history": lambda run: written(run, "history"),
    "monitor": lambda run: written(run, "monitor"),
}
"""Tables of a report by name, of a training run."""


MARKDOWN_ROWS = 60
TEXT_SINK = "greatest text sink"
MOBILITY = "(0 static, 1 moving)"
BY_CLASS = "attention explained by class of token, %"
SHORT = "value norm, text sinks over other text"
VERDICTS: Mapping[bool, Mapping[bool | None, str]] = {
    True: {True: "seen", False: "not seen", None: "inconclusive"},
    False: {True: "holds", False: "does not hold", None: "inconclusive"},
}
"""whether it is a failure signature -> whether it holds -> the word"""


def tokens_table(study: Study) -> pd.DataFrame:
    """Tokens that are sinks (analysis paper, Table 2): events, frequency, occupancy, enrichment of
    every token; no row without tokens.
    """
    if study.sink_tokens is None:
        return pd.DataFrame()
    return study.sink_tokens.rename(columns={"label": "token"})


def classes_table(study: Study) -> pd.DataFrame:
    """Enrichment by class of token and by age of the position (masked, just committed, committed,
    prompt); no row without tokens.
    """
    if study.classes is None:
        return pd.DataFrame()
    parts = {"class": study.classes, "age": study.ages}
    return pd.concat(parts, names=["by"]).reset_index("by").reset_index(drop=True)


def rules_table(study: Study) -> pd.DataFrame:
    """Sink rules side by side: the sinks of each, and its agreement with the first one (Jaccard
    overlap).
    """
    shown = {"rule": "name", "sinks_per_head": "per_head", "heads_with_sink": "rate"}
    shown |= {"filtered": "filtered", "absorbed": "absorb", "agreement": "agreement"}
    rules = study.measured.rules
    return pd.DataFrame(
        {column: [getattr(rule, name) for rule in rules] for column, name in shown.items()}
    )


def curve_table(study: Study) -> pd.DataFrame:
    """Share of tokens that are no sinks over the threshold (analysis paper, Fig. 10), all layers
    and each of them.
    """
    curve = study.curve
    if curve is None:
        return pd.DataFrame()
    columns = {
        f"layer_{layer}": row
        for layer, row in zip(study.layers, curve.filtered_by_layer, strict=True)
    }
    return pd.DataFrame({"epsilon": curve.epsilon, "filtered": curve.filtered, **columns})


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
    frame["verdict"] = pd.Series(_verdicts(study), dtype=object)
    rows = [{"measure": name, **row} for name, row in frame.to_dict("index").items()]
    for place, one in enumerate(study.verdicts if verdicts is None else verdicts):
        row: dict[str, Any] = {"measure": f"{one.name} (above {100 * one.threshold:g} %), %"}
        found = [one.estimate.value, *one.estimate.interval]
        row |= dict(zip(("value", "low", "high"), np.multiply(100, found).tolist(), strict=True))
        row["verdict"] = VERDICTS[one.signature][one.holds]
        row |= {name: 100 * twin.verdicts[place].estimate.value for name, twin in controls.items()}
        rows.append(row)
    columns = ["measure", "value", "low", "high", *controls, "verdict"]
    return pd.DataFrame(rows, columns=columns).fillna({"verdict": ""})


def _verdicts(study: Study) -> dict[str, str]:
    """The verdict of the measures that have one: how sinks move, what explains them, and whether
    their values are short.
    """
    if not study.layers:
        return {}
    found = {}
    if study.motion is not None and study.motion.mobility_over.samples:
        found[f"mobility of the main sink {MOBILITY}"] = study.motion.word
    if study.explained is not None:
        found[BY_CLASS] = study.explained.word
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


TABLES: dict[str, Callable[[Study], pd.DataFrame]] = {
    "sink_tokens": tokens_table,
    "classes": classes_table,
    "layers": lambda study: study.over("layer"),
    # motion of the main sink of every (sample, layer, head); the fields are those of
    # ``sinks.Motion``
    "motion": lambda study: study.measured.motions,
    "rules": rules_table,
    "curve": curve_table,
    # every measure with interval, controls and verdict; the failure signatures
    "measures": measures_table,
    # the three questions: word, number, interval, samples, detectable difference, controls,
    # sentence
    "answers": lambda study: study.answers.table,
    # recorded statistics without a figure of their own, those of plug-ins included
    "statistics": statistics_table,
}
"""Tables of a report by name, of a run that traced texts."""


def table(run: Runs, name: str) -> pd.DataFrame:
    """One of ``TABLES`` of a study, or of ``TRAINING_TABLES`` of a training run. Raises ValueError
    for another name.
    """
    reader = as_shown(run)[0]
    tables = _tables_of(reader)
    one_of("table of a report", name, tables)
    return tables[name](reader)


def _tables_of(reader: Study | Training) -> Mapping[str, Callable[[Any], pd.DataFrame]]:
    return TRAINING_TABLES if isinstance(reader, Training) else TABLES


WRITERS: dict[str, Callable[[pd.DataFrame, Path], object]] = {
    "parquet": lambda table, path: table.to_parquet(path, index=False),
    "csv": lambda table, path: table.to_csv(path, index=False),
    "md": lambda table, path: path.write_text(markdown(table), encoding="utf-8"),
}


def write_tables(
    runs: Runs,
    folder: str | Path,
    formats: Iterable[str] = tuple(WRITERS),
    names: Iterable[str] | None = None,
) -> list[Path]:
    """Write the tables of some runs, a file per table and format, with the run in the first column.

    ``names``: all that there are of runs of this kind, when left out. A table that no run has
    anything for is not written. Markdown shows at most 60 rows and says how many more there are.
    Returns the paths. Raises ValueError for unknown formats or names.
    """
    readers = as_shown(runs)
    target = Path(folder)
    formats = tuple(formats)
    for form in formats:
        one_of("format of a table", form, WRITERS)
    target.mkdir(parents=True, exist_ok=True)
    written = []
    for name in _tables_of(readers[0]) if names is None else names:
        parts = {run.label: table(run, name) for run in readers}
        parts = {label: part for label, part in parts.items() if len(part)}
        if not parts:
            continue
        whole = pd.concat(parts, names=["run"]).reset_index("run").reset_index(drop=True)
        for form in formats:
            path = target / f"{name}.{form}"
            write_beside(path, partial(WRITERS[form], whole))
            written.append(path)
    return written


def markdown(table: pd.DataFrame, most: int = MARKDOWN_ROWS) -> str:
    """A table as GitHub Markdown, numbers with four digits; at most ``most`` rows."""
    lines = [
        "| " + " | ".join(map(_cell, table.columns)) + " |",
        "|" + " --- |" * len(table.columns),
    ]
    lines += [
        "| " + " | ".join(map(_cell, row)) + " |"
        for row in table.head(most).itertuples(index=False)
    ]
    if len(table) > most:
        lines.append(f"\n{len(table) - most:,} more rows are left out here.")
    return "\n".join(lines) + "\n"


def _cell(value: object) -> str:
    if value is None or value is pd.NA or value != value:
        return "–"
    if isinstance(value, float | np.floating):
        return f"{value:.4g}"
    text = str(value).replace("\\", "\\\\").replace("|", "\\|").replace("\r", "").replace("\n", "↵")
    # a token's own spaces at its ends would not be seen
    body = text.strip(" ")
    lead = len(text) - len(text.lstrip(" "))
    return "␣" * lead + body + "␣" * (len(text) - lead - len(body))


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
    alike = other is None or _prompts(study) == _prompts(other) != []
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


def _prompts(study: Study) -> list[str | None]:
    """Prompts of the samples with attention; none if they were not written down."""
    if study.generations is None:
        return []
    prompts = study.generations.drop_duplicates("sample").set_index("sample")["prompt"]
    return [prompts.get(study.run.samples[place]) for place in study.recorded]


def measures(study: Study) -> dict[str, float]:
    """The numbers that runs are compared by, name -> value; NaN for numbers that the run did not
    record.
    """
    found: dict[str, float] = {"samples": float(len(study.samples))}
    if study.layers:
        found |= _of_attention(study.measured)
    return found | _losses(study) | _removals(study) | _activations(study)


def _of_attention(measured: Any) -> dict[str, float]:
    return _sinks(measured) | _motion(measured) | _tokens(measured)


def _sinks(measured: Any) -> dict[str, float]:
    by_layer = measured.by_layer
    means = by_layer.mean(numeric_only=True)
    return {
        "tokens that are no sinks at ε = 3, %": 100 * measured.curve.at(3.0),
        "sinks per head and step": means["sinks"],
        "heads with a sink, %": 100 * measured.rules[0].rate,
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
    found["overlap of sinks with those of the next step, %"] = (
        100 * measured.by_step["overlap"].mean()
    )
    return found


def _tokens(measured: Any) -> dict[str, float]:
    found: dict[str, float] = {}
    tokens, explained = measured.enriched("text"), measured.explained
    if tokens is not None and tokens["events"].any():
        for mask in tokens[tokens["label"] == MASK].itertuples():
            found["sinks that are masks, %"] = 100 * mask.frequency
            found["enrichment of masks among sinks"] = mask.enrichment
    if explained is not None:
        found[BY_CLASS] = 100 * explained.by_class.value
        found["attention explained by position, %"] = 100 * explained.by_position.value
    return found


def _losses(study: Study) -> dict[str, float]:
    frame = study.heldout
    if frame is None:
        return {}
    found = {}
    for loss in frame[frame["k"] == 0]["loss"].head(1):
        found["held-out loss, nothing blocked"] = float(loss)
    for _, row in frame[frame["k"] > 0].iterrows():
        what = "greatest sinks" if row["control"] == "sinks" else f"{row['control']} columns"
        found[f"change of held-out loss, {int(row['k'])} {what} blocked"] = float(row["delta"])
    return found


def _removals(study: Study) -> dict[str, float]:
    """Keys that each edit blocked: means over samples and forward passes."""
    found: dict[str, float] = {}
    if study.removals is None:
        return found
    numbers = {"keys": "keys blocked per head", "held": "attention on the blocked keys, %"}
    numbers |= {"removed": "attention removed, %", "overlap": "overlap of blocked keys, %"}
    means = study.removals.reindex(columns=["edit", *numbers]).groupby("edit", sort=False)
    for edit, row in means.mean().iterrows():
        for name, what in numbers.items():
            found[f"{edit}: {what}"] = row[name] * (1 if name == "keys" else 100)
    return found


def _activations(study: Study) -> dict[str, float]:
    """The hidden state that is furthest from the others, and whether such positions are sinks."""
    rows = study.massive
    if rows is None:
        return {}
    return {
        "greatest hidden state over the median": float(rows["ratio"].max()),
        "sinks at massive activations, % of heads": 100 * rows["sink_heads"].mean(),
        "sinks at any position, % of heads": 100 * rows["sink_heads_any"].mean(),
    }
