"""Run with TRITON_INTERPRET=1: the fused kernels on a CPU against the loop over chunks and the
dense float64 map.
"""

# B batch, H query heads, K key heads, Q queries, S keys, D head dim, G query groups
import itertools
from functools import cache

import torch
from dense import ALL, KINDS, dense_attention, mask_of
from torch.testing import assert_close
from triton.runtime import interpreter

from sinklab.core.attention import Scores, attention_statistics
from sinklab.core.attention.received import value_norms
from sinklab.extras.fast.score_pass import fused_pass

# the second is larger than a tile of keys and one of queries, in no direction a multiple of it
SHAPES = {(2, 2, 1, 37, 41, 20): KINDS, (1, 1, 1, 140, 270, 8): ("causal_padding", "additive")}
"""sizes of a call, and the masks with which it is made"""


def compare(shape, kind, how):
    batch, heads, kv, queries, keys, dim = shape
    count, chosen, dtype = how
    if heads == 1:
        chosen = None
    q, k, v = (
        torch.randn(batch, n, heads_of, dim).transpose(1, 2).to(dtype)
        for n, heads_of in ((queries, heads), (keys, kv), (keys, kv))
    )
    mask, is_causal = mask_of(kind, batch, heads, queries, keys)
    groups = torch.rand(batch, count, queries) if count else None
    scores, norms = Scores.of(q, k, mask, is_causal, None, chosen), value_norms(v, per_head=True)
    looped = attention_statistics(scores, ALL, v_BKSD=v, groups_BGQ=groups, chunk=50)
    found = fused_pass(scores, ALL, groups, norms, cast=True)
    assert found.keys() == set(ALL)
    for name in ALL:
        by_group = name == "received" and groups is not None
        value = found[name].transpose(1, 2) if by_group else found[name]
        value = value[:, :, 0] if name == "received" and groups is None else value
        assert_close(value, looped[name], rtol=2e-5, atol=2e-5, msg=f"{shape} {kind} {how} {name}")
    if groups is None and chosen is None:
        received = found["received"][:, :, 0].double()
        assert_close(received, dense_attention(q, k, mask, is_causal).sum(-2), rtol=2e-5, atol=2e-5)


def patch_once():
    """Each function patches Triton's language once a launch, not at every call."""
    launch, patch = interpreter.GridExecutor.__call__, interpreter._patch_lang

    def launched(*given, **named):
        interpreter._patch_lang = cache(patch)
        launch(*given, **named)

    interpreter.GridExecutor.__call__ = launched


def main():
    patch_once()
    torch.manual_seed(0)
    ways = itertools.cycle(
        itertools.product((0, 1, 6), (None, (1, 0)), (torch.float32, torch.bfloat16))
    )
    count = 0
    for shape, kinds in SHAPES.items():
        for kind in kinds:
            # each mask another way, whatever their number
            compare(shape, kind, next(itertools.islice(ways, 4, None)))
            count += 1
    print(f"{count} calls compared")


if __name__ == "__main__":
    main()
