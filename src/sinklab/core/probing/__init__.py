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
    **{"interventions.block_keys": "BlockKeys"},
    **{"interventions.mask_sinks": "MaskSinks by_protocol"},
    **{"interventions.positions": "LoneRows MaskPositions TruncateContext WindowAttention"},
    **{"interventions.queries": "From"},
    **{"interventions.removals": "Removal ValueRemoval"},
    **{
        "interventions.selectors": "EqualMass KeyView Lowest Matched Positions Random Recent "
        "Selector SinkKeys TopKeys"
    },
)
