"""Numbers of another implementation, held against ours: what is planted is found where it was
planted.
"""

import json
import math
from pathlib import Path
from shutil import copytree

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

import published_toys
from golden import golden_cases, golden_folder, golden_tensors
from refusals import refused
from sinklab.core.sampling import DecodingSettings
from sinklab.extras.referee import Reference, write_reference
from sinklab.extras.referee.reference import verdict
from sinklab.lab.checkpoints import load
from sinklab.lab.cli import main
from tiny_diffusion import save_tiny, tiny_loaded

PROMPTS = ([9, 14, 30, 7, 21], [12, 8])
LAYERS = ["layer 0", "layer 1", "logits"]


def changed(folder, change):
    """Change the tensors of a folder."""
    change(tensors := load_file(folder / "expected.safetensors"))
    save_file(
        {name: one.contiguous() for name, one in tensors.items()}, folder / "expected.safetensors"
    )


def retold(folder, **told):
    """Change what is told of the cases."""
    before = json.loads((folder / "cases.json").read_text())
    (folder / "cases.json").write_text(json.dumps(before | told))


def held_to(folder):
    return Reference(folder).hold(tiny_loaded())


def arrays(change):
    return lambda folder: changed(folder, change)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    place = tmp_path_factory.mktemp("written")
    return write_reference(tiny_loaded(), place, PROMPTS, DecodingSettings(seed=0), 6)


@pytest.fixture
def folder(written, tmp_path):
    return Path(copytree(written, tmp_path / "reference"))


@pytest.mark.parametrize("sink", [0, 2])
def test_what_we_wrote_holds_to_the_last_bit(tmp_path, sink):
    """Also with an added sink, whose own pass through the layers is none of the text's."""
    loaded = tiny_loaded(sink)
    held = Reference(write_reference(loaded, tmp_path, PROMPTS, DecodingSettings(seed=0), 6)).hold(
        loaded, 0.0
    )
    assert [(one.case, one.what) for one in held] == [
        *(("start", what) for what in LAYERS),
        *(("half", what) for what in LAYERS),
        ("written", "canvas"),
    ]
    assert all(one.holds and one.difference == 0 for one in held)
    tensors = load_file(tmp_path / "expected.safetensors")
    assert tensors["gen.written.canvas"].shape == (7, 2, 11)
    assert tensors["logits.half.hidden.1"].shape == (2, 11, 32)


def test_what_is_written_is_what_the_model_computes(folder):
    model, tensors = tiny_loaded().model, load_file(folder / "expected.safetensors")
    ids_BS, real_BS = (
        tensors["logits.start.input_ids"].long(),
        tensors["logits.start.attention_mask"],
    )
    assert torch.equal(real_BS[1].bool(), torch.arange(11) >= 3)
    assert torch.equal(ids_BS, tensors["gen.written.canvas"][0].long())
    with torch.inference_mode():
        given = model.model.layers[0].register_forward_hook(lambda *call: kept.append(call[2]))
        kept = []
        logits_BSV = model(ids_BS, real_BS).logits
        given.remove()
        written = model.generate(ids_BS[:, :5], real_BS[:, :5], max_new_tokens=6)
    assert_close(tensors["logits.start.logits"], logits_BSV)
    assert_close(tensors["logits.start.hidden.0"], kept[0])
    assert torch.equal(tensors["gen.written.canvas"][-1].long(), written)


def test_a_difference_in_a_layer_is_found_there(folder):
    changed(folder, lambda tensors: tensors["logits.half.hidden.1"][0, 6, 3].add_(0.25))
    held = held_to(folder)
    wrong = [one for one in held if not one.holds]
    assert [(one.case, one.what) for one in wrong] == [("half", "layer 1")]
    assert wrong[0].difference == pytest.approx(0.25, abs=1e-6)
    ours_PD = load_file(folder / "expected.safetensors")["logits.half.hidden.1"]
    ours_PD[0, 6, 3] -= 0.25
    real_PD = torch.cat([ours_PD[0], ours_PD[1, 3:]])
    assert wrong[0].relative == pytest.approx(
        0.25 / float(ours_PD[0, 6, 3].abs() + real_PD.std()), rel=1e-4
    )
    assert all(
        one.holds
        for one in Reference(folder).hold(tiny_loaded(), tolerance=wrong[0].relative * 1.01)
    )


def test_padding_is_not_compared_and_a_flag_leaves_out_more(folder):
    changed(folder, lambda tensors: tensors["logits.start.logits"][1, :3].fill_(torch.nan))
    assert all(one.holds for one in held_to(folder))
    changed(folder, lambda tensors: tensors["logits.start.logits"][1, 5].fill_(torch.nan))
    assert [one.what for one in held_to(folder) if not one.holds] == ["logits"]
    valid_BS = torch.ones(2, 11, dtype=torch.bool)
    valid_BS[1, :6] = False
    changed(folder, lambda tensors: tensors.__setitem__("logits.start.valid", valid_BS))
    assert all(one.holds for one in held_to(folder))


def test_the_most_probable_token_is_counted(folder):
    def swap(tensors):
        logits_V = tensors["logits.start.logits"][0, 2]
        logits_V[(logits_V.argmax() + 1) % len(logits_V)] = logits_V.max() + 1

    changed(folder, swap)
    logits = next(one for one in held_to(folder) if one.what == "logits")
    assert logits.same_best == pytest.approx(18 / 19)
    assert "most probable token the same at 94.7%" in logits.line()


def test_a_token_that_is_barred_does_not_widen_the_tolerance(tmp_path):
    """SMDM has no logit of [MASK], which says nothing of how far other logits are spread."""
    published_toys.smdm(tmp_path / "model")
    loaded = load(str(tmp_path / "model"))
    folder = write_reference(loaded, tmp_path / "reference", PROMPTS, DecodingSettings(seed=0), 6)
    assert all(one.holds for one in Reference(folder).hold(loaded))
    changed(folder, lambda tensors: tensors["logits.start.logits"][0, 2, 7].add_(0.5))
    wrong = [one for one in Reference(folder).hold(loaded) if not one.holds]
    assert [(one.case, one.what) for one in wrong] == [("start", "logits")] and wrong[
        0
    ].relative > 0.01


@pytest.mark.parametrize("at", [1, 4])
def test_a_canvas_that_differs_is_found_at_its_evaluation(folder, at):
    tensors = load_file(folder / "expected.safetensors")
    before_BS, after_BS = tensors["gen.written.canvas"][at - 1 : at + 1].long()
    row, place = (before_BS != after_BS).nonzero()[0].tolist()
    right = int(after_BS[row, place])

    def other(tensors):
        tensors["gen.written.canvas"][at:, row, place] = right - 1

    changed(folder, other)
    held = held_to(folder)
    assert [one.what for one in held if not one.holds] == ["canvas"]
    canvas = held[-1]
    assert (canvas.difference, canvas.same_best) == (1.0, (at - 1) / 6)
    assert canvas.found.startswith(
        f"evaluation {at}: row {row}, position {place}: {right - 1}, ours {right} (our score "
    )
    assert math.isfinite(float(canvas.found.removesuffix(")").rpartition(" ")[2]))


@pytest.mark.parametrize("first", [0, 1])
def test_columns_that_are_not_there_yet_are_not_compared(folder, first):
    """An engine that grows its canvas block by block has no masks behind the first one yet."""
    changed(folder, lambda of: of["gen.written.canvas"][first:3, :, -2:].fill_(-1))
    assert all(one.holds for one in held_to(folder))


def canvases(kept):
    """The number of evaluations is told, but not all of their canvases are there."""
    name = "gen.written.canvas"
    return lambda folder: changed(folder, lambda of: of.update({name: of[name][:kept]}))


def more_evaluations(folder):
    told = json.loads((folder / "cases.json").read_text())["generate"][0]
    retold(folder, generate=[told | {"evaluations": 9}])


@pytest.mark.parametrize(
    "spoil, found",
    [
        (canvases(1), "0 canvases behind the first, ours 6"),
        (canvases(3), "2 canvases behind the first, ours 6"),
        (more_evaluations, "9 evaluations, ours 6"),
    ],
)
def test_canvases_and_evaluations_are_counted(folder, spoil, found):
    spoil(folder)
    held = held_to(folder)[-1]
    assert (held.holds, held.found) == (False, found)


def test_their_type_sets_the_tolerance(folder):
    changed(folder, lambda tensors: tensors["logits.start.hidden.0"].mul_(1.01))
    assert [one.holds for one in held_to(folder)[:2]] == [False, True]
    retold(folder, dtype="bfloat16")
    assert all(one.holds for one in held_to(folder))
    retold(folder, dtype="float8")
    refused("dtype of a reference 'float8'", Reference(folder).hold, tiny_loaded())
    assert all(one.holds for one in Reference(folder).hold(tiny_loaded(), 0.15))


@pytest.mark.parametrize(
    "spoil, message",
    [
        (
            lambda folder: (folder / "cases.json").unlink(),
            r"must hold cases\.json and expected\.safetensors",
        ),
        (
            lambda folder: (folder / "expected.safetensors").write_bytes(b"?"),
            r"must hold cases\.json and",
        ),
        (lambda folder: retold(folder, logits=[{}]), r"must hold cases\.json and .*KeyError"),
        (lambda folder: retold(folder, logits=[], generate=[]), "lists no cases"),
        (
            lambda folder: retold(folder, logits=[{"name": "end"}]),
            r"must hold 'logits\.end\.input_ids'",
        ),
        (
            arrays(
                lambda of: [of.pop(name) for name in [*of] if "half.h" in name or "half.l" in name]
            ),
            "the case 'half' of .* has neither logits nor hidden states",
        ),
        (
            arrays(lambda of: of.update({"logits.start.valid": torch.zeros(2, 11)})),
            r"logits\.start\.valid leaves no position to compare",
        ),
        (
            lambda folder: retold(
                folder, generate=[{"name": "written", "settings": {"gen_length": 6}}]
            ),
            "settings of 'written' .* no field 'gen_length'",
        ),
        (
            arrays(
                lambda of: of.update({"logits.start.hidden.2": of.pop("logits.start.hidden.1")})
            ),
            r"logits\.start\.hidden\.2 is of a layer that tiny test model does not have",
        ),
        (
            arrays(lambda of: of.update({"logits.start.logits": of["logits.start.logits"][:, 1:]})),
            r"logits\.start\.logits must be float of shape \(2, 11, \d+\)",
        ),
    ],
)
def test_a_folder_that_cannot_be_held_is_refused_by_name(folder, spoil, message):
    spoil(folder)
    refused(message, held_to, folder)


def test_a_full_disk_is_told_with_the_file_and_leaves_no_folder(tmp_path, monkeypatch):
    def full(tensors, path):
        path.write_bytes(b"half")
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(OSError, match=r"safetensors.*No space left"):
        write_reference(tiny_loaded(), tmp_path / "reference", PROMPTS, DecodingSettings(seed=0), 6)
    assert not (tmp_path / "reference").exists()


def test_an_array_that_is_left_out_is_named(folder):
    reference = Reference(folder)
    assert "not compared" not in verdict(reference.hold(tiny_loaded()), 5e-4, reference.left_out)
    changed(
        folder, lambda of: [of.pop(f"logits.{name}") for name in ("start.hidden.1", "half.logits")]
    )
    reference = Reference(folder)
    held = reference.hold(tiny_loaded())
    assert reference.left_out == ["layer 1 of 'start'", "logits of 'half'"]
    said = verdict(held, 5e-4, reference.left_out)
    assert (
        said.startswith("it holds: 5 comparisons")
        and "not compared: layer 1 of 'start', logits of 'half'" in said
    )


def test_canvases_are_of_diffusion_models(folder):
    refused(
        "test model is autoregressive", Reference(folder).hold, tiny_loaded(family="autoregressive")
    )


@pytest.mark.slow
def test_the_command_writes_holds_and_says_so_by_its_status(tmp_path, capsys):
    model, folder = str(save_tiny(tmp_path / "model", 1)), tmp_path / "reference"
    asked = ["--model", model, "--write", "--new-tokens", "4", "--block-length", "2"]
    assert main(["validate", str(folder), "The old man", "The sea", *asked]) == 0
    assert main(["validate", str(folder)]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("it holds: 7 comparisons")
    changed(folder, lambda tensors: tensors["logits.half.hidden.0"][0, -1, 0].add_(3.0))
    with pytest.raises(SystemExit) as ended:
        main(["validate", str(folder)])
    assert ended.value.code == 1
    out = capsys.readouterr().out.splitlines()
    assert [line.split()[:4] for line in out if line.startswith("DIFFERS")] == [
        ["DIFFERS", "half", "layer", "0"]
    ]
    assert out[-1].startswith(
        "it does not hold: 1 of 7 comparisons differ, the first in layer 0 of 'half'"
    )
    assert main(["validate", str(folder), "The old man", *asked]) == 2
    assert main(["validate", str(folder), "The old man"]) == 2
    assert main(["validate", str(tmp_path / "other"), "--write"]) == 2
    said = capsys.readouterr().err
    assert (
        "is taken" in said
        and "prompts are for --write" in said
        and "--write needs a prompt" in said
    )
    for option in (["--rule", "entropy"], ["--new-tokens", "4"]):
        assert main(["validate", str(folder), *option]) == 2
        assert "--new-tokens and the options of decoding are for --write" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["full", "blocks3", "batch_leftpad"])
def test_the_authors_own_llada_holds(tmp_path, name):
    """The golden data are in this format, but for the names of the settings."""
    theirs = next(case for case in golden_cases("llada")["generate"] if case["name"] == name)[
        "settings"
    ]
    settings = {"steps": theirs["steps"], "block_length": theirs["block_length"]}
    logits = golden_cases("llada")["logits"]
    told = {
        "model": str(golden_folder("llada")),
        "logits": logits,
        "generate": [{"name": name, "settings": settings}],
    }
    (tmp_path / "cases.json").write_text(json.dumps(told))
    save_file(golden_tensors("llada"), tmp_path / "expected.safetensors")
    reference = Reference(tmp_path)
    held = reference.hold(load(reference.model))
    assert all(one.holds for one in held), [one.line() for one in held]
    assert len(held) == len(logits) + 1 and held[-1].same_best == 1.0
