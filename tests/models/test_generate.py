import dataclasses
from functools import partial

import pytest
import torch

from refusals import refused
from sinklab.core.subject import DecodingSettings
from sinklab.lab.samplers import Entropy, EntropyBound, Factor
from tiny_diffusion import tiny_model

# caches and training are of the lab
pytestmark = pytest.mark.ring("lab")

MASK = 2


PROMPT = torch.tensor([[40, 41]])
PROMPTS = [[40, 41, 42, 43, 44], [50, 51], [60]]
IDS, REAL = torch.zeros(3, 5, dtype=torch.long), torch.zeros(3, 5, dtype=torch.long)
for row, prompt in enumerate(PROMPTS):
    IDS[row, -len(prompt) :] = torch.tensor(prompt)
    REAL[row, -len(prompt) :] = 1


def check_rows(model, **options):
    """A left-padded batch is written as its rows alone."""
    out = model.generate(IDS, REAL, **options)
    assert MASK not in out[:, 5:]
    for row, prompt in enumerate(PROMPTS):
        alone = model.generate(torch.tensor([prompt]), **options)
        assert torch.equal(out[row, 5 - len(prompt) :], alone[0]), (row, options)


@pytest.mark.parametrize("stop_ids", [(), range(0, 280, 7)])
@pytest.mark.parametrize(
    "rule, schedule, cache",
    [
        ("low_confidence", "threshold:threshold=0.1", "prefix"),
        ("maskgit_plus", "factor:factor=1.4", "dual"),
        ("entropy", "entropy_bound:gamma=5.0", "prefix"),
    ],
)
def test_a_batch_equals_its_rows(rule, schedule, cache, stop_ids):
    options = {"rule": rule, "schedule": schedule, "cache": cache, "stop_ids": stop_ids}
    check_rows(tiny_model(1).double(), block_length=3, max_new_tokens=6, **options)


def test_infilling_fills_the_masks_and_nothing_else():
    model = tiny_model(1)
    ids = torch.tensor([[40, MASK, 42, MASK, MASK, 45], [50, 51, MASK, 53, 54, 55]])
    out = model.generate(ids)
    assert out.shape == ids.shape
    assert MASK not in out
    given = ids != MASK
    assert torch.equal(out[given], ids[given])
    assert not torch.equal(model.generate(ids[:, :5])[0], out[0, :5]), (
        "what stands to the right is read"
    )


def calls_of(model):
    calls = []
    model.lm_head.register_forward_pre_hook(lambda module, args: calls.append(args[0].shape[0]))
    return calls


@pytest.mark.parametrize(
    "options, rows",
    [
        ({"steps": 3}, [8, 5, 2]),
        ({"steps": 4, "block_length": 4}, [4, 2, 4, 2]),
        ({"schedule": Factor(50.0), "block_length": 4}, [4, 4]),
        # Dream's first step commits nothing
        ({"schedule": "timed", "max_new_tokens": 4}, [4, 4, 3, 2]),
        # guidance asks twice
        ({"cfg_scale": 3.0, "steps": 2}, [8, 8, 4, 4]),
    ],
    ids=str,
)
def test_options_decide_how_often_the_model_runs_and_where(options, rows):
    model = tiny_model()
    calls = calls_of(model)
    model.generate(PROMPT, **{"max_new_tokens": 8, **options})
    assert calls == rows


def test_the_seed_decides_the_sample():
    write = partial(tiny_model().generate, PROMPT, max_new_tokens=12, temperature=1.0)
    first = write(seed=1)
    assert torch.equal(first, write(seed=1))
    assert not torch.equal(first, write(seed=2))
    torch.manual_seed(5)
    free = write()
    torch.manual_seed(5)
    assert torch.equal(free, write()), "without a seed the global generator decides"
    assert not torch.equal(free, write())


def test_it_ends_early_at_end_of_text():
    model = tiny_model()
    ids = torch.tensor([[40, 41], [50, 51]])
    full = model.generate(ids, max_new_tokens=10, rule="left_to_right")
    eos = full[0, 4].item()
    assert full[0, 2:].tolist().index(eos) == 2
    calls = calls_of(model)
    first = full[:1].clone()
    first[:, 5:] = eos
    options = {"max_new_tokens": 10, "rule": "left_to_right"}
    assert torch.equal(model.generate(ids[:1], stop_ids=(eos,), **options), first)
    assert len(calls) == 3
    calls.clear()
    for named in (eos, [eos, 7]):
        model.config.eos_token_id = named
        assert torch.equal(model.generate(ids[:1], stop_at_eos=True, **options), first)
        assert torch.equal(model.generate(ids[:1], **options), full[:1]), "only where asked for"


def test_settings_in_one_record_and_by_keyword_are_the_same():
    write = partial(tiny_model(1).generate, PROMPT, max_new_tokens=12)
    record = DecodingSettings(
        rule="entropy", schedule="entropy_bound:gamma=4.0", temperature=0.8, top_k=9, seed=5
    )
    out = write(settings=record)
    options = {name: value for name, value in dataclasses.asdict(record).items() if value != ()}
    assert torch.equal(out, write(**options))
    plain = DecodingSettings(temperature=0.8, top_k=9, seed=5)
    assert torch.equal(out, write(settings=plain, rule=Entropy(), schedule=EntropyBound(4.0)))
    assert not torch.equal(out, write(settings=record, seed=6))


class FakeStreamer:
    def __init__(self):
        self.events = []

    def put(self, value):
        self.events.append(("put", value.flatten().tolist()))

    def put_draft(self, value):
        self.events.append(("draft", value.flatten().tolist()))

    def end(self):
        self.events.append(("end", []))


def test_a_streamer_sees_the_prompt_the_drafts_and_the_text():
    model, streamer = tiny_model(1), FakeStreamer()
    out = model.generate(PROMPT, max_new_tokens=3, streamer=streamer)
    names, values = zip(*streamer.events, strict=True)
    assert names == ("put", "draft", "draft", "draft", "put", "end")
    assert values[0] == [40, 41]
    assert [draft.count(MASK) for draft in values[1:4]] == [2, 1, 0]
    assert values[4] == values[3] == out[0, 2:].tolist()


@pytest.mark.parametrize(
    "options, message",
    [
        ({"max_new_tokens": None}, "open position"),
        ({"stop_at_eos": True}, "stop_at_eos"),
        # what is no batch of token ids
        ({"input_ids": [[40, 41], [42]]}, "got a list .*padding_side='left'"),
        ({"input_ids": "text"}, "got a str .*tokenize"),
        ({"input_ids": {"input_ids": torch.tensor([[40]])}}, r"got a dict; pass \*\*inputs"),
        ({"input_ids": torch.tensor([[[40]]])}, r"shape \(1, 1, 1\)"),
        ({"input_ids": [[40, 41], [42, -100]]}, "0 to 279, .* row 1 position 1 holds -100"),
    ],
    ids=str,
)
def test_it_refuses_before_any_work(options, message):
    model = tiny_model(1, mask_token_id=MASK)
    model.config.eos_token_id = None
    runs, streamer = [], FakeStreamer()
    model.model.register_forward_pre_hook(lambda *_: runs.append(1))
    given = {"input_ids": PROMPT, "max_new_tokens": 4, "streamer": streamer}
    refused(message, model.generate, **{**given, **options})
    assert not runs
    assert not streamer.events


def test_a_model_without_a_mask_writes_nothing():
    refused("mask_token_id", tiny_model(mask_token_id=None).generate, PROMPT, max_new_tokens=2)


def test_lists_and_single_rows_are_taken_as_rows():
    model, options = tiny_model(1), {"max_new_tokens": 4}
    out = model.generate(torch.tensor([[40, 41, 42]]), **options)
    for given in (
        torch.tensor([40, 41, 42]),
        [40, 41, 42],
        [[40, 41, 42]],
        torch.tensor([[40, 41, 42]]).numpy(),
    ):
        assert torch.equal(model.generate(given, **options), out)
    assert torch.equal(model.generate([0, 40, 41, 42], [0, 1, 1, 1], **options)[:, 1:], out)
    holes = model.generate(torch.tensor([[0, 40, MASK]]), torch.tensor([[0, 1, 1]]))
    assert torch.equal(model.generate(torch.tensor([0, 40, MASK]), torch.tensor([0, 1, 1])), holes)
    assert model.generate([], **options).shape == (1, 4)
