"""Run folders: one JSON file, Parquet tables, safetensors arrays, a schema version. Readable with pandas alone."""

from .hashing import weights_hash
from .info import RunInfo
from .layouts import STUDY_DIMS
from .merging import merge_runs
from .reading import Run, open_run
from .storage import write_beside
from .writing import SCHEMA, RunWriter

__all__ = [
    "SCHEMA",
    "STUDY_DIMS",
    "Run",
    "RunInfo",
    "RunWriter",
    "merge_runs",
    "open_run",
    "weights_hash",
    "write_beside",
]
