"""Many runs as a site of static files: an index of cards, and the page of each run; and a run as
others may see it.
"""

import dataclasses
import re
import shutil
import socket
from collections.abc import Iterable
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import quote

from sinklab import __version__
from sinklab.extras.sharing.exporting import card
from sinklab.lab.records.reading import Run, as_written
from sinklab.lab.records.storage import RUN_FILE, TABLES
from sinklab.lab.reports import sentences as say
from sinklab.lab.reports.build import Card, named_part, plain_page, report
from sinklab.lab.reports.inline import picture
from sinklab.lab.reports.runs import READERS, as_shown

PICTURES = {"study": "received_map", "training": "training_loss"}
"""kind of run -> the figure on its card"""
# two parts at least: a token such as </s> is none. Behind letters it goes on with a name, behind //
# with an address.
_PATH = re.compile(r"(?<![\w./\\])(?:file://|~|[A-Za-z]:)?(?:[/\\][^\s/\\'\",;:)]+){2,}[/\\]?")


def shareable(run: Run) -> Run:
    """The run without the facts of the machine in its run.json: of a path the last part stays, and
    the machine's name goes.
    """
    info = run.info
    error = without_places(info.error)
    if error:
        error = re.sub(rf"\b{re.escape(socket.gethostname())}\b", "host", error)
    clean = dataclasses.replace(
        info,
        model=without_places(info.model),
        settings=without_places(info.settings),
        error=error,
    )
    return Run(run.path, clean)


def without_places(value: Any) -> Any:
    """A JSON value with the last part of each path in place of it; prompts, which are texts, as
    they are.
    """
    if isinstance(value, dict):
        clean = {key: without_places(one) for key, one in value.items()}
        if "prompts" in value:
            clean["prompts"] = value["prompts"]
        return clean
    if isinstance(value, list):
        return [without_places(one) for one in value]
    if not isinstance(value, str):
        return value
    if len(Path.home().parts) > 1:
        value = value.replace(str(Path.home()), "~")
    if re.match(r"(~|\.{1,2}|[A-Za-z]:)?[/\\]", value):
        return _last(value)
    return _PATH.sub(lambda found: _last(found[0]), value)


def _last(path: str) -> str:
    return re.split(r"[/\\]", path.rstrip("/\\"))[-1]


def changes(before: Any, after: Any, name: str = "") -> list[str]:
    """Differences of two JSON values of the same fields, a line each."""
    if isinstance(before, dict):
        return [
            line
            for key in before
            for line in changes(before[key], after[key], f"{name}.{key}".lstrip("."))
        ]
    if before == after:
        return []
    return [f"{name}: {before!r} is sent as {after!r}"]


def write_data_set(run: Run, folder: str | Path) -> list[str]:
    """Copy a run for others: its tables and arrays, its page if its kind has one, a card, and a
    `shareable` run.json.

    Args:
        run: to be copied; it stays as it is.
        folder: of the copy; files that are in the way are replaced.

    Returns:
        what the copy says otherwise, and which files beside the run stay where they are: a line
        each.
    """
    clean = shareable(run)
    copy = Path(folder)
    copy.mkdir(parents=True, exist_ok=True)
    files = {file for _, file in run.info.all_files()}
    for file in files:
        shutil.copyfile(as_written(run.path, run.info, file), copy / file)
    info = dataclasses.replace(
        clean.info,
        checksums={file: one for file, one in run.info.checksums.items() if file in files},
    )
    info.save(copy)
    sentences: list[str] = []
    if info.kind in READERS:
        (reader,) = as_shown(clean)
        report(reader, copy, tables=())
        sentences = say.in_short([reader])
    tables = {name: info.files(TABLES, name) for name in info.tables}
    name = run.path.resolve().name
    text = card("run.jinja", info=info, name=name, sentences=sentences, tables=tables)
    (copy / "README.md").write_text(text + "\n", "utf-8")
    stay = sorted({path.name for path in run.path.iterdir()} - files - {RUN_FILE})
    said = changes(
        dataclasses.asdict(run.info) | {"checksums": {}},
        dataclasses.asdict(info) | {"checksums": {}},
    )
    lines = [f"{RUN_FILE}: {line}" for line in said]
    if stay:
        lines.append(f"stays here: {', '.join(stay)}")
    return lines


def write_gallery(runs: Iterable[Run], out: str | Path, *, title: str = "Attention sinks") -> Path:
    """Write ``index.html``, a card for each run, and beside it the page of each in a folder of its
    own.

    Any server of static files serves it, and so does none: nothing in it asks for anything
    elsewhere. Facts of the machine in run.json are left out (`shareable`).

    Args:
        runs: run folders of the kinds that have a page, in the order of their cards.
        out: folder; files that are in the way are replaced.
        title: of the index.

    Returns:
        the index.

    Raises:
        ValueError: without a run, and for a run of another kind.
    """
    folder = Path(out)
    shown = [as_shown(shareable(run))[0] for run in runs]
    if not shown:
        raise ValueError(
            "a gallery needs at least one run; make one with sinklab trace or sinklab train"
        )
    own = [re.sub(r"[^\w.-]+", "-", reader.run.path.resolve().name) for reader in shown]
    names = list[str]()
    for at, name in enumerate(own, 1):
        # no page lies on another one, or in the index's place
        if own.count(name) > 1 or name == "index.html":
            numbered = (f"{name}-{number}" for number in count(at))
            name = next(one for one in numbered if one not in (*own, *names))
        names.append(name)
    cards: list[Card] = []
    for name, reader in zip(names, shown, strict=True):
        report(reader, folder / name, tables=())
        info = reader.run.info
        place = f"run-{len(cards) + 1}"
        pictures = picture(PICTURES[info.kind], [reader], f"{name}: how it went", place)
        about = f"{reader.label} · {info.kind} · {info.created[:10]}"
        found = say.in_short([reader])[:2]
        link = f"{quote(name)}/report.html"
        cards.append(Card(name, place, about, found, pictures=pictures, link=link))
    lead = f"Runs of sinklab: {len(cards)}. Each has a page, one file that explores it."
    parts = [named_part("runs", cards)]
    return plain_page(
        folder / "index.html", title=title, lead=lead, parts=parts, version=__version__
    )
