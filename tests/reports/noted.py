"""Runs whose files a test has changed."""

import dataclasses
import hashlib

from sinklab.lab.records import Run, RunWriter, open_run


def again(run: Run, **how: bool) -> RunWriter:
    """A writer of the run's own folder: with `resume`, or with `overwrite`."""
    info = run.info
    return RunWriter(
        run.path, kind=info.kind, model=info.model, settings=info.settings, seed=info.seed, **how
    )


def noted_again(run: Run, name: str) -> Run:
    """The run whose file of this name was changed by a test, with the checksum of what is there."""
    checksum = hashlib.sha256((run.path / name).read_bytes()).hexdigest()
    info = dataclasses.replace(run.info, checksums=run.info.checksums | {name: checksum})
    info.save(run.path)
    return open_run(run.path)
