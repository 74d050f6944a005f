"""Models, runs and galleries for others: `sinklab export`, `push` and `gallery`."""

from sinklab.core.registry import exports

__getattr__, __dir__, __all__ = exports(
    __name__, exporting="export", gallery="shareable without_places write_data_set write_gallery"
)

PROVIDES = {"commands": "commands"}
