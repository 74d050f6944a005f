"""Reference values of sinks, by layer and head, for the removal "mean_value"."""

# B batch, H query heads, K key/value heads, Q queries, S keys, D head dim
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from sinklab.core.attention.context import module_of
from sinklab.core.probing import AttentionCall, BlockKeys, CallSite, InterventionLog
from sinklab.core.probing.interventions.base import Effect
from sinklab.core.probing.interventions.block_handler import BlockHandler
from sinklab.core.probing.interventions.removals import Mask
from sinklab.core.probing.tap import tapped


class _Means(BlockHandler):
    """Sums the values of the keys that an edit would choose, and changes nothing."""

    def __init__(self, options: BlockKeys, log: InterventionLog) -> None:
        super().__init__(options, log, 1)
        self.sums: dict[str, tuple[Tensor, Tensor]] = {}

    def apply(self, call: AttentionCall, site: CallSite) -> tuple[AttentionCall, Effect | None]:
        selected = self.selection(call, site)
        if selected is not None and self.is_open:
            value_BHSD = call.for_query_heads(call.value_BKSD.detach().double())
            gone_BHS = selected.gone_BHS
            sum_HD = value_BHSD.masked_fill(~gone_BHS.unsqueeze(-1), 0.0).sum((0, 2))
            before_HD, known_H = self.sums.get(
                call.layer, (torch.zeros_like(sum_HD), gone_BHS.new_zeros(1).long())
            )
            self.sums[call.layer] = before_HD + sum_HD, known_H + gone_BHS.sum((0, 2))
        return call, None


@torch.no_grad()
def save_reference_values(
    model: Any, edit: BlockKeys, texts: Iterable[Tensor], file: str | Path
) -> Path:
    """Write the mean value of the keys that an edit chooses in reference texts, for the
    removal "mean_value".

    Args:
        model: a model with a forward that takes ids (B, S).
        edit: which keys, of which layers and heads, such as ``MaskSinks(k=1)``; they are chosen in
            each text itself.
        texts: ids, int64 (B, S), with masks if the model is to see some.
        file: path to write: a tensor (H, D) a layer, NaN for a head in which no key was chosen.

    Raises:
        ValueError: if no key was chosen in any text.
    """
    model, log = module_of(model), InterventionLog(measure=False)
    means = _Means(replace(edit, when="now", how=Mask(), limit=None), log)
    with tapped(model, log), tapped(model, means):
        for ids_BS in texts:
            model(ids_BS)
    if not any(bool(count_H.any()) for _, count_H in means.sums.values()):
        raise ValueError(
            f"{edit} chose no key in the reference texts; give more texts, or another edit"
        )
    tensors = {
        layer: (sum_HD / count_H[:, None]).float().cpu().contiguous()
        for layer, (sum_HD, count_H) in means.sums.items()
    }
    save_file(tensors, str(file))
    return Path(file)
