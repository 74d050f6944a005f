"""Runs whose files a test has changed."""

import dataclasses
import hashlib

import numpy as np

from sinklab.lab.records import Run, RunWriter, open_run
from sinklab.lab.studies.trace.recording import WHOLE


def again(run: Run, **how: bool) -> RunWriter:
    """A writer of the run's own folder, which goes on with it or, with `overwrite`, begins anew."""
    info = run.info
    about = ("kind", "model", "settings", "seed", "samples", "part_size")
    return RunWriter(run.path, **{name: getattr(info, name) for name in about}, **how)


def halved(arrays):
    """Arrays as a trace stores them: floats as float16, but for counts."""
    return {
        name: one if one.dtype.kind != "f" or name in WHOLE else one.astype(np.float16)
        for name, one in arrays.items()
    }


def noted_again(run: Run, name: str) -> Run:
    """The run whose file of this name was changed by a test, with the checksum of what is there."""
    checksum = hashlib.sha256((run.path / name).read_bytes()).hexdigest()
    info = dataclasses.replace(run.info, files=run.info.files | {name: checksum})
    info.save(run.path)
    return open_run(run.path)
