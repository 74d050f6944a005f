"""The conformance suite of studies."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from sinklab.checkpoints.loading import Loaded
from sinklab.records.reading import Run, open_run
from sinklab.records.writing import RunWriter
from sinklab.studies.base import Study
from sinklab.testing.values import refusal


def check_study(study: Study, loaded: Loaded, settings: Any = None) -> None:
    """Hold a study to what its command and its run folders promise, with a model and settings that are soon done.

    Its settings come back from run.json; it writes tables or arrays; a folder that is taken is refused; a run that is
    killed before any of its tables is written is resumed to what it would have been.

    Args:
        study: an instance of a registered class.
        loaded: a small model.
        settings: small ones; the defaults when left out.

    Raises:
        AssertionError: for the first of these that does not hold.
    """
    kind: Any = getattr(study, "Settings", None)
    frozen = dataclasses.is_dataclass(kind) and getattr(kind, "__dataclass_params__").frozen  # noqa: B009
    assert frozen, f"{study!r} has no Settings, a frozen dataclass in its class; pass an instance of the study"
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        with _counted(None) as written:
            whole = open_run(study(loaded, place / "whole", settings))
        assert whole.info.kind == (study.kind or study.name), "the run folder is of another kind than the study"
        assert whole.tables or whole.array_files, f"{study!r} writes no table and no array: nothing can be read of it"
        kept = study.record(study.settings_of(whole.path))
        assert json.loads(json.dumps(kept)) == whole.info.settings, "settings do not come back from run.json"
        said = refusal(ValueError, study, loaded, whole.path, settings)
        assert said, "a folder that is taken is not refused"
        assert str(whole.path) in said, "the refusal of a folder that is taken does not name it"
        for number in range(len(written)):
            folder = place / f"killed-{number}"
            try:
                with _counted(number):
                    study(loaded, folder, settings)
            except KeyboardInterrupt:
                assert open_run(folder).info.status == "interrupted", "an interrupted run does not say so"
            _check_same(open_run(study(loaded, folder, settings, resume=True)), whole, f"before table {number + 1}")


@contextmanager
def _counted(last: int | None) -> Iterator[list[str]]:
    """Names of the tables that are written; the one of this number is interrupted."""
    names, write = list[str](), RunWriter.table

    def table(run: RunWriter, name: str, *args: Any, **kwargs: Any) -> Path:
        if len(names) == last:
            raise KeyboardInterrupt
        names.append(name)
        return write(run, name, *args, **kwargs)

    with mock.patch.object(RunWriter, "table", table):
        yield names


def _check_same(run: Run, whole: Run, when: str) -> None:
    message = f"killed {when}, a resumed run differs from one that was not interrupted"
    assert (run.info.status, run.info.parts) == ("complete", whole.info.parts), message
    assert (sorted(run.tables), sorted(run.array_files)) == (sorted(whole.tables), sorted(whole.array_files)), message
    for name in whole.tables:
        assert run.table(name).equals(whole.table(name)), f"{message}: table {name}"
    for name in whole.array_files:
        for part in whole.parts(name) or (None,):
            for key, array in whole.arrays(name, part=part).items():
                np.testing.assert_array_equal(run.array(name, key, part=part), array, message)
