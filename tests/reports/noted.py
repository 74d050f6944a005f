"""Runs whose files a test has changed."""

import dataclasses
import hashlib

from sinklab.lab.records import Run, RunWriter, open_run


def again(run: Run, **how: bool) -> RunWriter:
    """A writer of the run's own folder: with `resume`, or with `overwrite`."""
    info = run.info
    about = ("kind", "model", "settings", "seed", "samples", "part_size")
    return RunWriter(run.path, **{name: getattr(info, name) for name in about}, **how)


def noted_again(run: Run, name: str) -> Run:
    """The run whose file of this name was changed by a test, with the checksum of what is there."""
    checksum = hashlib.sha256((run.path / name).read_bytes()).hexdigest()
    info = dataclasses.replace(run.info, files=run.info.files | {name: checksum})
    info.save(run.path)
    return open_run(run.path)
