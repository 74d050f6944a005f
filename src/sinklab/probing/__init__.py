"""The tap on a model's attention: `trace` watches, `intervene` changes, and neither leaves anything behind."""

from sinklab.probing.call import AttentionCall
from sinklab.probing.intervention import Edit, intervene
from sinklab.probing.log import InterventionLog, Removal
from sinklab.probing.masking import MaskSinks
from sinklab.probing.recording import Recording, trace
from sinklab.probing.tap import Listener

__all__ = [
    "AttentionCall",
    "Edit",
    "InterventionLog",
    "Listener",
    "MaskSinks",
    "Recording",
    "Removal",
    "intervene",
    "trace",
]
