"""What a study records of a diffusion model, against attention written out in full."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import sinklab
from pictures import no_pictures as no_pictures
from refusals import refused
from sinklab.core.instrument import trace
from sinklab.core.subject import Canvas
from sinklab.lab.records.info import FAST, OWN
from sinklab.lab.reports import report
from sinklab.lab.reports.runs import as_shown
from sinklab.lab.scoring import encode
from sinklab.lab.studies.trace.study import StudySettings
from small_runs import traced
from tiny_diffusion import MASK, tiny_loaded, tiny_tokenizer
from tiny_llama import tiny_llama

QUICK = StudySettings(
    prompts=("The old man",), new_tokens=8, steps=4, block_length=4, statistics=("all",)
)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return traced(tiny_loaded(1), tmp_path_factory.mktemp("runs") / "plain", QUICK)


class Dense:
    """Every attention map of one forward over these ids, softmax written out in float64."""

    def __init__(self, loaded, ids):
        self.maps_LHQS = []
        self.norms_LHQ = []
        whole = F.scaled_dot_product_attention

        def written_out(query, key, value, *args, **kwargs):
            out = whole(query, key, value, *args, **kwargs)
            if query.shape[-2] == len(ids):
                groups = query.shape[1] // key.shape[1]
                scores = query.double() @ key.double().repeat_interleave(groups, 1).transpose(
                    -1, -2
                )
                self.maps_LHQS.append((scores / query.shape[-1] ** 0.5).softmax(-1)[0])
                self.norms_LHQ.append(out[0].norm(dim=-1))
            return out

        with pytest.MonkeyPatch.context() as patch, torch.no_grad():
            patch.setattr(F, "scaled_dot_product_attention", written_out)
            loaded.model(torch.tensor([ids]))

    @property
    def map_LHQS(self):
        return torch.stack(self.maps_LHQS).numpy()


def step_of(run, step):
    """Ids and states (0, 1, 2) before a step."""
    tokens = run.table("tokens")
    tokens = tokens[tokens["step"] == step]
    states = tokens["state"].map({"masked": 0, "committed": 1, "prompt": 2}).to_numpy()
    return tokens["token_id"].tolist(), states


def test_what_each_state_gives_is_what_the_dense_maps_say():
    loaded = tiny_loaded(2, logit_shift=True)
    run = traced(loaded, "run", QUICK)
    arrays = {
        key: array.astype(np.float32) for key, array in run.arrays("attention", sample=0).items()
    }
    for step in (0, 2):
        ids, state_S = step_of(run, step)
        dense = Dense(loaded, ids)
        map_LHQS = dense.map_LHQS
        predicted_S = np.append(state_S[1:], state_S[-1])
        for state in range(3):
            mine = predicted_S == state
            if not mine.any():
                assert np.isnan(arrays["row_entropy"][step][state]).all()
                continue
            column_LHK = map_LHQS[:, :, mine].sum(-2)
            assert np.allclose(
                arrays["received_by_state"][step][state], column_LHK, rtol=2e-3, atol=2e-3
            )
            rows_LHQ = map_LHQS[:, :, mine]
            entropy_LH = -(rows_LHQ * np.log(rows_LHQ)).sum(-1).mean(-1)
            assert np.allclose(arrays["row_entropy"][step][state], entropy_LH, rtol=2e-3, atol=2e-3)
            norms_LH = torch.stack(dense.norms_LHQ)[:, :, mine].mean(-1).numpy()
            assert np.allclose(arrays["output_norm"][step][state], norms_LH, rtol=2e-3)


def test_layers_heads_and_steps_can_be_chosen(plain):
    loaded = tiny_loaded(1)
    some = replace(QUICK, layers=(-1,), heads=(3, 1), every=2, maps=("3:0:2", "0:-1:1"))
    part = traced(loaded, "some", some)
    assert (part.info.model["recorded_layers"], part.info.model["recorded_heads"]) == ([1], [1, 3])
    assert plain.table("generations").equals(part.table("generations"))
    # a step whose map is kept is recorded too
    steps = part.array("attention", "step_number", sample=0)
    assert steps.tolist() == [0, 2, 3]
    assert part.table("tokens")["step"].unique().tolist() == [0, 2, 3]
    queries = part.table("steps")["queries"]
    assert queries.isna().tolist() == [False, True, False, False]
    for name, axis in {"received": 1, "row_entropy": 2, "received_by_state": 2}.items():
        whole = plain.array("attention", name, sample=0)[steps]
        chosen = part.array("attention", name, sample=0)
        np.testing.assert_array_equal(chosen, whole.take([1], axis).take([1, 3], axis + 1), name)
    assert part.array("attention", "value_norm", sample=0).shape[:2] == (3, 1)

    maps = part.arrays("maps", sample=0)
    assert sorted(maps) == ["step0-layer1-head1", "step3-layer0-head2"]
    ids, _ = step_of(part, 3)
    assert np.allclose(maps["step3-layer0-head2"], Dense(loaded, ids).map_LHQS[0, 2], atol=1e-3)


def test_under_a_cache_the_queries_that_ran_are_known():
    loaded = tiny_loaded(1)
    run = traced(loaded, "run", replace(QUICK, cache="dual"))
    prompt = len(loaded.tokenizer(QUICK.prompts[0])["input_ids"])
    assert run.table("steps")["queries"].tolist() == [prompt + 8, 4, prompt + 8, 4]
    arrays = run.arrays("attention", sample=0)
    assert arrays["positions"].tolist() == [prompt + 8] * 4
    assert np.allclose(arrays["received"].astype(float).sum(-1)[1], 4, atol=0.01)
    # a block alone holds no prompt
    assert np.isnan(arrays["row_entropy"][1][2]).all()
    assert np.isfinite(arrays["row_entropy"][1][:2]).all()


@pytest.mark.parametrize("cache", [None, "dual"])
def test_drift_is_that_of_one_trace_over_all_steps(tmp_path, cache):
    loaded = tiny_loaded(1)
    settings = replace(QUICK, statistics=("drift",), cache=cache, new_tokens=4)
    drift = traced(loaded, tmp_path / "run", settings).arrays("attention", sample=0)["drift"]
    ids = encode(loaded, "The old man").ids
    canvas = Canvas.from_prompts([ids], new_tokens=4, mask_id=MASK)
    with trace(loaded.model, ("drift",)) as recording:
        for step in loaded.model.denoise(canvas, settings):
            recording.mark(step.index)
    assert np.isnan(drift[0]).all() and np.isfinite(drift[1:]).all() and (drift[1:] > 0).any()
    np.testing.assert_allclose(drift, recording.array("drift")[:, 0], rtol=1e-2, atol=1e-6)


def test_a_checkpoint_without_tokenizer_is_watched_in_ids():
    loaded = replace(tiny_loaded(), tokenizer=None)
    run = traced(loaded, "run", replace(QUICK, prompts=("5 17 3",), statistics=()))
    tokens = run.table("tokens")
    assert tokens["text"][:3].tolist() == ["⟨5⟩", "⟨17⟩", "⟨3⟩"]
    assert tokens["special"][3] == "mask"
    row = run.table("generations").iloc[0]
    assert row.completion == "".join(f" {one}" for one in row.token_ids), (
        "behind the ids of the prompt"
    )
    assert row.prompt == "5 17 3"


def test_a_chat_is_marked_as_template():
    tokenizer = copy.deepcopy(tiny_tokenizer())
    tokenizer.chat_template = "old: {% for m in messages %}{{ m['content'] }}{% endfor %}; said"
    loaded = replace(tiny_loaded(), tokenizer=tokenizer)
    settings = replace(QUICK, chat=True, prompts=("The sea",), statistics=())
    run = traced(loaded, "run", settings)
    prompt = encode(loaded, "The sea", chat=True)
    first = run.table("tokens").query("step == 0")
    assert first["template"].tolist() == [*prompt.template, *[False] * 8]
    assert first["token_id"][: len(prompt.ids)].tolist() == [*prompt.ids]


@pytest.mark.parametrize(("sink", "layers"), [(2, ()), (1, (1,))])
def test_massive_activations_are_told_with_sinks_at_their_positions(sink, layers):
    """Against loops over the arrays."""
    names = ("massive_activations", "received_from_masked")
    settings = replace(QUICK, new_tokens=12, statistics=names, layers=layers)
    run = traced(tiny_loaded(sink), "run", settings)
    arrays = {
        name: array.astype(np.float64) for name, array in run.arrays("attention", sample=0).items()
    }
    recorded = list(layers) or [0, 1]
    massive = run.table("massive_activations")
    assert len(massive) == 4 * len(recorded) * 3 and "massive_activations" not in arrays
    for step in range(4):
        ids, state_S = step_of(run, step)
        received_LHS = arrays["received"][step][..., sink:]
        sinks_LHS = received_LHS > 1 + 3 * (len(ids) - 1) / len(ids)
        for layer in recorded:
            rows = massive[(massive["step"] == step) & (massive["layer"] == layer)]
            for row in rows.itertuples():
                position = int(row.position)
                assert row.state == ("masked", "committed", "prompt")[state_S[position]]
                assert row.sink_heads == pytest.approx(sinks_LHS[..., position].mean())
                assert row.sink_heads_any == pytest.approx(sinks_LHS.mean())
                expected = sinks_LHS[1, :, position].mean() if not layers and layer == 0 else np.nan
                assert row.sink_heads_next == pytest.approx(expected, nan_ok=True)
    few = np.isnan(arrays["received_from_masked"])
    assert few.any() and not few.all(), "fewer than 8 masked queries"


def test_clipped_channels_are_a_table(plain):
    edit = "clip_channel:channels=3,limit=0.25,layers=0"
    edited = replace(QUICK, edits=(edit,), statistics=())
    run = traced(tiny_loaded(), "run", edited)
    clipped = run.table("clipped")
    assert (
        len(clipped) == 4 and (clipped["after"] <= 0.25).all() and (clipped["before"] > 0.25).any()
    )
    assert clipped["forward"].tolist() == [0, 1, 2, 3] and set(clipped["edit"]) == {"clip_channel"}
    assert run.table("removals").empty
    assert "clipped" not in plain.tables


@pytest.mark.slow
@pytest.mark.ring("extras")
def test_a_run_says_whose_forward_it_measured(plain, tmp_path):
    loaded = tiny_loaded(1)
    exact = traced(loaded, tmp_path / "exact", replace(QUICK, exact=True))
    some = replace(QUICK, edits=("block_keys:keys=top:k=1",), statistics=())
    edited = traced(loaded, tmp_path / "edited", some)
    forwards = [run.info.model["forward"] for run in (plain, exact, edited)]
    assert forwards == [FAST, OWN, OWN]
    assert plain.table("tokens").equals(exact.table("tokens"))
    ours, theirs = (run.arrays("attention", sample=0) for run in (plain, exact))
    assert ours.keys() == theirs.keys()
    for name, one in ours.items():
        # stored as float16
        np.testing.assert_allclose(one, theirs[name], rtol=2e-3, atol=1e-4, err_msg=name)
    denoiser = loaded.model.denoiser()
    with trace(loaded.model) as recording:
        ids, _ = step_of(exact, 0)
        denoiser(torch.tensor([ids]), torch.tensor([ids]) == MASK)
    own_LHK = recording.received[0][0].numpy().astype(np.float16)
    assert np.array_equal(theirs["received"][0].astype(np.float16), own_LHK)


@pytest.mark.parametrize("how", ["full", "cached", "causal"])
def test_facts_of_a_recording_are_those_of_its_arrays_bit_for_bit(how):
    loaded, settings = tiny_loaded(2), replace(QUICK, twin=False)
    if how == "cached":
        settings = replace(settings, cache="prefix", block_length=4)
    if how == "causal":
        loaded = tiny_llama()
        settings = replace(settings, steps=None, block_length=StudySettings().block_length)
    run = traced(loaded, "run", settings)
    study = as_shown(run)[0]
    for sample in study.samples:
        written, derived = sample.facts, sample.derived()
        assert len(written) >= 30
        for name in written:
            np.testing.assert_array_equal(written[name], derived[name], err_msg=name)
        table = run.table("facts", sample=sample.index)
        narrow = derived["share"].astype(np.float16).ravel()
        np.testing.assert_array_equal(table["share"], narrow)
        assert (table["position"] == table["key"] - sample.added).all()
        at = table.iloc[-1]
        assert at["token"] == sample.labels_TK[-1, at["key"]]
        assert [at["layer"], at["head"]] == [study.layers[-1], study.heads[-1]]


@pytest.mark.slow
def test_a_run_without_arrays_has_its_facts_and_no_other_rule(tmp_path):
    how = replace(QUICK, new_tokens=12)
    whole, bare = (
        sinklab.open_run(
            traced(tiny_loaded(2), tmp_path / str(keep), replace(how, keep_arrays=keep)).path
        )
        for keep in (True, False)
    )
    assert "attention" not in bare.array_files and "attention" in whole.array_files
    assert whole.read.measured.motions.equals(bare.read.measured.motions)
    assert whole.summary().table.equals(bare.summary().table)
    refused("keep_arrays", bare.with_rule, "excess:epsilon=5")
    refused("keep_arrays", bare.sinks)
    assert len(whole.with_rule("excess:epsilon=5").sinks()) < len(whole.sinks())
    assert report(bare, tmp_path / "page", tables=False).stat().st_size > 10_000
