"""What `sinklab.load` returns answers by itself."""

import gc
from html import escape

import numpy as np
import pytest
import torch

import sinklab
from pictures import no_pictures as no_pictures
from refusals import refused
from sinklab.core.instrument import intervene
from sinklab.core.sinks import DEFAULT, find_sinks
from sinklab.core.subject import Canvas, denoise
from sinklab.lab.analysis.rules import Top
from sinklab.lab.checkpoints import Loaded
from sinklab.lab.measures import MaskSinks
from sinklab.lab.records import open_run
from sinklab.lab.scoring import LikelihoodSettings, rolling
from sinklab.lab.short_road import LM
from sinklab.lab.studies.trace.study import StudySettings, study
from tiny_diffusion import TEXT, save_tiny, tiny_loaded, tiny_tokenizer
from tiny_llama import tiny_llama


def test_a_loaded_model_tells_what_hiding_the_keys_of_one_head_costs(tmp_path):
    lm = sinklab.load(save_tiny(tmp_path / "model"))
    assert isinstance(lm, Loaded)
    ids = lm.tokenizer(TEXT)["input_ids"]
    edits = [MaskSinks(k=1, layers=[1], heads=[3])]
    clean, edited = lm.loss(TEXT), lm.loss(TEXT, edits=edits)
    assert abs(edited - clean) > 1e-4
    assert edited == pytest.approx(lm.loss(ids, edits=["block_keys:keys=top:k=1,layers=1,heads=3"]))
    for loss, some in ((clean, ()), (edited, edits)):
        scored = rolling(lm, ids, LikelihoodSettings(samples=32), edits=some)
        assert loss == pytest.approx(-scored.logprob / len(ids))
    assert lm.loss(TEXT, seed=1) != pytest.approx(clean, rel=1e-6)
    assert str(edited.scored.dose).startswith("1.00 keys a head")
    assert clean.scored.dose is None


@pytest.mark.parametrize("name", ["tiny", "tiny-causal"])
def test_an_empty_text_costs_nothing_that_could_be_said(name):
    """Its tokenizer makes a beginning of text of it, which is given and not what a text costs."""
    refused("text to score must have", sinklab.load(name).loss, "")


def test_no_masks_are_filled_by_a_model_that_has_none():
    refused("and tiny-causal has none", sinklab.load("tiny-causal").generate, "The sea", 0)


def test_it_writes_as_its_kind_writes(tmp_path):
    lm = sinklab.load(save_tiny(tmp_path / "model", context=96))
    ids = torch.tensor([lm.tokenizer("The old")["input_ids"]])
    how = {"rule": "entropy", "temperature": 1.0, "seed": 3}
    assert lm.generate("The old", 5, **how) == lm.tokenizer.decode(
        lm.model.generate(ids, max_new_tokens=5, **how)[0], skip_special_tokens=True
    )
    assert len(lm.tokenizer(lm.generate(ids[0].tolist(), seed=0))["input_ids"]) > 40
    filled = lm.generate("The <|mask|> sea", 0)
    assert filled.startswith("The ") and filled.endswith(" sea") and "mask" not in filled
    refused("no known chat format", lm.generate, "The old", chat=True)
    refused("2 texts", lm.generate, ["The old", "sea"])
    with pytest.raises(TypeError, match="generate has no option 'heat'"):
        lm.generate("The old", heat=1)
    causal = LM(**vars(tiny_llama()))
    with torch.no_grad():
        best = causal.model(ids).logits[0, -1].argmax().item()
    assert causal.generate(ids[0].tolist(), 1, do_sample=False) == causal.tokenizer.decode(
        [*ids[0].tolist(), best]
    )


@pytest.mark.slow
def test_what_cannot_be_scored_is_refused(tmp_path):
    lm = sinklab.load(save_tiny(tmp_path / "model"))
    refused("at least one token", lm.loss, [])
    refused("intervention must be one of .*'mask_sink'", lm.loss, TEXT, edits=["mask_sink:k=1"])
    refused(
        "a text is scored in one step",
        lm.loss,
        TEXT,
        edits=["block_keys:keys=positions:positions=2+3,when=now,steps=3+none"],
    )
    refused("got 5", lm.watch, [5], 2)
    refused("model is .*model", sinklab.load, tmp_path)
    with torch.autocast("cpu", torch.bfloat16):
        assert lm.watch("The old", 2).to_xarray()["received"].dtype == np.float16


def short(sink=0):
    return LM(**vars(tiny_loaded(sink)))


@pytest.fixture(scope="module")
def run():
    """Two samples of unequal length, with an added sink."""
    return short(1).watch(["The old", "The old man sat"], 8, block_length=4)


AXES = ("step", "layer", "head", "position")


def arrays(run, sample):
    found = run.arrays("attention", sample)
    return (
        found["received"].astype(np.float32),
        found["visible"][:, None, None],
        found["positions"][:, None, None],
    )


@pytest.mark.slow
def test_a_watched_run_is_the_run_of_a_study_and_goes_with_its_object_unless_it_is_saved(tmp_path):
    lm = short()
    run = lm.watch("The old", 4, edits=["block_keys:keys=top:k=1"], progress=(said := []).append)
    settings = StudySettings(prompts=("The old",), new_tokens=4, edits=("block_keys:keys=top:k=1",))
    twin = open_run(study(lm, tmp_path / "twin", settings))
    assert (run.info.settings, run.tables, said != []) == (twin.info.settings, twin.tables, True)
    for name, array in twin.arrays("attention", 0).items():
        assert np.array_equal(run.array("attention", name, 0), array, equal_nan=True)
    row = twin.table("generations").iloc[0]
    assert run.texts == [row["prompt"] + row["completion"]]
    saved, folder = run.save(tmp_path / "saved"), run.path
    refused("saved", run.save, tmp_path / "saved")
    assert folder.is_dir() and type(saved) is type(run) is type(sinklab.open_run(tmp_path / "twin"))
    run.mobility()  # keeps what it read
    del run
    gc.collect()
    assert not folder.parent.exists()
    assert saved.table("tokens").equals(twin.table("tokens"))


def test_a_run_that_fails_leaves_no_folder(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    refused("rolling", short().watch, "The old", 4, statistics=("rolling",))
    refused("field 'every_step'", short().watch, "The old", 4, every_step=2)
    refused("fit", short().watch, TEXT * 9, 4)
    assert [*tmp_path.iterdir()] == []


@pytest.mark.slow
@pytest.mark.parametrize("rule", [None, "top:k=2"])
def test_its_sinks_are_those_that_the_arrays_hold(run, rule):
    ruled = run if rule is None else run.with_rule(rule)
    table, every = ruled.sinks(), ruled.to_pandas()
    assert set(table["sample"]) == {0, 1} and len(table) < len(every)
    texts = {"token": str, "state": str}
    same = every[every["sink"]].drop(columns="sink").reset_index(drop=True)
    assert table.astype(texts).equals(same.astype(texts))
    for sample, rows in every.groupby("sample"):
        received_TLHK, visible, positions = arrays(run, sample)
        sinks_TLHK = find_sinks(received_TLHK, Top(2) if rule else DEFAULT, visible, positions)
        at = tuple(rows.assign(position=rows["position"] + 1)[[*AXES]].to_numpy().T)
        assert len(rows) == sinks_TLHK.size and (rows["sink"] == sinks_TLHK[at]).all()
        assert np.allclose(rows["received"], received_TLHK[at])
        # the weights of a head add up to 1: every query gives that much
        assert np.allclose(rows.groupby(["step", "layer", "head"])["weight"].sum(), 1, atol=2e-3)
        main = rows[rows["main"]].set_index(["step", "layer", "head"])["position"] + 1
        assert (main.to_numpy().reshape(sinks_TLHK.shape[:-1]) == received_TLHK.argmax(-1)).all()
    tokens = run.table("tokens").set_index(["sample", "step", "position"])
    some = every[every["position"] >= 0].sample(200, random_state=0)
    kept = tokens.loc[[*zip(some["sample"], some["step"], some["position"], strict=True)]]
    shown = np.where(kept["state"] == "masked", "[MASK]", kept["text"])
    assert (some["token"].astype(str).to_numpy() == shown).all()
    assert set(every.loc[every["position"] == -1, "token"]) == {"added sink"}


def test_text_stands_for_a_rule(run, tmp_path):
    for use in (run.with_rule, lambda rule: sinklab.report(run, tmp_path / "other", rule=rule)):
        refused("did you mean 'excess'", use, "exces:epsilon=5")


@pytest.mark.slow
def test_text_stands_for_an_edit():
    lm, edit, text = short(), MaskSinks(k=1), "block_keys:keys=top:k=1"
    assert lm.loss(TEXT, edits=text) == lm.loss(TEXT, edits=[edit])
    with intervene(lm, f"{text},when=now") as log:
        lm.model(torch.arange(20, 28)[None])
    assert log.removals[0].edit == MaskSinks(k=1, when="now")
    assert lm.watch("The old", 4, edits=[text]).info.settings["edits"] == [text]
    for use in (
        lambda text: lm.loss(TEXT, edits=[text]),
        lambda text: intervene(lm, text).__enter__(),
    ):
        refused("did you mean 'block_keys'", use, "block_key:keys=top:k=1")


@pytest.mark.slow
@pytest.mark.usefixtures("no_pictures")
def test_a_run_of_one_step_has_a_page_and_says_that_nothing_moves():
    run = short().watch("The old", 1)
    assert "Nothing to follow" in run.explore().path.read_text("utf-8")


def test_arrays_come_with_their_labels(run):
    refused(r"samples \[0, 1\]; choose one", run.to_xarray)
    data = run.to_xarray(sample=1)
    rows = run.table("tokens", 1)
    last = rows[(rows["step"] == 7) & (rows["state"] != "masked")]
    here = data["received"].sel(step=7, layer=1, head=2)
    assert [here["token"].values[place + 1] for place in last["position"]] == last["text"].tolist()
    assert (
        here["position"].values.tolist() == [*range(-1, len(here) - 1)]
        and here["token"].values[0] == "added sink"
    )
    assert np.array_equal(here, run.array("attention", "received", 1)[7, 1, 2])


@pytest.mark.slow
def test_figures_are_found_by_name_and_show_themselves(run):
    for drawn in (run.plot.sink_paths(), run.plot.received_map(layer=1)):
        assert drawn._repr_png_().startswith(b"\x89PNG")
    assert "received_map" in dir(run.plot) and "position" in run.plot.received_map.__doc__
    with pytest.raises(AttributeError, match=r"'recieved_map'; .*did you mean"):
        _ = run.plot.recieved_map


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.slow
def test_a_notebook_shows_a_run_in_a_frame_of_another_origin(run):
    shown = run._repr_html_()
    assert len(shown.encode()) <= 300_000
    assert shown.count("<iframe") == 1 and '<iframe sandbox="allow-scripts" srcdoc=' in shown
    assert "allow-same-origin" not in shown and escape(run.texts[0]) in shown
    again = sinklab.open_run(run.path)
    page = again.explore()
    folder = page.path.parent
    assert page.path.as_uri() in repr(page) and "<iframe sandbox" in page._repr_html_()
    del again
    gc.collect()
    assert not folder.exists()


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.slow
def test_what_is_shown_of_objects_is_short(run):
    lm, canvas = short(1), padded()
    assert "diffusion, 2 layers × 4 heads" in repr(lm) and "sink_kind=token" in lm._repr_html_()
    assert "in memory until .save(folder)" in repr(run) and "tiny test model, complete" in repr(run)
    with intervene(lm, MaskSinks(k=1)) as log:
        *_, step = denoise(lm, canvas)
    some = (run, run.explore(), lm, LM(**vars(tiny_llama())), tiny_loaded(), canvas, step, log)
    shown = [*map(repr, some), repr(log.removals[0])]
    assert [text for text in shown if len(text) > 300 or "tensor" in text] == []


def padded():
    prompts = [
        tiny_tokenizer()(text)["input_ids"] for text in ("The old", "The old man sat by the")
    ]
    return Canvas.from_prompts(
        prompts, new_tokens=6, mask_id=tiny_tokenizer().mask_token_id, pad_id=0
    )


def test_the_core_takes_the_loaded_model_and_its_padding():
    lm, canvas = short(), padded()
    with sinklab.trace(lm) as recording, intervene(lm, MaskSinks(k=1)) as log:
        for step in denoise(lm, canvas):
            recording.mark(step)
    with sinklab.trace(lm.model) as twin, intervene(lm.model, MaskSinks(k=1)):
        for same in denoise(lm.model.denoiser(canvas.attention_BS), canvas):
            twin.mark(same)
    assert torch.equal(step.ids_BS, same.ids_BS) and log.removals
    assert np.array_equal(recording.array("received"), twin.array("received"), equal_nan=True)


@pytest.mark.parametrize(
    "of", [lambda lm: lm.model.denoiser(), lambda lm: lm.model.denoiser(plain=True)]
)
def test_padding_is_never_forgotten_in_silence(of):
    refused(r"denoise\(model, canvas\)", denoise, of(short()), padded())
    refused("model that fills masks, got LM", denoise, LM(**vars(tiny_llama())), padded())


@pytest.mark.slow
def test_a_small_model_runs_on_one_thread_unless_the_environment_says_how_many(monkeypatch):
    lm = LM(**vars(tiny_loaded()))
    seen = []

    def note(_):
        seen.append(torch.get_num_threads())

    def runs():
        lm.compare({"top": "block_keys:keys=top:k=1"}, [[5, 6, 7]], samples=1, progress=note)
        lm.watch("a", 1, progress=note)
        assert torch.get_num_threads() == 2
        return {seen.pop() for _ in range(len(seen))}

    torch.set_num_threads(2)
    try:
        assert runs() == {2}
        monkeypatch.delenv("OMP_NUM_THREADS")
        assert 1 in runs()
        monkeypatch.setattr("sinklab.lab.checkpoints.loading.SMALL", 0)
        assert runs() == {2}
    finally:
        torch.set_num_threads(1)
