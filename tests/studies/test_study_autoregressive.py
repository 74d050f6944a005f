"""Autoregressive models on the same footing: one step is one new token, and all queries so far are
read.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

import sinklab
from refusals import refused
from sinklab.lab.checkpoints import SpecialIds
from sinklab.lab.scoring import encode
from sinklab.lab.studies.trace.study import StudySettings, study
from small_runs import traced
from tiny_diffusion import beginning_tokenizer
from tiny_llama import tiny_llama

PROMPT = "The old man sat"
QUICK = StudySettings(prompts=(PROMPT,), new_tokens=5, statistics=("all",))


def eager_maps(loaded, ids):
    """The attention (L, H, S, S) over this text, as transformers computes it outright."""
    loaded.model.set_attn_implementation("eager")
    with torch.no_grad():
        maps = loaded.model(torch.tensor([ids]), output_attentions=True).attentions
    loaded.model.set_attn_implementation("sdpa")
    return torch.cat(maps).numpy()


def arrays_of(run):
    arrays = run.arrays("attention", sample=0)
    return {key: array.astype(np.float32) for key, array in arrays.items()}


def check_sums(arrays, step, maps_LHQS):
    """Recorded is the attention of all queries so far, and nothing behind the text."""
    received_LHK, keys = arrays["received"][step], maps_LHQS.shape[-1]
    assert np.allclose(received_LHK[..., :keys], maps_LHQS.sum(-2), rtol=2e-3, atol=2e-3)
    assert np.isnan(received_LHK[..., keys:]).all()
    assert arrays["visible"][step][:keys].tolist() == [*range(keys, 0, -1)]


def written(run):
    return run.table("generations")["token_ids"][0].tolist()


@pytest.fixture(scope="module")
def cached(tmp_path_factory):
    return traced(tiny_llama(), tmp_path_factory.mktemp("runs") / "cached", QUICK)


def test_each_step_records_all_queries_so_far(cached):
    loaded, run = tiny_llama(), cached
    prompt = loaded.tokenizer(PROMPT)["input_ids"]
    text = [*prompt, *written(run)]
    with torch.no_grad():
        greedy = loaded.model.generate(
            torch.tensor([prompt]), max_new_tokens=5, do_sample=False, pad_token_id=0
        )
    assert text == greedy[0].tolist()

    arrays, start = arrays_of(run), len(prompt)
    assert arrays["positions"].tolist() == [start + step for step in range(5)]
    for step in range(5):
        maps_LHQS = eager_maps(loaded, text[: start + step])
        check_sums(arrays, step, maps_LHQS)
        last_LHK = maps_LHQS[:, :, -1]
        # the state of queries is that of the one that runs
        state = 2 if step == 0 else 1
        others = [*{0, 1, 2} - {state}]
        assert np.isnan(arrays["row_entropy"][step][others]).all()
        entropy_LH = -(last_LHK * np.log(last_LHK)).sum(-1)
        assert np.allclose(arrays["row_entropy"][step][state], entropy_LH, atol=3e-3)

    windows_WLHK = arrays["window_received"]
    assert windows_WLHK.shape == (maps_LHQS.shape[-1] // 8, 2, 4, start + 4)
    for window, found_LHK in enumerate(windows_WLHK):
        first = 8 * window
        expected_LHK = maps_LHQS[:, :, first : first + 8].mean(-2)[..., : first + 1]
        assert np.allclose(found_LHK[..., : first + 1], expected_LHK, atol=1e-3)
        assert np.isnan(found_LHK[..., first + 1 :]).all()


def test_a_full_forward_records_column_sums(cached, tmp_path):
    loaded = tiny_llama()
    full = traced(loaded, tmp_path / "full", replace(QUICK, full_forward=True))
    text = [*loaded.tokenizer(PROMPT)["input_ids"], *written(full)]
    assert written(full) == written(cached)
    arrays, start = arrays_of(full), len(text) - 5
    for step in (0, 3):
        keys = start + step
        maps_LHQS = eager_maps(loaded, text[:keys])
        check_sums(arrays, step, maps_LHQS)
        prompt_LHK = maps_LHQS[:, :, :start].sum(-2)
        assert np.allclose(
            arrays["received_by_state"][step][2][..., :keys], prompt_LHK, rtol=2e-3, atol=2e-3
        )


def test_an_empty_prompt_begins_with_the_beginning_of_text(tmp_path):
    empty = replace(QUICK, prompts=("",), new_tokens=1)
    tokens = traced(tiny_llama(), tmp_path / "run", empty).table("tokens")
    assert (tokens["token_id"][0], tokens["special"][0]) == (7, "bos")
    nothing = replace(tiny_llama(), special=SpecialIds())
    refused("but the prompt is empty", study, nothing, tmp_path / "none", empty)


def test_a_prompt_begins_as_the_tokenizer_begins_a_text():
    loaded, tokenizer = tiny_llama(), beginning_tokenizer()
    begun, plain = replace(loaded, tokenizer=tokenizer), encode(loaded, PROMPT).ids
    assert encode(begun, PROMPT).ids == (tokenizer.bos_token_id, *plain)
    assert encode(replace(begun, family="diffusion"), PROMPT).ids == plain


def test_sinks_are_hidden_from_the_last_token(tmp_path):
    loaded = tiny_llama()
    edits = ("block_keys:keys=top:k=2,scores=last_row",)
    run = traced(loaded, tmp_path / "run", replace(QUICK, statistics=(), edits=edits))
    received = np.nan_to_num(run.array("attention", "received", sample=0).astype(np.float32))
    rows = np.diff(received, axis=0)
    removals = run.table("removals")
    assert removals["keys"].tolist() == [2] * (4 * 2 * 4)
    for row in removals.itertuples():
        # what was hidden from the row of this step added nothing to what all rows so far gave
        assert (rows[row.forward - 1, row.layer, row.head][list(row.key_list)] == 0).all()


def test_a_text_that_ends_before_an_edit_acts_is_recorded_as_such(tmp_path):
    loaded = tiny_llama()
    plain = replace(
        QUICK,
        statistics=(),
        edits=("block_keys:keys=positions:positions=0,when=now,steps=2+none",),
    )
    whole = traced(loaded, tmp_path / "whole", plain).table("generations")
    assert whole["idle"].tolist() == [""]
    ending = replace(plain, stop_ids=(int(whole["token_ids"][0][0]),))
    short = traced(loaded, tmp_path / "short", ending)
    texts = short.table("generations")
    assert (texts["steps"].tolist(), texts["idle"].tolist()) == ([1], ["block_keys"])
    assert len(short.table("removals")) == 0


@pytest.mark.slow
def test_a_clean_pass_reads_its_own_past(tmp_path):
    loaded = tiny_llama()
    spec = "block_keys:keys=top:k=2,when=clean,scores=last_row"
    run, full = (
        traced(
            loaded,
            tmp_path / f"run-{full}",
            replace(QUICK, statistics=(), edits=(spec,), full_forward=full),
        )
        for full in (False, True)
    )
    removals = run.table("removals")
    prompt = len(loaded.tokenizer(PROMPT)["input_ids"])
    lengths = np.isfinite(
        run.array("attention", "received", sample=0)[:, 0, 0].astype(np.float32)
    ).sum(-1)
    assert lengths.tolist() == [prompt + step for step in range(5)], (
        "the clean pass left nothing in the cache"
    )
    cached, whole = (table[table["forward"] == 0] for table in (removals, full.table("removals")))
    assert cached["key_list"].map(sorted).equals(whole["key_list"].map(sorted))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"rule": "random", "cache": "dual"},
            "rule, cache can be set for diffusion models only; leave it out",
        ),
        ({"new_tokens": 61}, "fit the model's context of 64 positions, got"),
        (
            {"edits": ("block_keys:keys=random:like=top:k=5",)},
            "is to block 10 of the .* keys of 'The old man sat' at the first step",
        ),
    ],
)
def test_what_an_autoregressive_model_cannot_do_is_refused(tmp_path, change, message):
    refused(message, lambda: study(tiny_llama(), tmp_path / "run", replace(QUICK, **change)))
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_text_of_too_few_queries_still_has_a_page(tmp_path):
    run = sinklab.load("tiny-causal").watch("The house", new_tokens=4)
    assert "no key was seen by enough queries" in str(run.summary())
    assert "Not measured: no key was seen" in run.explore(tmp_path).path.read_text("utf-8")
