"""The page of a run of strength: a table beside published numbers, sentences, and the picture,
layer × head.
"""

from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from sinklab.lab.files import toml_of
from sinklab.lab.records import Run, of_twin
from sinklab.lab.reports import (
    Axis,
    Map,
    Reader,
    figure,
    finished,
    number,
    percent,
    ranged,
    save_figure,
    statements,
    write_csv,
    write_page,
)
from sinklab.lab.reports.build import Card, Part, Table, plain_page, what_was_run
from sinklab.lab.reports.inline import picture
from sinklab.lab.reports.tables import markdown
from sinklab.lab.studies import no_twins, of_each, shown_by, twins_of
from sinklab.lab.studies.strength.run import KIND
from sinklab.lab.studies.strength.study import INPUTS

TOKENS = 4
"""Tokens that a sentence names."""


@of_each
def strength_sentences(run: Run) -> list[str]:
    """Sentences of each run: how strong its sinks are, and which tokens strong keys of natural text
    stand on.

    Among masked sequences only natural ones without a start token have a sentence; the table has
    all.
    """
    told = statements("sinklab.lab.studies.strength", ())
    name = run.info.model["name"]
    lines = finished(run, "summary")
    classes = run.table("classes")
    others = {
        kind: percent(float(run.table(of_twin("summary", kind))["sink"].iloc[0]))
        for kind in twins_of(run)
    }
    plain = (lines["input"] == "natural") & ~lines["start"]
    strengths, places = [], []
    for number_of, line in lines[plain | (lines["ratio"] == 0)].iterrows():
        controls = ""
        if plain[number_of] and line["ratio"] == 0:
            controls = shown_by(others)
        strengths += told("strength", name, line, run.info.settings["epsilon"], controls)
        if plain[number_of]:
            of_kind = classes[(classes[KIND] == line[KIND].tolist()).all(axis=1)]
            places += told("standing", line, of_kind.head(TOKENS).to_dict("records"))
    return [*strengths, *places, *no_twins({name: run})]


def published() -> pd.DataFrame:
    """Sink₁^ε of other models as published, in per cent: name, natural, random, repeat, source."""
    table = toml_of("sinklab.lab.studies.strength", "published.toml")
    return pd.DataFrame(table["rows"], columns=table["columns"])


def published_table() -> pd.DataFrame:
    """Published numbers as text for people."""
    table = published()
    for name in INPUTS:
        table[name] = table[name].map("{:.1f} %".format).where(table[name].notna(), "–")
    return table


def strength_table(run: Run) -> pd.DataFrame:
    """A line per kind of sequence, as text for people; the numbers are the table ``summary``."""
    lines = finished(run, "summary")
    text = {"sequences": lines["input"]}
    text["start token"] = lines["start"].map({True: "yes", False: "no"})
    if (lines["ratio"] > 0).any():
        text["masked"] = lines["ratio"].map(percent)
    text["first token strong"] = lines["sink"].map(percent)
    lines = lines.rename(columns={"low": "sink_by_text_low", "high": "sink_by_text_high"})
    how = {"axis": 1, "form": percent}
    text["by sequence"] = lines.apply(ranged, name="sink_by_text", **how)
    text["strongest key strong"] = lines.apply(ranged, name="strong", **how)
    text["its share"] = lines["strongest"].map(percent)
    text["on the first token"] = lines["at_first"].map(percent)
    text["massive activation"] = lines["activation"].map(number) + " ×"
    return pd.DataFrame(text)


@figure(
    "strength", kind="strength", alone=True, prepared=True, columns=2, share="y", size=(3.4, 3.2)
)
def strength_figure(one: Reader) -> list[Map]:
    """Layer × head, means over the first kind of sequence: the weight of the first token, and of
    the strongest key.
    """
    heads = one.run.table("heads")
    kind = heads[KIND].iloc[0]
    heads = heads[(heads[KIND] == kind.tolist()).all(axis=1)]
    layers, columns = (
        Axis(name, names=[*map(str, sorted(heads[name].unique()))]) for name in ("layer", "head")
    )
    shown = []
    for name, words in (
        ("first", "the first token's weight, %"),
        ("strongest", "the strongest key's share, %"),
    ):
        values_LH = heads.pivot(index="layer", columns="head", values=name).to_numpy()
        shown.append(Map(100 * values_LH, words, layers, columns))
    return shown


def readings_of(run: Run) -> str:
    """The words of the table explained: strong tokens, and the two ways to read the first token."""
    return (
        f"Strong: more than {run.info.settings['epsilon']} of the attention of the queries that "
        "may see it. First token: weights averaged over the sequences first, as Gu et al. do "
        "(arXiv 2410.10781); by sequence: each by itself, with the 95 % interval over these "
        "sequences. Strongest key: the one of each head and sequence that gets most of all "
        "attention there, and its share of that."
    )


@of_each
def draw_strength(run: Run, out: Path, options: Any) -> list[Path]:
    """strength.html, strength.md, strength.csv (all numbers) and the picture, in each run
    folder.
    """
    others = f"Published, read in the first way:\n\n{markdown(published_table())}"
    stem = run.path / "strength"
    more = f"\n{readings_of(run)}\n\n{others}"
    said = strength_sentences([run])
    return [
        strength_page(run),
        write_page(stem.with_suffix(".md"), strength_table(run), said, more),
        write_csv(stem.with_suffix(".csv"), finished(run, "summary")),
        *save_figure(partial(strength_figure, run), stem, options.figures),
    ]


def strength_page(run: Run) -> Path:
    """Write strength.html into the run folder: the picture, both readings, and published numbers.
    Returns its path.
    """
    name = str(run.info.model["name"])
    words = f"layer × head of {name}: the first token, and the strongest key"
    drawn = picture("strength", [run], words, "heads-drawn")
    lines = finished(run, "summary")
    line = lines.iloc[0]
    heads = (
        "The weight of the first token and the share of the strongest key, means over "
        f"{line['rows']} sequences ({line['input']})"
    )
    if line["start"]:
        heads += " behind the start token"
    if line["ratio"]:
        heads += f", {percent(line['ratio'])} masked"
    both = Table(strength_table(run).set_index("sequences"))
    published = (
        "The share of heads whose first token is strong, weights averaged first. The "
        "others were not run here."
    )
    # of unmasked sequences without a start token
    plain = lines[~lines["start"] & (lines["ratio"] == 0)].set_index("input")["sink"]
    own = plain.reindex(INPUTS).map(percent).to_dict()
    first = pd.DataFrame([{"name": name, **own, "source": "this run"}])
    table = pd.concat([first, published_table()]).rename(columns={"name": "model"})
    others = Table(table.set_index("model"))
    parts = [
        _part("heads", "Layer by layer, head by head", f"{heads}.", Card("", pictures=drawn)),
        _part("found", "What was found", "", Card("", sentences=strength_sentences([run]))),
        _part("readings", "Both readings", readings_of(run), Card("", tables=[both])),
        _part("published", "Beside published numbers", published, Card("", tables=[others])),
        what_was_run({name: run}),
    ]
    epsilon = run.info.settings["epsilon"]
    lead = (
        "The protocol of Gu et al. (arXiv 2410.10781): how many heads give the first token more "
        f"than {epsilon} of their attention, and how many give that to any token."
    )
    return plain_page(
        run.path / "strength.html",
        title=f"Sinks of {name}: how strong they are",
        lead=lead,
        parts=parts,
        version=run.info.versions.get("sinklab", ""),
    )


def _part(anchor: str, title: str, how: str, card: Card) -> Part:
    return {"anchor": anchor, "title": title, "how": how, "sentences": [], "cards": [card]}
