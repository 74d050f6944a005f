"""The specification of remembered columns: the whole canvas runs every time, and the keys and
values of the columns that are not recomputed are put back to what they were.
"""

import torch

# B batch, S canvas, H key/value heads, D head dim


class RememberedColumns:
    """Stands where a sink prefix stands; `fresh_S` says which columns are computed anew."""

    def __init__(self, prefix):
        self.prefix = prefix
        self.fresh_S = None
        self.known = {}

    def update(self, k_BHSD, v_BHSD, layer_idx):
        if self.fresh_S is not None:
            old_k, old_v = self.known[layer_idx]
            k_BHSD = torch.where(self.fresh_S[:, None], k_BHSD, old_k)
            v_BHSD = torch.where(self.fresh_S[:, None], v_BHSD, old_v)
        self.known[layer_idx] = k_BHSD, v_BHSD
        return (
            (k_BHSD, v_BHSD)
            if self.prefix is None
            else self.prefix.update(k_BHSD, v_BHSD, layer_idx)
        )


class TwinSession:
    """(ids_BS, wanted_BS, columns) -> logits_MV, like a session of the model's denoiser."""

    def __init__(self, model, attention_mask=None):
        self.model, self.attention_mask = model, attention_mask
        self.memory = None

    @torch.no_grad()
    def __call__(self, ids_BS, wanted_BS, columns=None):
        if self.memory is None:
            lengths_B = None if self.attention_mask is None else self.attention_mask.sum(1)
            self.memory = RememberedColumns(self.model.sink_prefix(ids_BS.shape[1], lengths_B))
        self.memory.fresh_S = None
        if columns is not None:
            self.memory.fresh_S = torch.zeros(ids_BS.shape[1], dtype=torch.bool)
            self.memory.fresh_S[columns] = True
            if self.model.config.logit_shift:
                # every column that runs brings the one before it, which predicts it
                self.memory.fresh_S[:-1] |= self.memory.fresh_S[1:].clone()
        return self.model(
            ids_BS, self.attention_mask, logits_to_keep=wanted_BS, sink_prefix=self.memory
        ).logits
