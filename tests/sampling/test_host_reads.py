"""How often decoding asks the device for a value, which on a GPU is a wait; and that what it writes
stays the same.
"""

import numpy as np
import pytest
import torch
from host_reads import HostReads, counted
from transformers import LlamaConfig

from sinklab.core.attention import context
from sinklab.core.instrument import BlockKeys, SinkKeys, intervene
from sinklab.core.sinks import Excess
from sinklab.core.subject import Canvas, Denoiser, DiffusionLM, DiffusionLMConfig, Session, denoise
from sinklab.lab.measures import MaskSinks
from tiny_models import SIZES

pytestmark = pytest.mark.ring("extras")

MASK, STOPS = 96, [3, 5, 7, 11, 40]
SETTINGS = [
    {"block_length": 4},
    {"steps": 8, "schedule": "timed"},
    {"block_length": 4, "schedule": "threshold:threshold=0.05"},
    {"block_length": 4, "stop_ids": STOPS},
    {"block_length": 4, "schedule": "timed", "steps": 8, "rule": "origin"},
    {"block_length": 4, "temperature": 1.0, "top_k": 5, "schedule": "factor"},
]
CACHES = [None, "prefix", "dual"]


def toy(layers=2, **settings):
    torch.manual_seed(0)
    sizes = SIZES | {"num_hidden_layers": layers, "initializer_range": 0.2}
    backbone = LlamaConfig(vocab_size=97, **sizes, attn_implementation="sdpa")
    return DiffusionLM(DiffusionLMConfig(backbone, mask_token_id=MASK, **settings)).eval()


def canvas_of(rows):
    return Canvas.from_prompts(rows, new_tokens=8, mask_id=MASK, pad_id=0)


CANVASES = {
    "one row": canvas_of([[1, 2, 3, 4, 5]]),
    "ragged": canvas_of([[1, 2, 3], [4], [7, 8, 9, 10], []]),
}


class Untold(Denoiser):
    """The slow twin: a denoiser that is not told in numbers where its logits are wanted."""

    def __init__(self, denoiser):
        self.denoiser = denoiser

    def logits(self, ids_BS, at):
        return self.denoiser(ids_BS, at.wanted_BS)

    def begin(self, cache):
        return UntoldSession(self.denoiser.begin(cache))


class UntoldSession(Session):
    def __init__(self, session):
        self.session = session

    def logits(self, ids_BS, at, columns=None):
        return self.session(ids_BS, at.wanted_BS, columns)


def steps_of(denoiser, some, cache, settings):
    return denoise(
        denoiser, some, cache=cache, generator=torch.Generator().manual_seed(1), **settings
    )


@pytest.fixture
def far(monkeypatch):
    """As if values of the CPU were far away: decoding avoids to read them."""
    return lambda: monkeypatch.setattr(context, "SYNCHRONOUS", set())


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_a_step_reads_once_at_most_and_writes_the_same(far, settings, cache):
    # each setting and each cache has both canvases
    rows = [*CANVASES][(SETTINGS.index(settings) + CACHES.index(cache)) % 2]
    model, some = toy(logit_shift=rows == "ragged"), CANVASES[rows]
    attention_BS = None if rows == "one row" else some.attention_BS
    if "steps" in settings and "block_length" not in settings and cache is not None:
        settings = {**settings, "block_length": 8}
    near = list(steps_of(model.denoiser(attention_BS), some, cache, settings))
    near_twin = list(steps_of(Untold(model.denoiser(attention_BS)), some, cache, settings))
    far()
    found, counts = counted(steps_of(model.denoiser(attention_BS), some, cache, settings))
    # where values are far padding is computed with the rest, which rounds otherwise
    far_twin = list(steps_of(Untold(model.denoiser(attention_BS)), some, cache, settings))
    for steps, twin in ((near, near_twin), (found, far_twin)):
        assert len(steps) == len(twin)
        for ours, theirs in zip(steps, twin, strict=True):
            assert torch.equal(ours.ids_BS, theirs.ids_BS)
            assert torch.equal(ours.committed_BS, theirs.committed_BS)
            assert torch.equal(ours.filled_BS, theirs.filled_BS)
            torch.testing.assert_close(ours.confidence_BS, theirs.confidence_BS, equal_nan=True)
    # the first step asks about the canvas
    for number, read in enumerate(counts[1:], 1):
        assert sum(read.values()) <= 1, f"step {number}: {read}"


KEPT = MaskSinks(k=1, when="kept", limit=3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "edits, cache",
    # of two edits all that is logged comes over together
    [
        ([BlockKeys(SinkKeys(Excess(0.5), 2))], "dual"),
        ([KEPT], "dual"),
        ([MaskSinks(1), KEPT], None),
    ],
    ids=str,
)
def test_an_edited_step_reads_as_often_whatever_the_number_of_layers(far, edits, cache):
    some, reads = Canvas.from_prompts([[1, 2, 3], [4]], new_tokens=4, mask_id=MASK, pad_id=0), []

    def run(layers):
        model = toy(layers)
        with intervene(model, *edits) as log:
            return *counted(
                steps_of(model.denoiser(some.attention_BS), some, cache, {"block_length": 2})
            ), log

    near, _, near_log = run(1)
    far()
    for layers in (1, 2):
        found, counts, log = run(layers)
        # the first step asks about the canvas; the second prepares what the edit finds there
        reads.append([sum(read.values()) for read in counts[2:]])
        if layers == 1:
            assert all(
                torch.equal(ours.ids_BS, theirs.ids_BS)
                for ours, theirs in zip(found, near, strict=True)
            )
            for ours, theirs in zip(log.removals, near_log.removals, strict=True):
                assert torch.equal(ours.columns_BLHM, theirs.columns_BLHM)
                for name, numbers in ours.numbers.items():
                    np.testing.assert_equal(numbers.numpy(), theirs[name].numpy())
        assert all(read["cpu"] == 1 for read in counts[2:] if cache is None), (
            "the log of a step is one piece"
        )
    assert reads[0] == reads[1]


def test_the_counter_counts():
    flags = torch.tensor([True, False])
    with HostReads() as reads:
        int(torch.arange(3).sum())
        torch.arange(2)[flags]
        flags.nonzero()
        flags.tolist()
        torch.tensor([1, 2])
        torch.arange(2)[torch.arange(2)]
    counts = {name: count for name, count in reads.counts.items() if count}
    assert counts.pop("index by flags") == 1
    assert counts == {"_local_scalar_dense": 1, "nonzero": 1, "tolist": 1, "lift_fresh": 1}
