"""The specification of evicting caches: the whole canvas runs every time, frozen columns are put
back, evicted ones are hidden by a mask per layer and head; what is kept is chosen by plain loops
over Python lists.
"""

import torch
from cached_twin import RememberedColumns
from torch.nn import functional as F

# B batch, H query heads, G key heads, S canvas, N sinks, K = N + S


def wrapped(x):
    return (x + 2**63) % 2**64 - 2**63


def mixed(layer, head, number, offset):
    x = wrapped((head + 1009 * layer + 1_000_003 * number) * 0x9E3779B97F4A7C1 + offset)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = wrapped((x ^ (x >> shift)) * factor)
    return x ^ (x >> 31)


class EvictingTwin:
    """(ids_BS, wanted_BS, work) -> logits_MV, like a session of the model's denoiser."""

    def __init__(self, model, policy, attention_mask=None):
        self.model, self.policy, self.attention_mask = model, policy, attention_mask
        self.memory, self.kept, self.sinks = None, {}, {}

    def real(self, ids_BS):
        return (
            torch.ones_like(ids_BS, dtype=torch.bool)
            if self.attention_mask is None
            else self.attention_mask.bool()
        )

    @torch.no_grad()
    def __call__(self, ids_BS, wanted_BS, work):
        model, real_BS = self.model, self.real(ids_BS)
        if self.memory is None:
            lengths_B = None if self.attention_mask is None else self.attention_mask.sum(1)
            self.memory = RememberedColumns(model.sink_prefix(ids_BS.shape[1], lengths_B))
        start = max(work.block.start - 1, 0) if model.config.logit_shift else work.block.start
        self.run = range(start, work.block.stop)
        self.memory.fresh_S, handles, seen = None, [], []
        if not work.is_full:
            self.memory.fresh_S = torch.zeros(ids_BS.shape[1], dtype=torch.bool)
            self.memory.fresh_S[list(self.run)] = True
            for index, layer in enumerate(model.model.layers):
                hook = self.hiding(self.kept[index], real_BS)
                handles.append(layer.self_attn.register_forward_pre_hook(hook, with_kwargs=True))
        own = F.scaled_dot_product_attention

        def spy(query, key, value, **options):
            seen.append((query, key, options.get("scale")))
            return own(query, key, value, **options)

        F.scaled_dot_product_attention = spy
        try:
            out = model(
                ids_BS, self.attention_mask, logits_to_keep=wanted_BS, sink_prefix=self.memory
            )
        finally:
            F.scaled_dot_product_attention = own
            for handle in handles:
                handle.remove()
        if work.is_choice:
            heads = model.config.backbone.num_key_value_heads
            self.kept = {
                n: self.chosen(n, call, heads, real_BS, work) for n, call in enumerate(seen)
            }
        return out.logits

    def hiding(self, kept, real_BS):
        """kept[row][head] -> a hook that replaces the mask of this layer."""
        heads = self.model.config.backbone.num_attention_heads
        sinks = self.model.config.sink_count
        mask_BHS = torch.zeros(len(kept), heads, real_BS.shape[1], dtype=torch.bool)
        for row, by_head in enumerate(kept):
            for head in range(heads):
                columns = by_head[head * len(by_head) // heads]
                mask_BHS[row, head, [*columns, *(j for j in self.run if real_BS[row, j])]] = True
        mask = F.pad(mask_BHS, (sinks, 0), value=True)[:, :, None]
        return lambda attention, args, kwargs: (args, kwargs | {"attention_mask": mask})

    def chosen(self, layer, call, groups, real_BS, work):
        query_BHSD, key, scale = call
        key = key[:, :: key.shape[1] // groups] if key.shape[1] != groups else key
        sinks, policy = self.model.config.sink_count, self.policy
        result = []
        for row in range(len(query_BHSD)):
            real = [j for j in range(real_BS.shape[1]) if real_BS[row, j]]
            queries = [j for j in self.run if real_BS[row, j]]
            columns = torch.tensor([*range(sinks), *(sinks + j for j in real)])
            received = [dict.fromkeys(real, 0.0) for _ in range(groups)]
            aligned = dict.fromkeys(real, 0.0)
            for head in range(query_BHSD.shape[1]):
                group = head * groups // query_BHSD.shape[1]
                q_WD, k_KD = query_BHSD[row, head, queries], key[row, group, columns]
                share_K = ((q_WD @ k_KD.T) * (scale or q_WD.shape[1] ** -0.5)).softmax(-1).sum(0)
                dot_K = q_WD.mean(0) @ k_KD.T
                for place, j in enumerate(real):
                    received[group][j] += share_K[sinks + place].item()
                    aligned[j] += dot_K[sinks + place].item() / query_BHSD.shape[1]
            result.append(
                [
                    self.best(policy, layer, row, head, real, received[head], aligned, work)
                    for head in range(groups)
                ]
            )
        return result

    def best(self, policy, layer, row, head, real, received, aligned, work):
        start, stop = work.block.start, work.block.stop
        others = [j for j in real if j not in self.run]
        ranking = {j: received[j] for j in others}
        mine = self.sinks.setdefault((layer, row, head), {})
        if policy.protect == "first":
            ranking = mine.setdefault("first", ranking)
        elif policy.protect == "earlier":
            mine[work.number] = ranking
            ranking = mine.get(work.number - 1, ranking)
        # what was inside the block then was no sink of it
        now = set(sorted(others, key=lambda j: -ranking.get(j, float("-inf")))[: policy.sinks])

        def distance(j):
            return start - j if j < start else j - stop + 1

        def score(j):
            if policy.score == "received":
                return received[j]
            if policy.score == "aligned":
                return max(aligned[i] for i in (j - 1, j, j + 1) if i in others)
            if policy.score == "nearest":
                return -2 * distance(j) - (j >= stop)
            return mixed(layer, head, work.number, j - stop)

        order = sorted(
            others, key=lambda j: (j not in now, distance(j) > policy.neighbours, -score(j), j)
        )
        return order[: int(policy.keep * len(others) + 1e-9)]
