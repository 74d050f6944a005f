"""Run folders: one JSON file, Parquet tables, safetensors arrays, a schema version. Readable with
pandas alone.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
