"""Comparing caches: what is measured is what it says, rows do not depend on batches, runs go on and
read back.
"""

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from conformance.runs import check_study
from refusals import refused
from sinklab.lab.records import open_run
from sinklab.lab.studies import columns_of
from sinklab.lab.studies.caches.figures import caches_sentences, draw_caches
from sinklab.lab.studies.caches.run import (
    METRICS,
    Policy,
    SparseDenoiser,
    canvas_of,
    costs,
    evaluations,
    forced,
    held_bytes,
    nearest_keys,
    pairs,
    policies,
    revealed,
    written,
)
from sinklab.lab.studies.caches.study import Caches, CacheSettings, cache_fidelity
from tiny_diffusion import TEXT, tiny_loaded
from tiny_llama import tiny_llama

# R rows, B batch, S canvas, N new tokens

SMALL = CacheSettings(
    cache_keep=(0.5,),
    cache_sinks=2,
    refreshed=(2,),
    rows=3,
    batch=2,
    prompt_tokens=12,
    new_tokens=14,
    block_length=6,
    tokens_per_step=2,
    texts=2,
    repeats=1,
)


def text_rows(count=3):
    return torch.randint(5, 200, (count, SMALL.length), generator=torch.Generator().manual_seed(3))


def frame(table):
    return {
        (family, keep, sinks, protect, row): values
        for family, keep, sinks, protect, row, *values in (line.values() for line in table)
    }


def test_every_budget_has_its_pairs():
    found = policies(
        dataclasses.replace(SMALL, cache_keep=(0.25, 0.5), protect=("now", "first"), sparse=True)
    )
    labels = [policy.label for policy in found]
    assert labels[:5] == ["none", "prefix", "dual", "dual, 2 sinks recomputed", "all kept"]
    assert (
        "aligned 0.25 + 2 first sinks" in labels
        and "window 0.5 + 2 random columns for sinks" in labels
    )
    assert len(set(labels)) == len(labels)
    for protected, bare in pairs(found):
        assert (protected.keep, protected.family, bare.sinks) == (bare.keep, bare.family, 0)
        assert bare in found
    # of the sinks of now, "received" keeps those it would keep anyway
    assert not [
        policy for policy in found if (policy.family, policy.protect) == ("received", "now")
    ]


def test_the_uncached_policy_measures_the_models_own_loss():
    loaded, ids_RS = tiny_loaded(sink=1, context=40), text_rows()
    table = frame(forced(loaded, ids_RS, range(3), [Policy("none")], SMALL))
    turn_RN = revealed(SMALL, range(3))
    model, start = loaded.model, SMALL.prompt_tokens
    for row in range(3):
        losses = []
        for begin, size in ((0, 6), (6, 6), (12, 2)):
            for nth in range(-(-size // 2)):
                masked_N = torch.zeros(14, dtype=torch.bool)
                masked_N[begin : begin + size] = turn_RN[row, begin : begin + size] >= 2 * nth
                noisy_S = ids_RS[row].clone()
                noisy_S[start:][masked_N] = model.config.mask_token_id
                noisy_S[start + begin + size :] = model.config.mask_token_id
                if nth < 2:
                    continue
                with torch.no_grad():
                    logits_SV = model(noisy_S[None]).logits[0]
                logits_SV[:, model.config.mask_token_id] = -torch.inf
                logs_SV = logits_SV.log_softmax(-1)
                losses += [
                    -logs_SV[start + n, ids_RS[row, start + n]].item()
                    for n in masked_N.nonzero()[:, 0].tolist()
                ]
        loss, divergence, same = table["none", 1.0, 0, "", row]
        # two blocks have a third evaluation, with two masks each
        assert len(losses) == 4
        assert loss == pytest.approx(np.mean(losses), abs=1e-5)
        assert (divergence, same) == (0, 1)


def test_rows_do_not_depend_on_their_batch():
    loaded, ids_RS = tiny_loaded(sink=1, context=40), text_rows()
    found = [
        policy
        for policy in policies(dataclasses.replace(SMALL, sparse=True))
        if policy.protect != "random"
    ]
    together = frame(forced(loaded, ids_RS, range(3), found, SMALL))
    alone = frame(forced(loaded, ids_RS[2:], [2], found, SMALL))
    for key, values in alone.items():
        assert values == pytest.approx(together[key], abs=2e-5), key
    assert len(alone) == len(found)


def test_what_keeps_everything_is_the_model_itself_with_a_stale_memory():
    loaded, ids_RS = tiny_loaded(context=40), text_rows()
    kept = [
        Policy("none"),
        Policy("nearest"),
        Policy("random"),
        Policy("window"),
        Policy("nearest", 0.3),
    ]
    table = frame(forced(loaded, ids_RS, range(3), kept, SMALL))
    for row in range(3):
        assert table["nearest", 1.0, 0, "", row] == pytest.approx(
            table["random", 1.0, 0, "", row], abs=1e-5
        )
        assert table["window", 1.0, 0, "", row] == pytest.approx(
            table["none", 1.0, 0, "", row], abs=1e-5
        )
        assert table["nearest", 0.3, 0, "", row][1] > table["nearest", 1.0, 0, "", row][1] > 1e-6


def test_each_token_is_revealed_once_in_its_block():
    turn_RN = revealed(SMALL, [0, 5])
    for part in turn_RN.split([6, 6, 2], 1):
        assert part.sort(1).values.tolist() == [list(range(part.shape[1]))] * 2
    assert torch.equal(turn_RN[1:], revealed(SMALL, [5]))
    assert not torch.equal(turn_RN, revealed(dataclasses.replace(SMALL, seed=1), [0, 5]))
    assert evaluations(SMALL) == 3 + 3 + 1


def test_uncached_texts_are_those_of_generate():
    loaded, ids_RS = tiny_loaded(context=40), text_rows()
    expected = loaded.model.generate(ids_RS[:, :12], max_new_tokens=14, block_length=6)[:, 12:]
    assert torch.equal(written(loaded, ids_RS, Policy("none"), SMALL), expected)
    assert torch.equal(written(loaded, ids_RS, Policy("window"), SMALL), expected)


def test_sparse_attention_sees_itself_the_sinks_and_the_nearest():
    sinks_BS = torch.zeros(1, 9, dtype=torch.bool)
    sinks_BS[0, [0, 8]] = True
    seen_BQK = nearest_keys(sinks_BS, 4)
    assert seen_BQK[0, 4].nonzero()[:, 0].tolist() == [0, 3, 4, 8]
    assert seen_BQK[0, 0].nonzero()[:, 0].tolist() == [0, 1, 2, 8]
    assert nearest_keys(sinks_BS & False, 3)[0, 4].nonzero()[:, 0].tolist() == [3, 4, 5]
    assert nearest_keys(sinks_BS, 1)[0].equal(torch.eye(9, dtype=torch.bool))
    assert nearest_keys(sinks_BS, 5).sum(2).unique().tolist() == [5]


def test_the_sinks_of_sparse_attention_are_those_of_a_trace():
    model, ids_BS = tiny_loaded(sink=1, context=40).model, text_rows(2)
    denoiser = SparseDenoiser(model, 0.5, 3)
    sinks_BS = denoiser._sinks(ids_BS)
    assert sinks_BS.sum(1).tolist() == [3, 3]
    assert torch.equal(denoiser._sinks(ids_BS[1:]), sinks_BS[1:])


def test_memory_is_that_of_what_is_kept():
    model = tiny_loaded(context=40).model
    canvas = canvas_of(model, text_rows(1), SMALL.new_tokens)
    column = 2 * 2 * 2 * 8 * 4  # keys and values, layers, key heads, head dim, float32
    held = {
        policy: held_bytes(model, canvas, Policy(policy, keep), 6)
        for policy, keep in (("none", 1), ("nearest", 0.5))
    }
    assert held == {"none": 26 * column, "nearest": (6 + 10) * column}


def test_costs_have_a_line_for_every_length_and_policy():
    model, found = (
        tiny_loaded(context=40).model,
        [Policy("none"), Policy("dual"), Policy("random", 0.25)],
    )
    table = columns_of(costs(model, (20, 26), found, SMALL))
    assert table["length"] == [20] * 3 + [26] * 3
    assert table["family"] == ["none", "dual", "random"] * 2
    assert [
        ratio
        for ratio, family in zip(table["ratio"], table["family"], strict=True)
        if family == "none"
    ] == [1, 1]
    assert min(table["ms_per_token"]) > 0
    # without a cache every evaluation is full
    for family, partial in zip(table["family"], table["partial_ms"], strict=True):
        assert np.isnan(partial) == (family == "none")


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    corpus = tmp_path_factory.mktemp("text") / "text.txt"
    corpus.write_text(TEXT * 12, "utf-8")
    how = {"scores": ("nearest", "random"), "lengths": (20,)}
    return dataclasses.replace(SMALL, heldout=str(corpus), **how)


@pytest.fixture(scope="module")
def run(settings, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "caches"
    return open_run(cache_fidelity(tiny_loaded(context=40), folder, settings))


def test_a_run_folder_holds_everything(run):
    assert (run.info.kind, run.info.status) == ("caches", "complete")
    assert set(run.tables) == {"rows", "texts", "costs", "policies", "protection"}
    table, rows = run.table("policies"), run.table("rows")
    assert table["label"][0] == "none" and table["agreement"][0] == 1
    for line in table.to_dict("records"):
        mine = rows[
            (rows["family"] == line["family"])
            & (rows["keep"] == line["keep"])
            & (rows["protect"] == line["protect"])
        ]
        for metric in METRICS:
            assert line[metric] == pytest.approx(mine[metric].mean())
            assert np.isnan([line[f"{metric}_low"], line[f"{metric}_high"]]).all()


def test_protection_is_the_paired_difference_at_equal_budget(run):
    rows = (
        run.table("rows").set_index(["family", "keep", "protect", "row"])["divergence"].sort_index()
    )
    line = run.table("protection").query("metric == 'divergence' and family == 'random'").iloc[0]
    delta_R = rows["random", 0.5, "now"] - rows["random", 0.5, ""]
    assert line["difference"] == pytest.approx(delta_R.mean())
    # three rows are points, without an interval
    assert np.isnan([line["low"], line["high"]]).all() and line["rows"] == 3
    assert any(
        "no verdict on the distance to uncached decoding" in text
        for text in caches_sentences([run])
    )


def test_a_comparison_that_lost_a_text_goes_on(run, settings, tmp_path):
    path = shutil.copytree(run.path, tmp_path / "run")
    (path / "texts-0002.parquet").unlink()
    cache_fidelity(tiny_loaded(context=40), path, settings, resume=True)
    assert open_run(path).table("policies").equals(run.table("policies"))


@pytest.mark.slow
def test_the_study_conforms(settings):
    small = {"cache_keep": (), "refreshed": (), "repeats": 0, "new_tokens": 6, "texts": 1}
    check_study(Caches(), tiny_loaded(context=40), dataclasses.replace(settings, **small))


def test_the_figure_is_drawn(run, tmp_path):
    (path,) = draw_caches([run], tmp_path, None)
    assert path.read_bytes().startswith(b"\x89PNG")


REFUSED = [
    ({}, tiny_llama, "tiny llama is autoregressive"),
    ({}, lambda: tiny_loaded(context=40, mask_token_id=None), "has mask_token_id None"),
    *(
        (changes, lambda: tiny_loaded(context=40), message)
        for changes, message in (
            ({"prompt_tokens": 27}, "40 positions, got 41"),
            ({"lengths": (50,)}, "40 positions, got 50"),
            ({"heldout": "short.txt", "rows": 30}, r"\d+ rows of 26 .*rows=30"),
            ({"rows": 1}, "rows must be at least 2"),
            ({"block_length": 4}, "block_length=4 and"),
            ({"new_tokens": 4}, "for new_tokens=4"),
            ({"lengths": (14,)}, "new_tokens=14, got 14"),
            ({"cache_keep": (0.0,)}, "keep must be .* is 0.0"),
            ({"scores": ("attended",)}, "score must .*'attended'"),
            ({"protect": ("last",)}, "protect must .*'last'"),
        )
    ),
]


@pytest.mark.parametrize(("changes", "make", "message"), REFUSED)
def test_what_makes_no_sense_is_refused(changes, make, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("short.txt").write_text(TEXT * 2, "utf-8")
    refused(
        message,
        lambda: cache_fidelity(make(), Path("never"), dataclasses.replace(SMALL, **changes)),
    )
    assert not Path("never").exists()
