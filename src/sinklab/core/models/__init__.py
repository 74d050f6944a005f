"""`DiffusionLM`: a Hugging Face decoder made bidirectional, with its sink and its gate."""

from sinklab.core.registry import exports

__getattr__, __dir__, __all__ = exports(
    __name__,
    config="DiffusionLMConfig",
    diffusion_lm="DiffusionLM",
    **{"sinks.base": "Sink", "sinks.prefix": "SinkPrefix"},
)
