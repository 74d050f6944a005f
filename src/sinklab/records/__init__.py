"""Run folders: one JSON file, Parquet tables, safetensors arrays, a schema version. Readable with pandas alone."""

from .hashing import weights_hash
from .reading import Run, RunInfo, open_run
from .storage import write_beside
from .writing import SCHEMA, RunWriter

__all__ = ["SCHEMA", "Run", "RunInfo", "RunWriter", "open_run", "weights_hash", "write_beside"]
