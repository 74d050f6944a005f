"""The study of SmolLM2 at toy size: longer stages go on from adapters, and blocked or kept keys are
what they claim.
"""

import numpy as np
import pytest
import torch

from launched import script
from sinklab.lab.checkpoints.adapters import read_adapters
from sinklab.lab.records.reading import open_run
from sinklab.lab.training import recipe, train
from sinklab.lab.training.checkpoints import whole_checkpoints
from tiny_diffusion import tiny_loaded, tiny_model
from tiny_training import tiny_settings, uneven_documents

for part in ("measures", "costs", "contrasts", "report", "runs"):
    script(f"studies/smollm2_{part}")
study, measures, costs, contrasts, runs = (
    script(f"studies/smollm2_{name}")
    for name in ("diffusion", "measures", "costs", "contrasts", "runs")
)


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """The study with a tiny parent, text of seconds, and stages of 2 and 2 steps."""
    corpus = uneven_documents(tmp_path)
    out = tmp_path / "parent"
    tiny = {
        "length": 16,
        "heldout_rows": 4,
        "lora_rank": 2,
        "save_every": 1,
        "log_every": 1,
    }
    parent = tiny_settings(
        corpus, heads=4, steps=2, heldout_rows=4, objective="autoregressive", out=str(out)
    )
    monkeypatch.setattr(study, "BASE", str(train(parent)))
    books = tmp_path / "books"
    books.mkdir()
    for name in (
        "valid.jsonl",
        *(name.removesuffix(".gz") for files in study.FILES.values() for name in files),
    ):
        (books / name).write_bytes(corpus.read_bytes())
    changed = {
        "FILES": {True: ("train-00.jsonl",), False: ("train-02.jsonl", "train-03.jsonl")},
        "BOOKS": books,
        "RUNS": tmp_path / "runs",
        "RESULTS": tmp_path / "results",
        "SIBLINGS": {"iii": study.SIBLINGS["iii"]},
        "SEEDS": (0,),
        "CURVE": ("iii-0",),
        "FIRST": 2,
        "LONGER": ((2, 4),),
        "POINTS": (1, 2, 3, 4),
    }
    for name, value in changed.items():
        monkeypatch.setattr(study, name, value)

    def shrunk(name, **fields):
        fields["heldout"] = fields["heldout"].removesuffix(".gz")
        return recipe(name, **(fields | tiny))

    monkeypatch.setattr(study, "recipe", shrunk)
    return tmp_path


@pytest.mark.slow
def test_a_longer_stage_goes_on_from_the_adapters_and_resumes(toy, monkeypatch):
    whole = study.train

    def interrupted(settings, **how):
        def stop(text):
            how["progress"](text)
            if settings.adapters and whole_checkpoints(toy / "runs/iii-0-4/checkpoints"):
                raise KeyboardInterrupt

        return whole(settings, **(how | {"progress": stop}))

    monkeypatch.setattr(study, "train", interrupted)
    with pytest.raises(KeyboardInterrupt):
        study.train_all()
    monkeypatch.setattr(study, "train", whole)
    (one,) = whole_checkpoints(toy / "runs/iii-0-4/checkpoints")
    assert one.name == "checkpoint-1"
    assert study.adapters_of("iii-0", 3).is_file()
    study.train_all()
    files = sorted((toy / "results" / "adapters").glob("*.safetensors"))
    assert [file.stem for file in files] == ["iii-0-1", "iii-0-2", "iii-0-3", "iii-0-4"]
    tokens = [read_adapters(file)[0].tokens for file in files]
    assert tokens == [64, 128, 192, 256]
    told = open_run(toy / "runs" / "iii-0-4").info
    assert told.status == "complete" and told.settings["lr"] == 1e-3
    assert told.settings["adapters"].endswith("iii-0-2.safetensors")
    assert told.model["adapters"]["tokens"] == 128


def test_the_order_is_the_registered_one():
    names = [stage.folder.name for stage in study.stages()]
    assert names[:6] == ["iii-0", "i-0", "iv-0", "ii-0", "v-0", "iii-1"]
    assert names[-4:] == ["iii-0-3000", "iv-0-3000", "iii-0-10000", "iv-0-10000"]
    assert [stage.points for stage in study.stages()][:2] == [[100, 300, 500], [500]]


@pytest.fixture
def texts():
    return torch.randint(5, 200, (3, 128), generator=torch.Generator().manual_seed(0))


def test_kept_rows_of_a_causal_model_are_those_of_a_late_block(texts):
    model = tiny_model(context=128, logit_shift=True)
    mask_id = model.config.mask_token_id
    anew = costs.block_costs(model, texts, "causal", mask_id)
    kept = costs.kept_costs(model, texts, "causal", mask_id, anew)["loss"]
    assert kept["none"] == pytest.approx(anew["none"], abs=1e-4)
    # never for its own query: where the blocked key is a late one, its own row differs
    early = [
        all(key < costs.LATE for (key,) in rows)
        for rows in zip(*anew["keys"]["1"]["blocked"], strict=True)
    ]
    assert any(early)
    for row in (row for row, is_early in enumerate(early) if is_early):
        assert kept["blocked"][row] == pytest.approx(
            anew["keys"]["1"]["loss"]["late"][row], abs=1e-4
        )
    assert model.config.attention == "full"


@pytest.mark.slow
def test_a_model_that_sees_both_sides_reads_other_rows_anew(texts):
    model = tiny_model(context=128, logit_shift=True)
    anew = costs.block_costs(model, texts[:1], "full", model.config.mask_token_id)
    kept = costs.kept_costs(model, texts[:1], "full", model.config.mask_token_id, anew)["loss"]
    assert kept["none"] != pytest.approx(anew["none"], abs=1e-4)
    one = anew["keys"]["25 %"]
    assert one["removed"] >= costs.REMOVED or one["k"] == 32
    assert len(one["blocked"]) == len(costs.TARGETS)


def test_random_keys_have_the_state_and_age_of_those_they_stand_for():
    for row in range(20):
        places = costs.alike(torch.tensor([0, 3, 40, 100, -1]), 62, 128, row).tolist()
        assert len({*places, 0, 3, 40, 100}) == 9
        assert [place < 32 for place in places] == [True, True, False, False, True]
        assert places[2] < 62 <= places[3]
    # the last position has none beside it
    assert costs.alike(torch.tensor([127]), 127, 128, 0).tolist() != [127]


def test_an_added_token_can_be_blocked_and_has_values(texts):
    model = tiny_model(1, context=130, logit_shift=True)
    with torch.no_grad():
        model.sink_embeddings.mul_(40)
    sink = torch.full((3, 1), -1)
    clean = costs.losses(model, texts, texts, None, (40,))[0]
    late = costs.losses(model, texts, texts, None, (40,), sink, 32)[0]
    last = costs.losses(model, texts, texts, None, (40,), sink, 127)[0]
    assert (clean - late).abs().max() > 1e-5
    assert (last - late).abs().max() > 1e-5
    seen = measures.added_sink(model, texts, layer=2)
    own = measures.weights_of(model, texts)[..., 0].mean((1, 2))
    assert seen["alone"]["share"] == pytest.approx(own.tolist(), abs=1e-5)
    assert seen["all"]["share"] != pytest.approx(own.tolist(), abs=1e-5)


def test_hidden_end_tokens_change_nothing(texts):
    model = tiny_model(context=128, logit_shift=True)
    told = measures.starts(model, texts[:, :64], "full", model.config.mask_token_id, 1, 2)
    assert told["end hidden"]["loss"] == pytest.approx(told["as it is"]["loss"], abs=1e-5)
    assert told["end hidden"]["strongest"] == pytest.approx(told["as it is"]["strongest"], abs=1e-5)
    assert told["end seen"]["loss"] != pytest.approx(told["as it is"]["loss"], abs=1e-5)
    assert told["end hidden"]["moved"] == 0


def test_intervals_over_texts_and_seeds_cover():
    rng, inside = np.random.default_rng(1), 0
    for _ in range(500):
        values_ST = rng.normal(0, 0.3, (3, 1)) + rng.normal(0, 1, 40) + rng.normal(0, 1, (3, 40))
        one = contrasts.crossed(values_ST)
        inside += one.low <= 0 <= one.high
    assert inside > 460


def test_motion_is_that_of_the_strongest_keys_by_the_words_of_the_package(texts, monkeypatch):
    monkeypatch.setattr(runs, "NEW", 4)
    monkeypatch.setattr(runs, "PROMPT", 8)
    loaded = tiny_loaded(1, context=130, logit_shift=True)
    with torch.no_grad():
        loaded.model.sink_embeddings.mul_(40)
    told = runs.motion(loaded, texts[:2])
    assert len(told["mobility"]) == len(told["strong_heads"]) == 2
    assert (told["word"], told["reading"]) == ("inconclusive", "steps")
    # the same canvas twice
    monkeypatch.setattr(runs, "REDRAWN", (0.0,))
    same = runs.redrawn(loaded.model, texts[:2], "full", loaded.model.config.mask_token_id)["0.0"]
    assert all(value == 0 or np.isnan(value) for value in same)


@pytest.mark.slow
def test_a_table_and_a_figure_are_made_of_what_there_is(tmp_path, capsys):
    found = study.results()
    assert {"parent", "lifted", "iii-0-500"} <= set(found)
    study.report(found, tmp_path)
    text = capsys.readouterr().out
    assert "3 Is seeing only itself the cause? | yes" in text
    assert "5 Does the added token become the sink? | not measured" in text or "iv-0-500" in found
    assert (tmp_path / "strength.png").stat().st_size > 1000


@pytest.mark.slow
def test_the_sibling_of_the_next_token_is_the_same_model_in_both_forms(toy, monkeypatch):
    monkeypatch.setattr(study, "SIBLINGS", {"i": {"objective": "autoregressive"}})
    monkeypatch.setattr(study, "CURVE", ())
    study.train_all()
    point = next(one for one in study.points() if one.name == "i-0-2")
    assert point.is_autoregressive
    ids_BS = torch.randint(5, 200, (2, 24), generator=torch.Generator().manual_seed(0))
    seen_SS = measures.sight_of(point.attention, 24)
    with torch.inference_mode():
        shifted_BSV = point.load().model.eval()(ids_BS, visible=seen_SS).logits
        plain_BSV = point.as_trained().model.eval()(ids_BS).logits
    # [MASK] has a row more
    rows = plain_BSV.shape[-1]
    torch.testing.assert_close(shifted_BSV[:, 1:, :rows], plain_BSV[:, :-1])
