from dataclasses import replace

import pytest
import torch

from refusals import refused
from sinklab.lab.studies.trace.study import StudySettings, study
from small_runs import traced
from tiny_diffusion import TEXT, tiny_loaded

PROMPTS = ("The old man", "")
SETTINGS = StudySettings(prompts=PROMPTS, new_tokens=10, steps=5, block_length=5)


def test_a_study_says_what_it_wrote_and_how(tmp_path):
    """Columns and numbers of its files are those of tests/frozen/files.py."""
    loaded, said = tiny_loaded(2, gate="elementwise"), []
    run = traced(loaded, tmp_path / "run", SETTINGS, progress=said.append)
    about = run.info.model
    assert (about["gate"], about["sink_count"], about["sink_side"]) == ("elementwise", 2, "front")
    assert said == [
        "writing sample 1 of 2",
        "writing sample 2 of 2",
        "a control (shuffled weights) reads some of the canvases",
    ]
    prompt = len(loaded.tokenizer(PROMPTS[0])["input_ids"])
    assert run.array("attention", "received", 1).shape == (5, 2, 4, 2 + 10)
    assert run.table("steps", 0).drop(columns="sample").to_dict("list") == {
        "step": [0, 1, 2, 3, 4],
        "block": [0, 0, 0, 1, 1],
        "masked": [10, 8, 6, 5, 2],
        "committed": [2, 2, 1, 3, 2],
        "queries": [prompt + 10] * 5,
    }
    for row in run.table("generations").itertuples():
        assert row.completion == loaded.tokenizer.decode(row.token_ids, skip_special_tokens=True)


def test_each_sample_has_a_seed_of_its_own(tmp_path):
    how = {"steps": 5, "block_length": 5, "temperature": 1.0}
    warm = StudySettings(prompts=("The sea",) * 2, new_tokens=10, statistics=(), seed=None, **how)
    loaded = tiny_loaded()
    run = traced(loaded, tmp_path / "run", warm)
    texts = run.table("generations")
    assert texts["completion"].nunique() == 2
    assert run.info.settings["seed"] == run.info.seed, "the seed that was drawn is written down"
    batch = torch.tensor(loaded.tokenizer(["The sea"])["input_ids"])
    again = loaded.model.generate(batch, max_new_tokens=10, seed=int(texts["seed"][1]), **how)
    assert texts["token_ids"][1].tolist() == again[0, batch.shape[1] :].tolist()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompts": ()}, "at least one prompt; an empty string is allowed"),
        ({"prompts": (TEXT * 5,)}, r"fit the model's context of 63 positions"),
        ({"prompts": ("The <|mask|> man",)}, "must not contain the mask id"),
        ({"steps": 11}, "steps must not exceed the open positions"),
        (
            {"edits": ("block_keys:keys=top:k=40",)},
            "fewer than all keys, but is to block 40 of the .* keys of 'The old man' with 10 new",
        ),
        ({"layers": (0, 2)}, "layers must be numbers from 0 to 1, -1 for the last, but 2 is not"),
        ({"heads": (-5,)}, "heads must be numbers from 0 to 3, -1 for the last, but -5 is not"),
        ({"maps": ("0:2:0",)}, "the layer of maps must be numbers from 0 to 1"),
        ({"maps": ("0:0:4",)}, "the head of maps must be numbers from 0 to 3"),
        ({"maps": ("10:0:0",)}, "maps are recorded of steps 0 to 9, but 10:0:0 names step 10"),
        ({"edits": ("block_key:keys=top:k=1",)}, "did you mean 'block_keys'"),
        ({"cache": "dual", "every": 2, "twin": True}, "controls follow a cache"),
        ({"full_forward": True}, "full_forward is a choice for autoregressive models"),
        ({"chat": True}, "no known chat format"),
        (
            {"edits": ("block_keys:keys=top:k=1,when=clean",), "cache": "dual"},
            "would overwrite what cache=dual remembers",
        ),
    ],
)
def test_bad_settings_are_refused_before_a_folder_is_taken(tmp_path, change, message):
    refused(message, lambda: study(tiny_loaded(1), tmp_path / "run", replace(SETTINGS, **change)))
    assert not (tmp_path / "run").exists()


def test_models_that_do_not_fit_are_refused(tmp_path):
    maskless, mute = tiny_loaded(mask_token_id=None), replace(tiny_loaded(), tokenizer=None)
    refused("has mask_token_id None", study, maskless, tmp_path / "run", SETTINGS)
    refused("token ids such as '5 17 3'", study, mute, tmp_path / "run", SETTINGS)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"statistics": ("key_norms",)},
            "statistic must be .*'key_norms'; did you mean 'key_norm'",
        ),
        ({"maps": ("3:5",)}, "maps are written step:layer:head, such as 3:5:2, got '3:5'"),
        ({"maps": ((3, 5, 2),)}, r"such as 3:5:2, got \(3, 5, 2\)"),
    ],
)
def test_settings_that_fit_no_model_are_refused_as_they_are_made(change, message):
    refused(message, StudySettings, **change)


def test_a_statistic_with_options_has_the_label_of_the_trace():
    chosen = StudySettings(statistics=("drift:of=value", "drift:of=key"))
    assert chosen.statistics == ("received", "drift:of=value", "drift")
    refused("'off'; did you mean 'of'", StudySettings, statistics=("drift:off=key",))


def test_all_statistics_and_received_always():
    assert StudySettings(statistics=("all",)).statistics[-1] == "received_by_state"
    assert StudySettings(statistics=("key_norm",)).statistics == ("received", "key_norm")
