"""The tap on a model's attention: `trace` watches, `intervene` changes, and neither leaves anything
behind.
"""

from sinklab.core.registry import exports

__getattr__, __dir__, __all__ = exports(
    __name__,
    call="AttentionCall",
    dose="DOSE_COLUMNS Dose",
    intervention="Intervention InterventionLog RemovalRecord intervene",
    recording="Recording",
    scope="CONTROLS PROTOCOLS",
    statistics="CallView STATES StatesView Statistic position_states",
    listener="Listener",
    tracing="trace",
    **{"interventions.base": "CallSite LayerIntervention"},
    **{"interventions.keys": "KeyIntervention KeyScores"},
    **{"interventions.mask_sinks": "MaskSinks"},
    **{"interventions.positions": "LoneRows MaskPositions TruncateContext WindowAttention"},
    **{"interventions.values": "save_reference_values"},
    **{"interventions.states": "ClipChannel StateRecord state_records"},
)
