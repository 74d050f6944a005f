"""Checkpoints, each complete or absent, and the conditions for resuming a run."""

import contextlib
import dataclasses
import json
from pathlib import Path

import torch

from sinklab.lab.checkpoints.materialize import machine_type
from sinklab.lab.files import read_json, refused
from sinklab.lab.records.info import RunInfo, read_info
from sinklab.lab.records.reading import open_run
from sinklab.lab.records.storage import RUN_FILE
from sinklab.lab.records.writing import names_in, refuse_taken
from sinklab.lab.training.settings import FREE, TrainSettings

STATE_FILE = "trainer_state.json"


def whole_checkpoints(root: Path) -> list[Path]:
    """Whole checkpoints, oldest first: those whose state, which is written last, can be read."""
    found = []
    for path in root.glob(f"checkpoint-*/{STATE_FILE}"):
        with contextlib.suppress(OSError, ValueError):
            read_json(path, dict)
            found.append(path.parent)
    return sorted(found, key=step_of)


def step_of(checkpoint: Path) -> int:
    """The step after which a checkpoint was written."""
    return int(checkpoint.name.rpartition("-")[2])


def newest(folder: Path) -> Path | None:
    """The newest whole checkpoint of a run; None if there is none."""
    return next(reversed(whole_checkpoints(folder / "checkpoints")), None)


def with_precision(settings: TrainSettings) -> TrainSettings:
    """The settings with bf16 decided: as the run in the folder has it, else as this machine
    multiplies fast.
    """
    if settings.bf16 is not None:
        return settings
    before = Path(settings.out) / RUN_FILE
    if before.is_file():
        return dataclasses.replace(settings, bf16=read_info(before).settings.get("bf16"))
    device = "cpu"
    if torch.cuda.is_available():
        device = "cuda"
    return dataclasses.replace(settings, bf16=machine_type(device) == torch.bfloat16)


def earlier_run(folder: Path, settings: TrainSettings) -> RunInfo | None:
    """Content of ``run.json`` of the run that goes on; None for one that begins in ``folder``.

    Raises:
        ValueError: for a folder with something else, a damaged ``run.json``, and a setting that
            matters and has changed.
    """
    refuse_taken(folder)
    if not names_in(folder):
        return None
    before = of_training(folder, read_info(folder / RUN_FILE))
    now = json.loads(json.dumps(dataclasses.asdict(settings)))
    kept = [key for key in now if key not in FREE and key in before.settings]
    changed = [
        f"{key}: {before.settings[key]!r} → {now[key]!r}"
        for key in kept
        if before.settings[key] != now[key]
    ]
    if changed:
        raise ValueError(
            f"{folder} holds another run, and these settings changed: {', '.join(changed)}; give "
            "the same, or another folder (--out)"
        )
    return before


def of_training(folder: Path, info: RunInfo) -> RunInfo:
    """Return the info unchanged if it is of a training run. Raises ValueError for a run of another
    kind.
    """
    if info.kind != "training":
        raise ValueError(
            f"{folder} holds a run of the kind {info.kind!r}, and only training runs have these "
            "settings; choose another folder"
        )
    return info


def settings_of(folder: str | Path) -> TrainSettings:
    """The settings with which the training run in a folder was made:
    ``train(settings_of(folder))``, with another ``out``, makes it again. A setting that is newer
    than the run has its default.

    Raises:
        ValueError: if the folder holds no training run, is damaged, or has settings that do not
            exist.
    """
    info = of_training(Path(folder), open_run(folder).info)
    fault = f"{folder} has settings that this version of sinklab does not know or that are damaged"
    with refused(fault, TypeError, ValueError):
        return TrainSettings(**info.settings)


def same_data(folder: Path, run: RunInfo, data: str) -> None:
    """Refuse to go on with a run that was started with other text.

    Raises:
        ValueError: if the run in ``folder`` recorded another hash than ``data``.
    """
    if run.model.get("data_sha256", data) != data:
        raise ValueError(
            f"a run keeps its data, but the corpus, the held-out text or the tokenizer of {folder} "
            "has changed since; restore them, or choose another folder (--out)"
        )


def cursor_of(checkpoint: Path) -> list[int]:
    """A cursor from which the next row of a stream can be found again."""
    log = read_json(checkpoint / STATE_FILE, dict)["log_history"]
    return [row["cursor"] for row in log if "cursor" in row][-1]
