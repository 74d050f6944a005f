"""Several folders of one run become one: what the processes of a distributed run wrote."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from sinklab.records.info import RunInfo, read_info
from sinklab.records.reading import Run, open_run
from sinklab.records.storage import ARRAYS, RUN_FILE, TABLES, moved
from sinklab.records.writing import begun_before, remove_leftovers


def merge_runs(folders: Iterable[str | Path], out: str | Path) -> Run:
    """Move the parts of runs of the same kind, model, settings and seed into the run ``out``, and remove their folders.

    ``out`` may be absent, or hold some parts already. Cut short, the merge can be repeated: files are moved before they
    are listed, and folders removed last. The status is "complete" when that of every folder is.
    Returns the merged run. Raises ValueError when there is nothing to merge, when the runs differ (the first difference
    is named), when two of them hold the same part or table, or when a folder is no run.
    """
    sources, target = [Path(folder) for folder in folders], Path(out)
    infos = {folder: read_info(folder / RUN_FILE) for folder in sources}
    if not infos:
        raise ValueError(f"merge_runs needs at least one folder to move into {target}: got none.")
    first = next(iter(infos.values()))
    for folder in infos:
        begun_before(folder, first)
    if (target / RUN_FILE).exists():
        begun_before(target, first)
        infos = {target: read_info(target / RUN_FILE)} | infos
    owners: dict[str, Path] = {}
    for folder, info in infos.items():
        for _, file in info.all_files():
            # Absent in its folder and present in ours: an earlier merge moved it and was cut short.
            if folder != target and not (folder / file).exists() and (target / file).exists():
                owners[file] = target
                continue
            if file in owners:
                raise ValueError(f"{owners[file]} and {folder} both hold {file}: a part has one place. Remove one.")
            owners[file] = folder
    target.mkdir(parents=True, exist_ok=True)
    for file, folder in owners.items():
        if folder != target:
            moved(folder / file, target / file)
    _joined(list(infos.values())).save(target)
    for folder in sources:
        (folder / RUN_FILE).unlink()
        remove_leftovers(folder)
        if not any(folder.iterdir()):
            folder.rmdir()
    return open_run(target)


def _joined(infos: list[RunInfo]) -> RunInfo:
    facts = asdict(infos[0])
    for info in infos:
        for kind in (TABLES.listed, ARRAYS.listed):
            facts[kind] = [*dict.fromkeys([*facts[kind], *getattr(info, kind)])]
        for name, parts in info.parts.items():
            facts["parts"][name] = sorted({*facts["parts"].get(name, ()), *parts})
    unfinished = [info for info in infos if info.status != "complete"]
    facts["status"] = unfinished[0].status if unfinished else "complete"
    facts["error"] = unfinished[0].error if unfinished else None
    facts["created"] = min(info.created for info in infos)
    return RunInfo(**facts)
