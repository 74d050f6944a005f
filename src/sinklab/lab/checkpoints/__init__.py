"""Published and own checkpoints: reading, converting and saving them. No code of a checkpoint is
run.
"""

from sinklab.core.registry import exports

__getattr__, __dir__, __all__ = exports(
    __name__,
    adapters="AdapterFile read_adapters",
    controls="untrained_twins",
    families="CheckpointPlan Family Published SpecialIds",
    info="ModelInfo describe",
    loading="Loaded from_causal load load_adapters",
    published="PUBLISHED",
    sinkfile="SinkFile attach_sink save_sink sink_file_of",
    tokens="check_vocabulary",
)
