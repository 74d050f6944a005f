"""The script on caches that evict: its smallest run, the columns that its caches keep, and the
committed figures.
"""

import functools
import json
import math
import sys

import pytest
import torch

from launched import ROOT, script
from refusals import refused
from sinklab.core.instrument import trace
from sinklab.core.registry import caches, selectors
from sinklab.core.subject import Canvas, denoise
from sinklab.lab.checkpoints import load
from sinklab.lab.scoring import heldout_rows
from sinklab.lab.studies import heldout_text
from tiny_diffusion import MASK, tiny_model

COMMITTED = ROOT / "studies" / "sink_caches" / "results.json"
POLICY = ("family", "keep", "sinks", "protect")


@pytest.fixture
def study(scratch):
    scratch(caches, selectors)
    yield script("studies/sink_caches")
    del sys.modules["sink_caches"]


def committed(name):
    """The committed line of every policy of a model."""
    lines = json.loads(COMMITTED.read_text("utf-8"))[name]["policies"]
    return {tuple(line[key] for key in POLICY): line for line in lines}


@pytest.mark.slow
def test_the_smallest_run(study, monkeypatch, tmp_path):
    name, out, own = "tiny-sink", tmp_path / "out", functools.cache(study.compared)
    # the other model is another name for this one
    monkeypatch.setattr(study, "compared", lambda _, settings: own(name, settings))
    monkeypatch.setattr(sys, "argv", ["sink_caches.py", "--smallest", "--out", str(out)])
    study.main()
    results = json.loads((out / "results.json").read_text("utf-8"))
    assert results.keys() == json.loads(COMMITTED.read_text("utf-8")).keys()
    lines = results[name]["policies"]
    apart = {tuple(line[key] for key in POLICY): line["divergence"] for line in lines}
    assert apart["none", 1, 0, ""] == 0
    assert 0 < apart["sink_refresh", 1, 16, ""] < apart["dual", 1, 0, ""]
    assert apart["nearest", 0.5, 4, "now"] < apart["nearest", 0.5, 0, ""]
    agreement = {
        line["family"]: line["agreement"] for line in results["tiny-sink-written"]["policies"]
    }
    assert agreement["none"] == 1 and agreement["window"] is None
    assert (out / f"{name}.png").stat().st_size > 1000


def written(model, cache, prompt=tuple(range(5, 14)), **how):
    canvas = Canvas.from_prompts([list(prompt)], new_tokens=6, mask_id=MASK, pad_id=0)
    with trace(model, ("received", "received_by_state"), canvas=canvas) as recording:
        steps = list(denoise(model, canvas, cache=cache, **how))
    return [step.ids_BS for step in steps], recording


@pytest.mark.parametrize("keep, sinks", [(0.5, 2), (0.4, 0), (1.0, 0)])
def test_each_head_keeps_its_sinks_and_then_the_nearest_columns(study, keep, sinks):
    model = tiny_model(1).double()
    cache = study.EvictingCache(keep=keep, sinks=sinks)
    _, recording = written(model, cache)
    # in the first step the masked queries are those of the block
    masked_LHK = recording.values("received_by_state")[0][0, 0][..., 1:10]
    # the query heads of a key head choose together
    masked_LGK = masked_LHK.unflatten(1, (model.config.backbone.num_key_value_heads, -1)).sum(2)
    masked_LHK = masked_LGK.repeat_interleave(masked_LHK.shape[1] // masked_LGK.shape[1], 1)
    for received_BLHK in recording.received[1:]:
        for layer, head in torch.cartesian_prod(torch.arange(2), torch.arange(4)).tolist():
            received_K = received_BLHK[0, layer, head]
            kept = set(received_K[1:10].nonzero()[:, 0].tolist())
            best = set(masked_LHK[layer, head].topk(sinks).indices.tolist())
            others = [column for column in range(8, -1, -1) if column not in best]
            assert kept == best | set(others[: math.floor(9 * keep) - len(best)])
            assert received_K[0] > 0 and (received_K[10:] > 0).all()


@pytest.mark.slow
def test_what_keeps_or_computes_everything_is_no_other_cache(study):
    model = tiny_model(1).double()
    dual, refreshed = (written(model, cache, block_length=3)[0] for cache in ("dual", None))
    for score in study.SCORES:
        every = study.EvictingCache(keep=1.0, score=score)
        assert all(map(torch.equal, written(model, every, block_length=3)[0], dual))
    anew = written(model, study.SinkRefreshCache(sinks=99), block_length=3)[0]
    assert all(map(torch.equal, anew, refreshed))


def test_rows_choose_as_alone_and_padding_is_refused(study):
    model = tiny_model().double()
    prompts = [list(range(5, 14)), list(range(19, 10, -1))]
    for cache in (study.EvictingCache(sinks=2, score="aligned"), study.SinkRefreshCache(sinks=2)):
        canvas = Canvas.from_prompts(prompts, new_tokens=6, mask_id=MASK)
        *_, both = denoise(model, canvas, cache=cache, block_length=3)
        alone = [written(model, cache, prompt, block_length=3)[0][-1] for prompt in prompts]
        assert torch.equal(both.ids_BS, torch.cat(alone))
    ragged = Canvas.from_prompts([[5, 6], [7]], new_tokens=6, mask_id=MASK, pad_id=0)
    refused("without padding", lambda: list(denoise(model, ragged, cache="evict")))


@pytest.mark.slow
def test_committed_figures_come_out_again(study):
    loaded = load("tiny")
    ids_BS = heldout_rows(loaded, heldout_text(None), rows=12, length=224).ids_RS
    name = "nearest", 0.125, 4, "now"
    rows = study.forced(loaded.model, ids_BS, [study.Policy(*name)], study.FULL[""])
    # of one policy alone there is nothing to differ from
    assert rows["loss"].mean() == pytest.approx(committed("tiny")[name]["loss"], abs=1e-4)
