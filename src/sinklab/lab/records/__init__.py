"""Run folders: one JSON file, Parquet tables, safetensors arrays, a schema version. Readable with
pandas alone.
"""

from sinklab.core.registry import exports

__getattr__, __dir__, __all__ = exports(
    __name__,
    info="RunInfo STUDY_DIMS",
    reading="Run open_run",
    storage="SCHEMA weights_hash write_beside",
    writing="merge_runs RunWriter",
)
