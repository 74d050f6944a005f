"""Numbers of another program, held against ours: what is planted is found where it was planted."""

import json
from shutil import copytree

import pytest
import torch
from safetensors.torch import load_file, save_file

from golden import golden_folder
from refusals import refused
from sinklab.core.subject import Canvas
from sinklab.extras.validate.command import CASES, TENSORS, Saved
from sinklab.lab.checkpoints import load
from sinklab.lab.cli import main
from tiny_diffusion import MASK, PAD, save_tiny, tiny_model

PROMPTS = [[9, 14, 30, 7, 21], [12, 8]]


def stored(folder, tensors, **told):
    """A folder with such cases."""
    folder.mkdir(exist_ok=True)
    save_file({name: one.contiguous() for name, one in tensors.items()}, folder / TENSORS)
    (folder / CASES).write_text(json.dumps(told))
    return folder


def changed(folder, change):
    """Change the tensors of a folder."""
    change(tensors := load_file(folder / TENSORS))
    save_file({name: one.contiguous() for name, one in tensors.items()}, folder / TENSORS)


def retold(folder, **told):
    """Change what is told of the cases."""
    before = json.loads((folder / CASES).read_text())
    (folder / CASES).write_text(json.dumps(before | told))


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """What a program without any code of ours but the model would write of a padded batch."""
    model = tiny_model()
    canvas = Canvas.from_prompts(PROMPTS, new_tokens=6, mask_id=MASK, pad_id=PAD)
    steps = list(model.denoise(canvas))
    ids_RS, real_RS = canvas.ids_BS, canvas.attention_BS.int()
    with torch.no_grad():
        logits_RSV = model(ids_RS, real_RS).logits
    tensors = {
        "logits.start.input_ids": ids_RS.int(),
        "logits.start.attention_mask": real_RS,
        "logits.start.logits": logits_RSV,
        "gen.plain.canvas": torch.stack([ids_RS, *(step.ids_BS for step in steps)]).int(),
        "gen.plain.attention_mask": real_RS.clone(),
    }
    cases = {"logits": [{"name": "start"}]}
    return stored(
        tmp_path_factory.mktemp("written") / "one", tensors, generate=[{"name": "plain"}], **cases
    )


@pytest.fixture
def folder(written, tmp_path):
    return copytree(written, tmp_path / "theirs")


def compared(folder, tolerance=5e-4):
    with torch.inference_mode():
        return list(Saved(folder).compare(tiny_model(), tolerance))


def wrong(folder, **options):
    return [one.what for one in compared(folder, **options) if not one.holds]


def test_the_same_numbers_hold_to_the_last_bit(folder):
    found = compared(folder, 0.0)
    assert [one.case for one in found] == ["start", "plain"]
    assert all(one.holds for one in found)
    assert "most likely token: 100.0% equal" in found[0].found


def test_each_number_is_found_where_it_is_wrong(folder):
    logits_RSV = load_file(folder / TENSORS)["logits.start.logits"]
    real_PV = torch.cat([logits_RSV[0], logits_RSV[1, 3:]])
    relative = 0.25 / float(logits_RSV[0, 6, 3].abs() + real_PV.std())
    changed(folder, lambda of: of["logits.start.logits"][0, 6, 3].add_(0.25))
    assert wrong(folder) == ["logits"]
    assert wrong(folder, tolerance=1.01 * relative) == []
    assert wrong(folder, tolerance=0.99 * relative) == ["logits"]


def test_padding_is_not_compared_and_a_flag_leaves_out_more(folder):
    changed(folder, lambda of: of["logits.start.logits"][1, :3].fill_(torch.nan))
    assert wrong(folder) == []
    changed(folder, lambda of: of["logits.start.logits"][1, 5].fill_(torch.nan))
    assert wrong(folder) == ["logits"]
    valid_RS = torch.ones(2, 11, dtype=torch.bool)
    valid_RS[1, :6] = False
    changed(folder, lambda of: of.update({"logits.start.valid": valid_RS}))
    assert wrong(folder) == []


def test_a_canvas_that_differs_is_found_at_its_evaluation(folder, at=4):
    before_RS, after_RS = load_file(folder / TENSORS)["gen.plain.canvas"][at - 1 : at + 1]
    row, place = (before_RS != after_RS).nonzero()[0].tolist()
    right = int(after_RS[row, place])
    changed(folder, lambda of: of["gen.plain.canvas"][at:, row, place].fill_(right - 1))
    canvas = compared(folder)[-1]
    assert not canvas.holds
    assert canvas.found.startswith(
        f"evaluation {at}, row {row}, position {place}: {right - 1}, ours {right} (our score "
    )
    assert wrong(folder) == ["canvas"]


def test_their_type_sets_the_tolerance(folder):
    assert Saved(folder).tolerance() == 5e-4
    retold(folder, dtype="bfloat16")
    assert Saved(folder).tolerance() == 0.15
    retold(folder, dtype="float8")
    refused("dtype of saved numbers .*'float8'", Saved(folder).tolerance)


LOGITS = "logits.start.logits"


@pytest.mark.parametrize(
    "tensors, told, message",
    [
        ({}, {"logits": [{}]}, r"must hold cases\.json and .*KeyError"),
        ({}, {"logits": [], "generate": []}, "must list a case"),
        (
            {},
            {"generate": [{"name": "plain", "settings": {"gen_length": 6}}]},
            "settings of 'plain' .* no field 'gen_length'",
        ),
        (
            {"logits.start.valid": torch.zeros(2, 11)},
            {},
            r"logits\.start\.valid leaves no position",
        ),
        ({LOGITS: torch.zeros(2, 10, 3)}, {}, rf"{LOGITS} must be of shape \(2, 11, \d+\)"),
    ],
)
def test_a_folder_that_cannot_be_compared_is_refused_by_name(folder, tensors, told, message):
    retold(folder, **told)
    changed(folder, lambda of: of.update(tensors))
    refused(message, compared, folder)


def test_tensors_that_are_not_there_are_named(folder):
    changed(folder, lambda of: of.pop(LOGITS))
    refused(f"must hold '{LOGITS}'", compared, folder)
    (folder / TENSORS).write_bytes(b"?")
    refused(r"must hold cases\.json and", compared, folder)


@pytest.mark.slow
def test_the_command_says_it_by_its_status(folder, tmp_path, capsys):
    model = str(save_tiny(tmp_path / "model"))
    retold(folder, model=model)
    assert main(["validate", str(folder)]) == 0
    assert "it holds: 2 of 2, numbers within 0.0005" in capsys.readouterr().out
    changed(folder, lambda of: of["logits.start.logits"].add_(3.0))
    with pytest.raises(SystemExit) as ended:
        main(["validate", str(folder), "--model", model])
    assert ended.value.code == 1
    out = capsys.readouterr().out
    assert "DIFFERS" in out and "1 of 2 differ by more than 0.0005" in out
    assert main(["validate", str(folder), "--model", "tiny-causal"]) == 2
    assert "canvases are of diffusion models" in capsys.readouterr().err


def test_the_golden_logits_of_the_authors_hold():
    """The golden data are in this format."""
    folder = golden_folder("dream")
    model, saved = load(str(folder)).model, Saved(folder)
    saved.cases = [one for one in saved.cases if one[0] == "logits"]
    with torch.inference_mode():
        found = list(saved.compare(model, saved.tolerance()))
    assert len(found) >= 2
    assert all(one.holds for one in found), [str(one) for one in found]
