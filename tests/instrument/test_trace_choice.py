"""Layers, heads, steps and maps: what is chosen equals what a full trace says of it, and nothing
else is computed.
"""

# B batch, L layers, H heads, Q queries, S keys
import pytest
import torch
from probed import IDS, PADDED
from torch.testing import assert_close

from refusals import refused, refusing
from sinklab.core import registry
from sinklab.core.instrument import call, trace
from tiny_models import HandWritten, llama

NAMES = tuple(
    name
    for name, kind in registry.statistics.items()
    # the last compares the recorded layers with each other
    if not (kind.needs_canvas or name in ("drift", "layer_similarity"))
)


def four_layers():
    return HandWritten(layers=4)


@pytest.mark.parametrize(
    "layers, expected",
    [
        (2, [2]),
        ((3, 0), [0, 3]),
        ((-4, -1), [0, 3]),
        (("blocks.0", 2), [0, 2]),
    ],
)
def test_layers_by_number_and_by_name(layers, expected):
    model = four_layers()
    with trace(model, NAMES) as full:
        model(IDS)
    with trace(model, NAMES, layers=layers) as recording:
        model(IDS)
        model(IDS)
    assert recording.layers == [f"blocks.{index}" for index in expected]
    assert [visible_BS.shape for visible_BS in recording.visible] == [(2, 12)] * 2
    for name in NAMES:
        axis = recording.dims(name).index("layer")
        chosen = torch.from_numpy(full.array(name)).index_select(axis, torch.tensor(expected))
        for step in range(2):
            assert torch.equal(torch.from_numpy(recording.array(name))[step], chosen[0])


def test_only_what_was_chosen_is_computed(monkeypatch):
    seen, own = [], call.attention_statistics

    def spy(scores, names, **options):
        seen.append((scores.chosen, scores.shape[0]))
        return own(scores, names, **options)

    monkeypatch.setattr(call, "attention_statistics", spy)
    model = four_layers()
    names, options = ("received", "row_entropy"), {"layers": (1, 2), "heads": 1}
    with trace(model, names, steps={1}, **options) as recording:
        for _ in range(3):
            model(IDS)
            recording.mark()
    assert seen == [((1,), len(IDS))] * 2


@pytest.mark.parametrize(
    "choice, message",
    [
        ({"layers": (0, 4)}, r"layers are numbered 0 … 3 in the order they run .*, got 4"),
        (
            {"layers": "block.1"},
            r"called 'block\.1' among the 4 that ran: did you mean 'blocks\.1'",
        ),
        ({"heads": (0, 2)}, r"blocks\.0 has the query heads 0 … 1 \(or −1 … −2\), got 2"),
        ({"maps": [(0, 0, 7)]}, r"query heads 0 … 1 .*, got 7"),
        ({"maps": [(1, 2)]}, r"triples of numbers \(step, layer, head\), got \(1, 2\)"),
        ({"layers": ()}, r"layers names at least one, got none: leave it out"),
        ({"steps": 3}, r"steps is a container of step numbers .*, got 3"),
    ],
)
def test_a_wrong_choice_is_refused_by_name(choice, message):
    model = four_layers()
    plain = model(IDS)
    with refusing(message), trace(model, **choice):
        model(IDS)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert torch.equal(plain, model(IDS))


@pytest.mark.parametrize("marked, steps", [(False, {1, 4}), (True, range(0, 6, 2))])
def test_steps_by_marks_or_by_forwards(marked, steps):
    model = HandWritten()
    texts = [(IDS + 3 * step) % 30 for step in range(6)]
    with trace(model, NAMES) as full, trace(model, NAMES, steps=steps) as recording:
        for step, ids in enumerate(texts):
            model(ids)
            if marked:
                # guidance: a second forward, which is not part of the recording
                model(29 - ids)
                recording.mark(f"step {step}")
                full.mark(step)
    expected = sorted(steps)
    assert recording.steps == ([f"step {number}" for number in expected] if marked else expected)
    assert recording.forwards_per_step == ([2] * len(expected) if marked else [])
    for name in NAMES:
        assert torch.equal(
            torch.from_numpy(recording.array(name)), torch.from_numpy(full.array(name))[expected]
        )
    assert recording.array("visible").shape[0] == len(expected) == len(recording.columns)


def test_no_step_that_was_chosen_ran():
    model = HandWritten()
    with trace(model, steps=(7,)) as recording:
        model(IDS)
    assert recording.received == []
    assert recording.layers == ["blocks.0", "blocks.1"]
    refused("1 steps ran, and steps=", recording.array, "received")


def test_maps_are_those_of_eager_attention():
    model = llama(causal=True)
    places = [(0, 0, 3), (1, 1, 0), (1, -1, 2), (0, -2, 3)]
    # neither layers, heads nor steps keep a map from being taken
    with (
        torch.no_grad(),
        trace(model, layers=(0,), heads=(1,), steps=(5,), maps=places) as recording,
    ):
        for ids in (IDS, IDS + 1):
            model(ids, attention_mask=PADDED)
            model(ids + 2, attention_mask=PADDED)
            recording.mark()
    model.set_attn_implementation("eager")
    with torch.no_grad():
        eager = [
            model(ids, attention_mask=PADDED, output_attentions=True).attentions
            for ids in (IDS, IDS + 1)
        ]
    assert set(recording.maps) == set(places)
    seen_BQ = PADDED.bool()
    for step, layer, head in places:
        found = recording.map(step, layer, head)
        assert found.dtype == torch.float32 and found.shape == (2, 12, 12)
        assert_close(found[seen_BQ], eager[step][layer][:, head][seen_BQ], rtol=1e-4, atol=1e-6)


def test_a_map_that_never_came_is_refused_with_those_there_are():
    model = HandWritten()
    with trace(model, maps=[(0, 0, 1), (9, 0, 1)]) as recording:
        model(IDS)
    assert recording.map(0, 0, 1).shape == (2, 12, 12)
    refused("step 9, layer 0, head 1 was", recording.map, 9, 0, 1)
    refused(r"there are \[\(0, 0, 1\)\]", recording.map, 0, 1, 0)
