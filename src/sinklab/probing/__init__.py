"""The tap on a model's attention: `trace` watches, `intervene` changes, and neither leaves anything behind."""

from sinklab.probing.call import AttentionCall
from sinklab.probing.fixed import MaskPositions, TruncateContext
from sinklab.probing.intervention import Edit, intervene
from sinklab.probing.log import InterventionLog, Removal
from sinklab.probing.masking import MaskSinks
from sinklab.probing.recording import Recording
from sinklab.probing.snapshot import MEASURES, Snapshot, snapshot
from sinklab.probing.specs import EDITS, as_spec, as_text, edit_by_name, parse_edit
from sinklab.probing.states import STATES, position_states
from sinklab.probing.statistics import STATISTICS
from sinklab.probing.tap import Listener
from sinklab.probing.tracing import trace
from sinklab.probing.window import WindowAttention

__all__ = [
    "EDITS",
    "MEASURES",
    "STATES",
    "STATISTICS",
    "AttentionCall",
    "Edit",
    "InterventionLog",
    "Listener",
    "MaskPositions",
    "MaskSinks",
    "Recording",
    "Removal",
    "Snapshot",
    "TruncateContext",
    "WindowAttention",
    "as_spec",
    "as_text",
    "edit_by_name",
    "intervene",
    "parse_edit",
    "position_states",
    "snapshot",
    "trace",
]
