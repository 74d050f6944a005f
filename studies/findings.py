"""The findings on the packaged models in docs/findings.md, by one command.

    python studies/findings.py           measure below runs/findings (or $SINKLAB_STUDY) what is not
                                         there yet, write
    python studies/findings.py write     its tables, and marked numbers of all pages, from
                                         findings.json again
    python studies/findings.py texts [--only MODEL]
                                         the paths of sinks over 32 texts, for `sinklab tour`

Every model continues twelve passages of the held-out excerpt and is traced, its untrained twins on
the same canvases; then held-out rows are scored with keys blocked, in all heads and in one at a
time. findings.json keeps the numbers, checkpoints/packaged/ the runs that `sinklab tour` shows.

A page that tells one of them has a mark behind it, 17.3<!-- findings: ROW | MODEL -->, so that all
pages tell the same: ROW is one of the first table, or of the second "change by most attended keys,
k = 1" (held, removed, keys, sinks).
"""

import argparse
import dataclasses
import json
import os
import re
import shutil
from importlib import resources
from pathlib import Path
from typing import Any

import pandas as pd

from sinklab.lab.checkpoints import load
from sinklab.lab.cli.command import SAMPLING
from sinklab.lab.records import RunWriter, open_run
from sinklab.lab.records.info import of_twin
from sinklab.lab.reports import as_studies
from sinklab.lab.reports.study import staying_table
from sinklab.lab.reports.tables import measures
from sinklab.lab.studies.curve.figures import cost_rows
from sinklab.lab.studies.curve.study import CurveSettings, masking_curve
from sinklab.lab.studies.curve.verdicts import cost_sentences
from sinklab.lab.studies.trace.study import StudySettings, study

RUNS = Path(os.environ.get("SINKLAB_STUDY", "runs/findings"))
RESULTS = Path(__file__).with_suffix(".json")
ROOT = Path(__file__).parents[1]
PACKAGED = ROOT / "src" / "sinklab" / "lab" / "checkpoints" / "packaged"
MODELS = ("tiny", "tiny-sink", "tiny-causal")
CURVE = CurveSettings(ks=(0, 1, 10), rows=32, twin=True)
HEADS = CurveSettings(by="head", ks=(1,), rows=32, twin=False)
PASSAGES, WORDS = 12, 24
TEXTS, TOKENS = 32, 32
"""texts over which sinks are followed, and tokens of each: so many decide for every model"""
BEGIN, END = "<!-- findings: `python studies/findings.py` -->", "<!-- end -->"
MARK = re.compile(
    r"(?P<sign>[+−]?)(?P<number>\d+(?:\.\d+)?)<!-- findings: (?P<row>[^|>]+?) \| "
    r"(?P<model>[^|>]+?) -->"
)
TRACED = (
    "sinks per head and step",
    "heads with a sink, %",
    "tokens that are no sinks at ε = 3, %",
    "attention on the greatest text position, %",
    "attention on the added sink, %",
    "mobility of the main sink (0 static, 1 moving)",
    "attention explained by class of token, %",
    "attention explained by position, %",
    "sinks that are masks, %",
    "value norm, text sinks over other text",
)
"""Rows of the table, among the measures of `sinklab report`."""


def passages(number: int = PASSAGES, words: int = WORDS) -> tuple[str, ...]:
    """Beginnings of paragraphs of the packaged held-out text, evenly spread over its books."""
    file = resources.files("sinklab.lab.checkpoints").joinpath("packaged", "heldout.jsonl")
    books = [
        json.loads(line)["text"].split("\n\n") for line in file.read_text("utf-8").splitlines()
    ]
    long = [[text for text in book if len(text.split()) > WORDS] for book in books]
    parts = -(-number // len(long))
    some = [book[len(book) * part // parts] for part in range(parts) for book in long]
    return tuple(" ".join(text.split()[:words]) for text in some[:number])


def follow(name: str) -> None:
    """The paths of the sinks of a model and of its controls, a row a text, into the package."""
    settings = StudySettings(
        prompts=passages(TEXTS, 12),
        new_tokens=TOKENS,
        keep_arrays=False,
        statistics=("received",),
        twin=True,
        temperature=SAMPLING["temperature"],
    )
    loaded, made = load(name), RUNS / "texts" / name
    if loaded.is_diffusion:
        settings = dataclasses.replace(settings, block_length=8, **SAMPLING)
    run = open_run(study(loaded, made, settings, progress=print))
    whole = as_studies([run])[0]
    tables = {of_twin("staying", twin): staying_table(one) for twin, one in whole.twins.items()}
    given = {"prompts": f"{TEXTS} passages of packaged/heldout.jsonl"}
    package(run, "texts", tables | {"staying": staying_table(whole)}, kind="texts", **given)


def package(run: Any, place: str, tables: dict[str, Any], kind: str = "", **given: Any) -> None:
    """Some tables of a run, with its settings, as a run folder in the package."""
    info, kept = run.info, PACKAGED / place / run.path.name
    shutil.rmtree(kept, ignore_errors=True)
    how: dict[str, Any] = {"kind": kind or info.kind, "settings": info.settings | given}
    with RunWriter(kept, model=info.model, seed=info.seed, **how) as out:
        for name, table in tables.items():
            out.table(name, table)


def measure(names: tuple[str, ...]) -> None:
    """Run folders of all models, those that are complete left alone."""
    traced = StudySettings(prompts=passages(), twin=True)
    for name in names:
        loaded = load(name)
        study(
            loaded,
            RUNS / "trace" / name,
            traced,
            progress=print,
        )
        masking_curve(loaded, RUNS / "curve" / name, CURVE, progress=print)
        masking_curve(loaded, RUNS / "heads" / name, HEADS, progress=print)
        heads = open_run(RUNS / "heads" / name)
        package(heads, "heads", {"curve": heads.table("curve")})
        kept = PACKAGED / "curves" / name
        shutil.rmtree(kept, ignore_errors=True)
        shutil.copytree(RUNS / "curve" / name, kept)
        follow(name)


def collect(names: tuple[str, ...]) -> dict[str, Any]:
    """Everything that the tables show."""
    studies = as_studies([open_run(RUNS / "trace" / name) for name in names])
    curves = [open_run(RUNS / "curve" / name) for name in names]
    columns = {f"`{name}`": measures(one) for name, one in zip(names, studies, strict=True)}
    kinds = {"initialised": "freshly initialised", "permuted": "weights permuted"}
    columns |= {
        f"`{names[0]}`, {kinds[kind]}": measures(twin) for kind, twin in studies[0].twins.items()
    }
    trained = json.loads((PACKAGED / "provenance.json").read_text("utf-8"))
    heldout = {name: trained[name]["heldout"] for name in names}
    columns = {
        title: {
            "held-out loss, bits per byte": float(heldout[title.strip("`")]["bits_per_byte"]),
            **found,
        }
        if title.strip("`") in heldout
        else found
        for title, found in columns.items()
    }
    rows = ("held-out loss, bits per byte", *TRACED)
    shown = pd.DataFrame(columns).reindex(rows).round(4).astype(object)
    table = shown.where(shown.notna(), None).T.to_dict()
    costs = cost_rows(curves)
    return {
        "passages": len(passages()),
        "rows_of_text": int(curves[0].table("curve")["n"].iloc[0]),
        "measures": table,
        "masking": costs[costs["k"].isin([0, 1, 10])]
        .astype(object)
        .where(costs.notna(), None)
        .to_dict("records"),
        "sentences": cost_sentences(curves),
    }


def as_markdown(found: dict[str, Any]) -> str:
    """The part of docs/findings.md."""
    measures_table = pd.DataFrame(found["measures"]).T
    lines = [
        "| | " + " | ".join(measures_table.columns) + " |",
        "|---" * (len(measures_table.columns) + 1) + "|",
    ]
    for row, cells in measures_table.iterrows():
        lines.append(
            f"| {row} | "
            + " | ".join("–" if pd.isna(cell) else f"{cell:.3g}" for cell in cells)
            + " |"
        )
    masking = pd.DataFrame(found["masking"])
    shown = ["model", "blocked", "k", "change", "keys", "sinks", "held", "removed", "matched"]
    costs = masking[masking["k"] > 0].reindex(columns=shown).fillna("–")
    lines += ["", "| " + " | ".join(shown) + " |", "|---" * len(shown) + "|"]
    lines += [
        "| " + " | ".join(str(cell) for cell in row) + " |" for row in costs.itertuples(index=False)
    ]
    # the others say what stands in the table, and what the controls do
    more = [one for one in found["sentences"] if " less that of " in one or "corrected" in one]
    controls = re.findall(
        r"(?:shuffled|fresh)\sweights\s\D?([\d.]+)\s%", " ".join(found["sentences"])
    )
    most = max(map(float, controls))
    controls_told = f"the same keys change losses by at most {most:g} %."
    more.insert(0, f"Shuffled and fresh weights: {controls_told}")
    return "\n".join([*lines, "", *(f"- {sentence}" for sentence in more)])


def number_of(found: dict[str, Any], row: str, model: str) -> float:
    """A number of the two tables. Raises KeyError where there is none."""
    if row in found["measures"]:
        return float(
            {name.replace("`", ""): value for name, value in found["measures"][row].items()}[model]
        )
    for cells in found["masking"]:
        for field in ("change", "held", "removed", "keys", "sinks"):
            if (row, model) == (
                f"{field} by {cells['blocked']}, k = {cells['k']}",
                cells["model"].split()[0],
            ):
                return float(cells[field].split()[0].replace("−", "-"))
    raise KeyError(f"{row} | {model}")


def filled(text: str, found: dict[str, Any]) -> str:
    """A page with the numbers before its marks as they were measured, with as many decimals as
    there are.
    """

    def fill(mark: re.Match[str]) -> str:
        decimals = len(mark["number"].partition(".")[2])
        sign = "+" if mark["sign"] else ""
        number = f"{number_of(found, mark['row'], mark['model']):{sign}.{decimals}f}".replace(
            "-", "−"
        )
        return f"{number}<!-- findings: {mark['row']} | {mark['model']} -->"

    return MARK.sub(fill, text)


def pages() -> list[Path]:
    """The README, docs/ and the pages of studies, where marks may stand."""
    return [
        ROOT / "README.md",
        *sorted((ROOT / "docs").glob("*.md")),
        *sorted((ROOT / "studies").glob("*.md")),
    ]


def write(found: dict[str, Any]) -> None:
    """Put the tables between the markers of docs/findings.md, and the numbers before the marks of
    all pages.
    """
    page = ROOT / "docs" / "findings.md"
    text = re.sub(
        f"{re.escape(BEGIN)}.*?{re.escape(END)}",
        lambda _: f"{BEGIN}\n{as_markdown(found)}\n{END}",
        page.read_text("utf-8"),
        flags=re.S,
    )
    page.write_text(text, "utf-8")
    for page in pages():
        page.write_text(filled(page.read_text("utf-8"), found), "utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = ["measure", "write", "texts"]
    parser.add_argument("command", choices=commands, nargs="?", default="measure")
    parser.add_argument(
        "--only", choices=MODELS, help="measure one model and write nothing, as several can at once"
    )
    given = parser.parse_args()
    if given.command == "texts":
        for name in [given.only] if given.only else MODELS:
            follow(name)
        return
    if given.only:
        measure((given.only,))
        return
    if given.command == "measure":
        measure(MODELS)
        RESULTS.write_text(
            json.dumps(collect(MODELS), indent=1, ensure_ascii=False) + "\n", "utf-8"
        )
    write(json.loads(RESULTS.read_text("utf-8")))


if __name__ == "__main__":
    main()
