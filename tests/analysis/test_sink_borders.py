import numpy as np

from refusals import refused, refusing
from sinklab.lab.analysis import block_effects, split_sinks


def test_moves_at_block_borders():
    # Two heads, six steps, two blocks. One head moves with the block, the other once inside it.
    main = np.array([[4, 7], [4, 7], [4, 2], [9, 2], [9, 2], [9, 2]])[:, None]
    found = block_effects(main, [0, 0, 0, 1, 1, 1])
    assert (found.border_moves, found.border_pairs, found.inside_moves, found.inside_pairs) == (
        1,
        2,
        1,
        8,
    )
    assert found.border_rate == 0.5 and found.inside_rate == 0.125 and found.ratio == 4
    twice = found + found
    assert twice.border_pairs == 4 and twice.ratio == 4
    missing = main.copy()
    missing[3, 0, 1] = -1
    assert block_effects(missing, [0, 0, 0, 1, 1, 1]).border_pairs == 1
    counted = np.ones(main.shape, dtype=bool)
    counted[2, 0, 0] = False
    assert block_effects(main, [0, 0, 0, 1, 1, 1], counted).border_moves == 0
    one_block = block_effects(main, [0] * 6)
    assert (
        np.isnan(one_block.border_rate)
        and np.isnan(one_block.ratio)
        and one_block.inside_rate == 0.2
    )
    still = block_effects(np.zeros((4, 1, 1), dtype=int), [0, 0, 1, 1])
    assert still.border_rate == 0 and np.isnan(still.ratio)
    samples = block_effects(np.stack([main, main]), np.array([[0, 0, 0, 1, 1, 1]] * 2))
    assert samples == twice
    refused(r"got \(6, 1, 2\) and \(5,\)", block_effects, main, [0] * 5)


def test_split_sinks_by_hand():
    # (step, state, layer, head): two layers of two heads over two steps; states masked, committed,
    # prompt.
    main = np.full((2, 3, 2, 2), 3)
    main[0, 1] = -1
    # Step 0 has no committed query yet: layer 0, head 0 splits against the prompt.
    main[0, 2, 0, 0] = 1
    # Step 1: layer 1, both heads split against the committed, whatever the prompt looks at.
    main[1, 1, 1] = 8
    found = split_sinks(main)
    assert found.split_L.tolist() == [1, 2] and found.pairs_L.tolist() == [4, 4]
    assert found.share == 3 / 8 and found.share_by_layer.tolist() == [0.25, 0.5]
    assert found.committed == (2, 4) and found.prompt == (1, 8)
    twice = found + found
    assert twice.share == 3 / 8 and twice.prompt == (2, 16)
    done = main.copy()
    done[:, 0] = -1
    assert np.isnan(split_sinks(done).share)


def test_split_sinks_counts_only_what_stands_out_when_shares_are_given():
    main = np.array([[[2, 5]], [[7, 7]], [[7, 7]]])[None]
    share = np.array([[[0.4, 0.4]], [[0.5, 0.01]], [[0.5, 0.5]]])[None]
    assert split_sinks(main).split_L.tolist() == [2]
    found = split_sinks(main, share, floor=0.05)
    # Head 1: its committed queries have no sink, those of the prompt have one, elsewhere than the
    # masked ones.
    assert found.committed == (1, 1) and found.prompt == (2, 2) and found.pairs_L.tolist() == [2]
    per_step = split_sinks(main, share, floor=np.full((1, 1, 1, 1), 0.45))
    assert per_step.pairs_L.tolist() == [0]
    refused(r"got shape \(1, 2, 1, 2\)", split_sinks, main[:, :2])
    refused("One share per main sink", split_sinks, main, share[:, :, :, :1])
    with refusing("got 1 and 2 layers"):
        found + split_sinks(np.zeros((1, 3, 2, 2), dtype=int))
