"""What the explorer page holds: numbers survive 8 bits, and a large run fits its budget."""

import base64
import json
import zlib

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from simulated import REMOVALS, received_of, simulate, uneven

from sinklab.core.registry import interventions
from sinklab.lab import analysis
from sinklab.lab.records import open_run
from sinklab.lab.reports import as_studies
from sinklab.lab.reports.payload import AGES, BUDGET, LEVELS, LOW, LogScale, arrays_of, payload
from sinklab.lab.studies.trace.study import StudySettings, study
from tiny_diffusion import tiny_loaded


def decode(scale, codes):
    """The numbers again: NaN where absent, 0 below the scale."""
    table = np.full(256, 2.0**scale.high)
    table[0], table[1] = np.nan, 0
    table[2:] = 2 ** np.linspace(scale.low, scale.high, LEVELS)
    return table[codes]


def unpack(packed):
    """What ``pack`` was given, flat."""
    content = zlib.decompress(base64.b64decode(packed["data"]))
    kind = np.dtype(f"<u{packed['bytes']}")
    values = np.frombuffer(content, dtype=kind).copy()
    if row := packed["delta"]:
        padded = np.zeros(-(-values.size // row) * row, dtype=kind)
        padded[: values.size] = values
        values = np.add.accumulate(padded.reshape(-1, row), axis=0, dtype=kind).ravel()[
            : values.size
        ]
    return values


def codes(packed, shape):
    return unpack(packed).reshape(shape)


def scale_of(content, name="scale"):
    return LogScale(content[name]["low"], content[name]["high"])


def test_a_log_scale_keeps_numbers_within_its_error():
    values = np.concatenate([[np.nan, 0.0, 2.0**-7], np.geomspace(2.0**-6, 500, 4000)]).astype(
        np.float32
    )
    scale = LogScale.covering(values, LOW)
    assert (scale.low, scale.high) == (-6, 9)
    back = decode(scale, scale.encode(values))
    assert np.isnan(back[0]) and (back[1:3] == 0).all()
    relative = np.abs(back[3:] / values[3:] - 1)
    # The error that the page states is reached, and not exceeded.
    assert 0.9 * scale.error < relative.max() <= scale.error * 1.001
    assert scale.error == pytest.approx(2 ** (15 / 253 / 2) - 1)


def test_a_small_run_is_on_the_page_whole(tmp_path):
    study = as_studies(simulate(tmp_path / "run", added=1, change=uneven))[0]
    content = arrays_of(study)
    assert len(content["samples"]) == 2
    assert content["shown"].startswith(
        "2 of 2 samples, every recorded step, every key of every recorded head. Rec"
    )
    error = max(shown["norm_scale"]["error"] for shown in content["samples"])
    assert f"; norms within {100 * error:.1f} %." in content["shown"]
    for shown, sample in zip(content["samples"], study.samples, strict=True):
        arrays, scale = shown["arrays"], scale_of(shown)
        received = received_of(sample)
        steps, layers, of_layer, keys = received.shape
        heads = decode(scale, codes(arrays["heads"], (layers, of_layer, steps, keys)))
        heads = heads.transpose(2, 0, 1, 3)
        assert_allclose(heads, received, rtol=scale.error * 1.01, atol=2.0**LOW)
        mean = decode(scale, codes(arrays["mean"], (1 + layers, steps, keys))).transpose(1, 0, 2)
        assert_allclose(mean[:, 0], received.mean((1, 2)), rtol=scale.error * 1.01, atol=2.0**LOW)
        assert_allclose(mean[:, 1:], received.mean(2), rtol=scale.error * 1.01, atol=2.0**LOW)
        main = codes(arrays["main"], (layers, of_layer, steps)).astype(int).transpose(2, 0, 1) - 1
        assert_array_equal(main, sample.facts["main"])
        norms, norm_scale = (
            codes(arrays["norms"], (layers, steps, keys)),
            scale_of(shown, "norm_scale"),
        )
        decoded = decode(norm_scale, norms).transpose(1, 0, 2)
        assert_allclose(decoded, sample.stored("value_norm"), rtol=norm_scale.error * 1.01)
        assert_array_equal(unpack(arrays["visible"]), np.full(steps, 24))
        assert shown["steps"] == list(range(steps)) and shown["blocks"] == sample.blocks_T.tolist()


def test_tokens_of_every_step_are_on_the_page(tmp_path):
    study = as_studies(simulate(tmp_path / "run"))[0]
    content, sample = arrays_of(study), study.samples[0]
    arrays = content["samples"][0]["arrays"]
    rows = codes(arrays["tokens"], (12, 24)).astype(int) - 1
    tokens = np.array([content["vocabulary"][row] for row in rows.ravel()], dtype=object).reshape(
        12, 24, 4
    )
    assert_array_equal(tokens[..., 0].astype(int), sample.grid["token_id"])
    assert_array_equal(tokens[..., 1], sample.grid["text"])
    assert_array_equal(tokens[..., 2], sample.classes_TS)
    ages = np.array(["", *AGES], dtype=object)[codes(arrays["ages"], (12, 24))]
    assert_array_equal(ages, sample.ages_TS)
    assert analysis.AGES == AGES and set(ages.ravel()) == set(AGES)


def test_a_decoder_that_grows_leaves_later_keys_absent(tmp_path):
    study = as_studies(simulate(tmp_path / "run", family="autoregressive"))[0]
    shown, sample = arrays_of(study)["samples"][0], study.samples[0]
    mean = codes(shown["arrays"]["mean"], (3, *sample.exists_TK.shape))
    assert_array_equal(mean == 0, np.broadcast_to(~sample.exists_TK, mean.shape))
    assert (
        codes(shown["arrays"]["ages"], sample.exists_TK.shape) > 0
    ).tolist() == sample.exists_TK.tolist()
    assert_array_equal(unpack(shown["arrays"]["visible"]), sample.positions_T)


def test_within_a_small_budget_what_is_above_a_floor_remains_of_every_head(tmp_path):
    study = as_studies(
        simulate(tmp_path / "run", steps=16, layers=4, heads=6, text=80, change=uneven)
    )[0]
    content, received = arrays_of(study, budget=16_000), received_of(study.samples[0])
    shown, whole = content["samples"][0], arrays_of(study)["samples"][0]
    floor = shown["floor"]
    assert whole["floor"] == 0 and f"and those above {floor:.2g}× of each head" in content["shown"]
    there, all_there = (
        decode(scale_of(one), codes(one["arrays"]["heads"], (4, 6, 16, 80))).transpose(2, 0, 1, 3)
        for one in (shown, whole)
    )
    assert 0.01 < (there > 0).mean() < 0.5
    assert_array_equal(there, np.where(received > floor, all_there, 0))
    assert_allclose(all_there, received, rtol=scale_of(whole).error * 1.01, atol=2.0**LOW)
    assert len(json.dumps(content["samples"])) < 16_000 * 1.1


def test_samples_beyond_the_budget_are_left_out_and_said_so(tmp_path):
    study = as_studies(simulate(tmp_path / "run", samples=8, change=uneven))[0]
    content = arrays_of(study, budget=16_000)
    assert 1 <= len(content["samples"]) < 8
    assert (
        content["shown"].startswith(f"{len(content['samples'])} of 8 samples")
        or len(content["samples"]) == 1
    )
    assert [shown["index"] for shown in content["samples"]] == list(range(len(content["samples"])))
    # The first sample is there however small the budget is.
    assert len(arrays_of(study, budget=10)["samples"]) == 1
    # So it is where many keys hold the greatest share of all: a floor above it leaves none.
    even = as_studies(simulate(tmp_path / "even", samples=2, layers=3, heads=8))[0]
    assert arrays_of(even, budget=1_000)["samples"][0]["floor"] > 1


def test_long_samples_are_thinned_to_every_nth_step(tmp_path, monkeypatch):
    monkeypatch.setattr("sinklab.lab.reports.payload.MOST_CELLS", 400)
    study = as_studies(simulate(tmp_path / "run"))[0]
    content, sample = arrays_of(study), study.samples[0]
    shown = content["samples"][0]
    assert (
        shown["stride"] == 3
        and shown["steps"] == [0, 3, 6, 9]
        and "one recorded step in 3" in content["shown"]
    )
    main = codes(shown["arrays"]["main"], (2, 3, 4)).astype(int).transpose(2, 0, 1) - 1
    assert_array_equal(main, sample.facts["main"][::3])


def test_runs_without_tokens_or_norms_or_any_step(make_study):
    bare = make_study("bare", leave_out=("tokens", "value_norm", "key_norm"))
    content = payload(as_studies(bare))["runs"][0]
    shown = content["samples"][0]
    assert (
        content["vocabulary"] == [] and "norms" not in shown["arrays"] and "norm_scale" not in shown
    )
    assert (codes(shown["arrays"]["ages"], (12, 24)) == 1 + AGES.index("committed")).all()
    nothing = make_study("nothing", leave_out=("attention",))
    content = payload(as_studies(nothing))["runs"][0]
    assert (
        content["samples"] == []
        and content["layers"] == []
        and content["shown"] == "No attention was recorded."
    )


def test_keys_of_causal_runs_are_shown_by_their_mean_weight(make_study):
    def causal(sample, arrays):
        seen = np.arange(24, 0, -1.0)
        arrays["visible"][:] = seen
        arrays["received"] *= seen / 24

    # what every key received was scaled with the queries that see it, so that the mean weights are
    # those of a canvas
    plain, study = (
        as_studies(make_study(name, change=change))[0]
        for name, change in (("a", lambda *of: None), ("b", causal))
    )
    shown, whole = (arrays_of(one)["samples"][0] for one in (study, plain))
    assert_array_equal(codes(shown["arrays"]["visible"], (12,)), [24] * 12)
    mean = [codes(one["arrays"]["mean"], (3, 12, 24)) for one in (shown, whole)]
    assert_array_equal(mean[0][..., :17], mean[1][..., :17])
    # fewer than eight queries see the last seven
    assert (mean[0][..., 17:] == 0).all() and (mean[1][..., 17:] > 0).all()


@pytest.mark.slow
def test_an_8b_run_fits_three_megabytes(tmp_path):
    """Half of its steps fit half of them."""
    run = simulate(tmp_path / "run", layers=32, heads=32, text=512, samples=1, change=uneven)
    study = as_studies(run)[0]
    content = arrays_of(study, BUDGET // 2)
    shown = content["samples"][0]
    assert shown["stride"] == 1 and 0.5 < shown["floor"] < 40
    assert set(shown["arrays"]) >= {"mean", "main", "norms", "tokens", "ages"}
    assert len(json.dumps(content)) < 1_450_000


def hidden_of(content, layers, heads):
    """Whether each key was blocked, (layer, head, step, key), as the page is told."""
    shape = (layers, heads, len(content["steps"]), content["blocked"])
    numbers = unpack(content["arrays"]["blocked"]).reshape(shape).astype(int)
    return (numbers[..., None] == 1 + np.arange(content["keys"])).any(-2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sink", "settings"),
    [
        (0, {"edits": ("block_keys:keys=top:k=2",)}),
        (
            2,
            {
                "edits": (
                    "block_keys:keys=top:k=2,layers=1",
                    "block_keys:keys=positions:positions=3,heads=0+2,when=now,steps=2+4",
                )
            },
        ),
        (1, {"edits": ("block_keys:keys=top:k=1",), "cfg_scale": 1.0, "every": 2}),
        (0, {"edits": ("block_keys:keys=top:k=1,when=clean",), "layers": (1,), "heads": (0, 3)}),
    ],
)
def test_the_keys_that_are_hatched_are_those_that_received_nothing(tmp_path, sink, settings):
    settings = {"statistics": ("received",), "twin": False} | settings
    settings |= {"edits": tuple(map(interventions.parse, settings["edits"]))}
    settings = StudySettings(prompts=("The old café 😀", "The"), new_tokens=8, steps=8, **settings)
    (run,) = as_studies(open_run(study(tiny_loaded(sink), tmp_path / "run", settings)))
    for sample, content in enumerate(arrays_of(run)["samples"]):
        received_TLHK = run.run.arrays("attention", sample)["received"]
        hidden_LHTK = hidden_of(content, len(run.layers), len(run.heads))
        assert hidden_LHTK.any() and not hidden_LHTK.all()
        assert_array_equal(hidden_LHTK, received_TLHK.transpose(1, 2, 0, 3) == 0)


def test_bytes_of_one_character_are_read_as_that_and_named_by_themselves(tmp_path):
    settings = StudySettings(
        prompts=("a café 😀",), new_tokens=2, steps=2, statistics=("received",)
    )
    (run,) = as_studies(open_run(study(tiny_loaded(), tmp_path / "run", settings)))
    named = run.sample(0).labels_TK[0].tolist()
    assert named[named.index("<0xC3>") :][:2] == ["<0xC3>", "<0xA9>"] and "\ufffd" not in "".join(
        named
    )
    read = [text for _, text, kind, _ in arrays_of(run)["vocabulary"] if kind == "words"]
    assert {"é", "😀", "◌"} <= {*read} and not any("<0x" in text for text in read)
    assert {"<0xC3>", "<0xF0>"} <= {*run.measured.enriched["token"].label}


def test_keys_that_were_hidden_are_left_out_where_they_do_not_fit_and_that_is_said(tmp_path):
    (run,) = as_studies(
        simulate(tmp_path / "run", heads=8, samples=1, change=uneven, whole={"removals": REMOVALS})
    )
    (whole,), (small,) = arrays_of(run)["samples"], arrays_of(run, 1_000)["samples"]
    assert_array_equal(
        np.argwhere(hidden_of(whole, 2, 8)), [[1, 2, 4, 5], [1, 2, 4, 7], [1, 2, 5, 7]]
    )
    assert "blocked" not in small and "blocked" not in small["arrays"]
    assert "no marks of blocked keys." in arrays_of(run, 1_000)["shown"]
    assert "blocked" not in arrays_of(run)["shown"]
