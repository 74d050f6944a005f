from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from sinklab.evaluation import StudySettings, observation, study
from sinklab.probing import trace
from sinklab.records import open_run
from tiny_diffusion import TEXT, tiny_loaded

PROMPTS = ("The old man", "")


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> StudySettings:
    corpus = tmp_path_factory.mktemp("heldout") / "text.txt"
    corpus.write_text(TEXT * 20)
    return StudySettings(
        prompts=PROMPTS,
        new_tokens=10,
        steps=5,
        block_length=5,
        mask_sinks=(1, 2),
        ks=(0, 2),
        heldout=str(corpus),
        heldout_rows=4,
        heldout_length=16,
    )


@pytest.mark.parametrize("sink", [0, 2])
def test_a_study_writes_what_the_report_reads(settings: StudySettings, tmp_path: Path, sink: int) -> None:
    loaded = tiny_loaded(sink, gate="elementwise")
    said: list[str] = []
    assert study(loaded, tmp_path / "run", settings, progress=said.append) == tmp_path / "run"
    run = open_run(tmp_path / "run")
    assert (run.info.kind, run.info.status, run.info.seed) == ("study", "complete", 0)
    model = run.info.model
    assert (model["name"], model["family"], model["layers"], model["heads"]) == ("tiny test model", "diffusion", 2, 4)
    assert (model["sink_kind"], model["sink_count"], model["sink_side"]) == ("token" if sink else "none", sink, "front")
    assert (model["gate"], model["parameters"]) == ("elementwise", loaded.model.num_parameters())
    assert len(model["weights_sha256"]) == 64
    assert run.info.settings["prompts"] == list(PROMPTS)
    assert [text.split()[0] for text in said] == ["writing", "writing", "writing", "writing", "scoring"]

    prompt = len(loaded.tokenizer(PROMPTS[0])["input_ids"])
    keys = sink + prompt + 10
    arrays = run.arrays("attention")
    assert arrays["received"].shape == (2, 5, 2, 4, keys)
    assert arrays["visible"].shape == (2, 5, keys)
    assert arrays["value_norm"].shape == (2, 5, 2, keys)
    assert run.dims("attention")["received"] == ("sample", "step", "layer", "head", "key")
    assert np.isfinite(arrays["received"][0]).all()
    # the second sample has no prompt: its keys end earlier
    assert np.isfinite(arrays["received"][1][..., : sink + 10]).all()
    assert np.isnan(arrays["received"][1][..., sink + 10 :]).all()
    assert (arrays["visible"][0] == prompt + 10).all()
    assert np.allclose(arrays["received"][0].astype(float).sum(-1), prompt + 10, rtol=2e-3)

    tokens = run.table("tokens")
    assert len(tokens) == 5 * (prompt + 10) + 5 * 10
    first = tokens[(tokens["sample"] == 0) & (tokens["step"] == 0)]
    assert first["state"].tolist() == ["prompt"] * prompt + ["masked"] * 10
    assert first["position"].tolist() == list(range(prompt + 10))
    assert (first["token_id"][first["state"] == "masked"] == loaded.tokenizer.mask_token_id).all()
    assert "".join(first["text"][first["state"] == "prompt"]) == PROMPTS[0]
    last = tokens[(tokens["sample"] == 1) & (tokens["step"] == 4)]
    assert last["state"].value_counts().to_dict() == {"committed": 8, "masked": 2}

    steps = run.table("steps")
    assert steps["sample"].tolist() == [0] * 5 + [1] * 5
    assert steps["masked"].tolist() == [10, 8, 6, 5, 2] * 2
    assert steps["committed"].tolist() == [2, 2, 1, 3, 2] * 2
    assert steps["block"].tolist() == [0, 0, 0, 1, 1] * 2
    generations = run.table("generations")
    assert generations["masked_sinks"].tolist() == [0, 0, 1, 1, 2, 2]
    assert generations["sample"].tolist() == [0, 1] * 3
    assert generations["completion"].nunique() > 2, "hidden sinks change what is written"
    heldout = run.table("heldout")
    assert heldout["control"].tolist() == ["none", "sinks", "random"]
    assert {"k", "control", "loss", "stderr", "tokens", "bits_per_byte"} <= set(heldout.columns)


def test_what_is_stored_is_what_a_trace_sees(settings: StudySettings, tmp_path: Path) -> None:
    loaded = tiny_loaded(1)
    study(loaded, tmp_path / "run", replace(settings, prompts=PROMPTS[:1], heldout="", mask_sinks=()))
    run = open_run(tmp_path / "run")
    assert run.tables == ("tokens", "steps", "generations")
    tokens = run.table("tokens")
    for step in (0, 3):
        ids = torch.tensor(tokens["token_id"][tokens["step"] == step].tolist())[None]
        with trace(loaded.model) as recording, torch.no_grad():
            loaded.model(ids)
        stored = run.arrays("attention")["received"][0, step].astype(np.float32)
        assert np.allclose(stored, recording.received[0][0].numpy(), rtol=2e-3, atol=1e-4)
    completion = run.table("generations")["completion"][0]
    batch = torch.tensor(loaded.tokenizer([PROMPTS[0]])["input_ids"])
    written = loaded.model.generate(batch, max_new_tokens=10, steps=5, block_length=5, seed=0)
    assert completion == loaded.tokenizer.decode(written[0, batch.shape[1] :], skip_special_tokens=True)


def test_the_seed_decides_what_is_written(settings: StudySettings, tmp_path: Path) -> None:
    warm = replace(settings, temperature=1.0, rule="random", heldout="", mask_sinks=())
    texts = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        study(tiny_loaded(), tmp_path / name, replace(warm, seed=seed))
        texts.append(open_run(tmp_path / name).table("generations")["completion"].tolist())
    assert texts[0] == texts[1]
    assert texts[0] != texts[2]


@pytest.mark.parametrize("name", ["_watch", "_write_masked"])
def test_an_interrupted_study_keeps_what_was_finished(
    settings: StudySettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    whole = getattr(observation, name)

    def breaking(loaded, prompt, sample, *rest):
        if sample == 1:
            raise KeyboardInterrupt
        return whole(loaded, prompt, sample, *rest)

    monkeypatch.setattr(observation, name, breaking)
    with pytest.raises(KeyboardInterrupt):
        study(tiny_loaded(), tmp_path / "run", settings)
    run = open_run(tmp_path / "run")
    assert (run.info.status, run.info.error) == ("interrupted", "KeyboardInterrupt")
    samples = 1 if name == "_watch" else 2
    assert run.arrays("attention")["received"].shape[0] == samples
    assert run.table("tokens")["sample"].nunique() == samples
    assert len(run.table("generations")) == (1 if name == "_watch" else 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompts": ()}, "at least one prompt; an empty string is allowed"),
        ({"prompts": (TEXT * 5,)}, r"fit the model's context of 63 positions"),
        ({"new_tokens": 64}, r"fit the model's context of 63 positions"),
        ({"prompts": ("The <|mask|> man",)}, "must not contain the mask id"),
        ({"new_tokens": 0}, "new_tokens must be at least 1, got 0"),
        ({"steps": 11}, "steps must not exceed the open positions"),
        ({"steps": 1}, "each block needs at least 1 step"),
        ({"rule": "low_confidense"}, "did you mean low_confidence"),
        ({"temperature": -1.0}, "temperature must be 0 or a positive"),
        ({"heldout": "nowhere"}, "nowhere does not exist"),
        ({"heldout_length": 100_000}, "heldout_length must be 1 to 63, the context of tiny test model, but is 100000"),
        ({"heldout_length": 0}, "heldout_length must be 1 to 63"),
        ({"heldout_rows": 0}, r"heldout_rows must be at least 1, but is 0; heldout=\"\" skips"),
        ({"ks": (0, 9)}, "9 does not fit 17 keys; choose 0 to 8"),
        ({"mask_sinks": (40,)}, "fewer than all keys, but asks for 40 of the .* keys of 'The old man' with 10 new"),
        ({"mask_sinks": (0,)}, "mask_sinks hides at least 1"),
    ],
)
def test_bad_settings_are_refused_before_a_folder_is_taken(
    settings: StudySettings, tmp_path: Path, change: dict, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        study(tiny_loaded(1), tmp_path / "run", replace(settings, **change))
    assert not (tmp_path / "run").exists()


def test_models_and_folders_that_do_not_fit_are_refused(settings: StudySettings, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="tiny test model is autoregressive; load a diffusion model such as 'tiny'"):
        study(tiny_loaded(family="autoregressive"), tmp_path / "run", settings)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"already holds notes.txt"):
        study(tiny_loaded(), tmp_path / "taken", settings)
    with pytest.raises(ValueError, match="a model with a mask token, but tiny test model has mask_token_id None"):
        study(tiny_loaded(mask_token_id=None), tmp_path / "maskless", settings)
    with pytest.raises(ValueError, match="tiny test model has no tokenizer"):
        study(replace(tiny_loaded(), tokenizer=None), tmp_path / "mute", settings)
    assert not (tmp_path / "maskless").exists()
