"""How models that attend in blocks write a block: by a quota or a confidence, with edits of written
tokens; and how a canvas is written if tokens change its length.
"""

from sinklab.core.registry import exports

__getattr__, __dir__, __all__ = exports(
    __name__, blocks="Alpha Dynamic Editing Elastic ElasticStep"
)
