"""The study of sinks in blocks: its measures on sinks that were planted, what it watches, and its
three commands.
"""

import json
import math
from itertools import product

import numpy as np
import pandas as pd
import pytest
import torch

from launched import script
from refusals import refused
from sinklab.extras.backcopy import BackcopySettings, Source, masking
from sinklab.extras.backcopy.run import trained


@pytest.fixture(scope="module")
def study():
    return script("studies/block_sinks")


def planted(place_T, keys_T, *, rows=3, added=0, weight=0.5):
    """One layer and head, in which a key holds half of the attention and the others the rest."""
    received = np.full((rows, len(place_T), 1, 1, added + 48), math.nan)
    for step, (place, keys) in enumerate(zip(place_T, keys_T, strict=True)):
        received[:, step, ..., :keys] = (1 - weight) / (keys - 1) * keys
        received[:, step, ..., place] = weight * keys
    return received


def test_a_planted_sink_is_found_where_it_is(study):
    arm = study.Arm("block 4", 4, 4, "own")
    column_T = 16 + np.arange(32)
    keys_T = (column_T // 4 + 1) * 4
    still = study.moves(planted([3] * 32, keys_T), keys_T, arm, 16, 0)
    assert still["excess"] == still["gu"] == 1 and still["share"] == pytest.approx(0.5)
    assert (
        still["mobility"]
        == still["within"]
        == still["across"]
        == still["later"]
        == still["first"]
        == 0
    )
    assert still["committed"] == 1
    assert still["even"] == pytest.approx(np.mean(column_T // 4 * 4 / keys_T))
    with_block = study.moves(planted(column_T // 4 * 4, keys_T), keys_T, arm, 16, 0)
    assert with_block["within"] == 0 and with_block["across"] == 1 and with_block["committed"] == 0
    assert with_block["mobility"] == pytest.approx(8 * 7 * 16 / (32 * 31))
    inside = study.moves(planted(column_T // 4 * 4 + column_T % 2, keys_T), keys_T, arm, 16, 0)
    assert inside["within"] == 1
    weak = study.moves(planted([3] * 32, keys_T, weight=0.05), keys_T, arm, 16, 0)
    assert weak["excess"] == 0 and math.isnan(weak["mobility"]) and math.isnan(weak["committed"])


def test_an_added_sink_stands_still_and_is_no_text(study):
    arm = study.Arm("full, as 16", 16, None, "own")
    keys_T = np.full(32, 49)
    own = study.moves(planted([0] * 32, keys_T, added=1), keys_T, arm, 16, 1)
    assert own["added"] == 1 and own["mobility"] == 0 and math.isnan(own["committed"])
    first = study.moves(planted([1] * 32, keys_T, added=1), keys_T, arm, 16, 1)
    assert first["added"] == 0 and first["first"] == 1 and first["committed"] == 1
    ahead = study.moves(planted([48] * 32, keys_T, added=1), keys_T, arm, 16, 1)
    assert ahead["later"] == 0.5 and ahead["committed"] == 0


@pytest.mark.parametrize("size", [4, 16, None])
def test_an_order_reveals_each_column_once_and_one_block_after_the_other(study, size):
    order_BT = study.order_of(5, 48, 16, size, 3)
    assert torch.equal(order_BT.sort(1).values, torch.arange(16, 48).expand(5, -1))
    assert not torch.equal(order_BT[0], order_BT[1])
    assert torch.equal(order_BT, study.order_of(5, 48, 16, size, 3))
    in_blocks = (order_BT // (size or 4)).diff(dim=1) >= 0
    assert bool(in_blocks.all()) == (size is not None)


@pytest.mark.parametrize(
    ("name", "variant"),
    [("causal", "plain"), ("block 4", "sink"), ("full, as 4", "plain"), ("full, free", "sink")],
)
def test_what_is_watched_is_what_a_plain_computation_gives(study, name, variant):
    source, size = Source(2), None if name in ("causal", "full, free") else 4
    objective = {"causal": "causal", "block 4": "block4"}.get(name, "diffusion")
    model = trained(source, objective, variant, BackcopySettings(steps=3, layers=2))
    ids_BS = source.rows(2, torch.Generator().manual_seed(0))
    order_BT = study.order_of(2, 48, 36, size, 1)
    seen = size if objective == "block4" else None
    arms = [study.Arm(name, size, seen, reading) for reading in ("own", "one")]
    watched = [study.watched(model, ids_BS, order_BT, arm, source.mask_id) for arm in arms]
    model.set_attn_implementation("eager")
    maps, added = [], model.config.sink_count
    for layer in model.model.layers:
        layer.self_attn.register_forward_hook(lambda module, args, out: maps.append(out[1]))
    for step, row in product((0, 2, 7, 11), range(2)):
        maps.clear()
        left = order_BT[row, step:]
        now = int(left[0])
        noisy = ids_BS[row : row + 1].clone()
        if name != "causal":
            noisy[0, left] = source.mask_id
        with torch.no_grad():
            model(noisy, causal=name == "causal")
        for arm, (received, keys_T) in zip(arms, watched, strict=True):
            if name == "causal":
                asked, keys = [35 + step], 36 + step
            else:
                asked = [one for one in left.tolist() if size is None or one // size == now // size]
                asked = asked if arm.reading == "own" else [now]
                keys = 48 if arm.seen is None else (now // 4 + 1) * 4
            assert keys_T[step] == keys + added
            for layer, weights_BHQK in enumerate(maps[-2:]):
                expected_HK = weights_BHQK[0, :, asked].mean(1) * (keys + added)
                found_HK = torch.tensor(received[row, step, layer])
                assert (
                    not expected_HK[:, keys + added :].any()
                    and found_HK[:, keys + added :].isnan().all()
                )
                torch.testing.assert_close(
                    found_HK[:, : keys + added].float(),
                    expected_HK[:, : keys + added],
                    atol=1e-4,
                    rtol=1e-4,
                )


@pytest.mark.parametrize(
    ("gaps", "twin", "said"),
    [
        ([-0.3, -0.2, -0.25, -0.28, -0.22, -0.26], 0.0, "**less**, -0.252"),
        (
            [-0.3, -0.2, -0.25, -0.28, -0.22, -0.26],
            -0.1,
            "**no finding, untrained twins show it as well (less)**",
        ),
        ([-0.3, 0.2, -0.25, 0.28, -0.22, 0.26], 0.0, "**inconclusive (±"),
        ([-0.3, -0.2, -0.25], 0.0, "described only, -0.250"),
    ],
)
def test_a_verdict_rests_on_six_seeds_and_on_what_untrained_twins_do_not_show(
    study, gaps, twin, said
):
    line = study.verdict("words", pd.Series(gaps), "", {"fresh": pd.Series([twin] * len(gaps))})
    assert line.startswith(f"words: {said}")
    if len(gaps) == 6:
        assert "inconclusive, since it is far" in study.verdict(
            "words", pd.Series(gaps), "it is far"
        )
        assert study.flipped(np.array([-0.3, -0.2, -0.25, -0.28, -0.22, -0.26])) == pytest.approx(
            2 / 64
        )


@pytest.mark.slow
def test_the_commands_go_on_where_they_stopped_and_a_model_far_from_the_best_loss_gives_no_verdict(
    study, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(study, "KINDS", (*study.KINDS[:4], ("full", "sink")))
    monkeypatch.setattr(study, "GIVEN", 36)
    monkeypatch.setattr(masking, "KEYS", (1, 8))
    folders = f"--work {tmp_path / 'work'} --out {tmp_path / 'out'}"
    options = f"{folders} --steps 2 --rows 24 --watched 2 --seeds 0".split()
    refused("there are no measures in", study.main, ["report", *options])
    study.main(["train", *options])
    kept = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "work" / "models").iterdir()}
    assert {
        "full-plain-0.safetensors",
        "block16-plain-0.safetensors",
        "diffusion-sink-0.safetensors",
    } <= kept.keys()
    study.main(["measure", *options])
    measured = capsys.readouterr().out
    assert measured.count(" s\n") == 10
    study.main(["train", *options])
    study.main(["measure", *options])
    assert kept == {
        path.name: path.stat().st_mtime_ns for path in (tmp_path / "work" / "models").iterdir()
    }
    capsys.readouterr()
    study.main(["report", *options])
    said = capsys.readouterr().out
    assert "A mobility, block 4 less full, as 4: described only" in said
    results = json.loads((tmp_path / "out" / "results.json").read_text("utf-8"))
    assert len(results["models"]) == 5 and {row["arm"] for row in results["moves"]} >= {
        "full, read in 16",
        "causal",
    }
    assert (tmp_path / "out" / "motion.png").stat().st_size > 5000
    found = study.tables(type("", (), {"work": tmp_path / "work", "seeds": [0]}))
    told = study.refusal(found, [("block4", "plain")], [])
    assert told == "block4 plain is not within 5 % of the best loss in 1 of 1 seeds"
