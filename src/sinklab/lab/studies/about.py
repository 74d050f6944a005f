"""Facts that a study records of its model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sinklab.lab.records import weights_hash

if TYPE_CHECKING:
    from sinklab.lab.checkpoints import Loaded


def text_of(loaded: Loaded, ids: Any) -> str:
    """A completion, an array of ids, as text; its ids if there is no tokenizer."""
    if loaded.tokenizer is None:
        return " ".join(map(str, ids.tolist()))
    return str(loaded.tokenizer.decode(ids.tolist(), skip_special_tokens=True))


ABSENT = {"gate": "none", "sink_kind": "none", "sink_count": 0, "sink_side": "front"}
"""Facts of a model, and their values for one that has none."""


def describe(
    loaded: Loaded, layers: Sequence[int] | None = None, heads: Sequence[int] | None = None
) -> dict[str, Any]:
    """The model as ``run.json`` records it, and which of its layers and heads are recorded: all
    when left out.
    """
    config = loaded.config
    backbone = loaded.backbone
    about = {
        "name": loaded.name,
        "revision": loaded.revision,
        "family": loaded.family,
        "layers": backbone.num_hidden_layers,
        "heads": backbone.num_attention_heads,
        "hidden_size": backbone.hidden_size,
        "parameters": loaded.model.num_parameters(),
        "dtype": loaded.stored or str(loaded.model.dtype)[6:],
        # each of several processes may have a device of its own, of the same type
        "device": loaded.model.device.type,
        "weights_sha256": weights_hash(loaded.model.state_dict()),
    }
    for axis, chosen in (("layers", layers), ("heads", heads)):
        if chosen is None:
            chosen = range(about[axis])
        about[f"recorded_{axis}"] = [*chosen]
    if loaded.published_family == "wrapped":
        # no command can load it
        about["wrapped"] = True
    return about | {name: getattr(config, name, absent) for name, absent in ABSENT.items()}
