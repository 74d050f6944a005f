"""Decoding on a GPU: graphs and reads that are left out change nothing. Skipped where there is
none.
"""

import warnings

import pytest
import torch
from test_host_reads import MASK, STOPS, Untold, toy
from torch import nn

from sinklab.core.attention import context
from sinklab.core.instrument import BlockKeys, SinkKeys, TopKeys, intervene
from sinklab.core.sinks import Excess
from sinklab.core.subject import Canvas, denoise
from sinklab.extras.fast.decoder import FastDecoder, Recorded
from sinklab.lab.caching.session import ModelSession
from sinklab.lab.measures import MaskSinks, Random

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

ROWS = {"one row": [[1, 2, 3, 4, 5]], "ragged": [[1, 2, 3], [4], [7, 8, 9, 10], []]}
SETTINGS = [
    {},
    {"schedule": "threshold:threshold=0.05"},
    {"stop_ids": STOPS},
    {"temperature": 1.0, "rule": "entropy"},
]


def decoded(model, rows, cache, is_told=True, **settings):
    some = Canvas.from_prompts(ROWS[rows], new_tokens=24, mask_id=MASK, pad_id=0).to("cuda")
    denoiser = model.denoiser(None if rows == "one row" else some.attention_BS)
    generator = torch.Generator("cuda").manual_seed(1)
    settings = {"block_length": 8, **settings}
    with torch.inference_mode():
        return list(
            denoise(
                denoiser if is_told else Untold(denoiser),
                some,
                cache=cache,
                generator=generator,
                **settings,
            )
        )


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("cache", [None, "prefix", "dual"])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("logit_shift", [False, True])
def test_tokens_are_those_of_the_path_that_waits(monkeypatch, logit_shift, settings, cache, rows):
    model = toy(logit_shift=logit_shift).cuda()
    ours = decoded(model, rows, cache, **settings)
    monkeypatch.setattr(FastDecoder, "records", False)
    eager = decoded(model, rows, cache, **settings)
    monkeypatch.setattr(context, "SYNCHRONOUS", {"cpu", "cuda"})
    twin = decoded(model, rows, cache, is_told=False, **settings)
    assert len(ours) == len(eager) == len(twin)
    for steps in (ours, eager):
        for step, theirs in zip(steps, twin, strict=True):
            assert torch.equal(step.ids_BS, theirs.ids_BS)
            torch.testing.assert_close(
                step.confidence_BS, theirs.confidence_BS, equal_nan=True, rtol=1e-4, atol=1e-5
            )


@pytest.fixture
def begun(monkeypatch):
    """Sessions that were begun."""
    sessions, session = [], ModelSession.__init__
    monkeypatch.setattr(
        ModelSession,
        "__init__",
        lambda self, denoiser: sessions.append(self) or session(self, denoiser),
    )
    return sessions


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("cache", ["prefix", "dual"])
@pytest.mark.parametrize("sinks", [{}, {"sink_kind": "token", "sink_count": 1}])
def test_partial_evaluations_are_recorded(begun, sinks, cache, rows):
    decoded(toy(**sinks).cuda(), rows, cache)
    found = begun[0].store.graphs
    assert found
    assert all(isinstance(one, Recorded) for one in found.values()), found


class Nosy(nn.Linear):
    """A projection that looks at its values: no graph can hold it."""

    def forward(self, x):
        assert x.isfinite().all().item()
        return super().forward(x)


def test_what_cannot_be_recorded_runs_as_it_is(begun):
    model = toy().cuda()
    twin = decoded(model, "ragged", "dual")
    for layer in model.model.layers:
        old = layer.self_attn.o_proj
        layer.self_attn.o_proj = Nosy(
            old.in_features, old.out_features, bias=False, device="cuda"
        ).requires_grad_(False)
        layer.self_attn.o_proj.weight = old.weight
    ours = decoded(model, "ragged", "dual")
    assert torch.equal(ours[-1].ids_BS, twin[-1].ids_BS)
    assert [one.split(":")[0] for one in begun[-1].store.graphs.values()] == ["not recorded"]
    # the generator knows that the recording has ended
    assert torch.rand(3, device="cuda").isfinite().all()


@pytest.mark.parametrize("cache", [None, "dual"])
@pytest.mark.parametrize(
    "edit", [MaskSinks(k=1), BlockKeys(SinkKeys(Excess(0.5), 2)), BlockKeys(Random(TopKeys(1)))]
)
def test_edited_tokens_are_those_of_the_path_that_waits(monkeypatch, edit, cache):
    model = toy().cuda()
    with intervene(model, edit) as log:
        ours = decoded(model, "ragged", cache)
    monkeypatch.setattr(context, "SYNCHRONOUS", {"cpu", "cuda"})
    with intervene(model, edit) as twin_log:
        twin = decoded(model, "ragged", cache, is_told=False)
    assert all(
        torch.equal(step.ids_BS, theirs.ids_BS) for step, theirs in zip(ours, twin, strict=True)
    )
    pairs = zip(log.removals, twin_log.removals, strict=True)
    assert all(torch.equal(one.columns_BLHM, other.columns_BLHM) for one, other in pairs)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("cache", [None, "prefix", "dual"])
def test_a_step_waits_once_at_most(cache):
    model = toy().cuda()
    some = Canvas.from_prompts(ROWS["ragged"], new_tokens=24, mask_id=MASK, pad_id=0).to("cuda")
    steps = denoise(model.denoiser(some.attention_BS), some, cache=cache, block_length=8)
    with torch.inference_mode():
        next(steps)
        for number in range(1, 24):
            with warnings.catch_warnings(record=True) as waits:
                warnings.simplefilter("always")
                torch.cuda.set_sync_debug_mode("warn")
                try:
                    next(steps)
                finally:
                    torch.cuda.set_sync_debug_mode("default")
            places = [
                f"{one.filename}:{one.lineno}"
                for one in waits
                if "called a synchronizing" in str(one.message)
            ]
            assert len(places) <= 1, f"step {number}: {places}"
