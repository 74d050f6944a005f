"""What is said of a real model, SmolLM2-135M, where the package that brings it is installed."""

import copy
import re
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
import torch

import sinklab
from launched import script
from shared_data import shared
from sinklab.lab.checkpoints import gguf_files
from tiny_gguf import smollm2

README = Path(__file__).parents[1] / "README.md"
BOOK = "It was a bright cold day in April, and the clocks were striking thirteen. "

# a user's warnings are no errors either
pytestmark = [
    pytest.mark.slow,
    pytest.mark.smollm2,
    pytest.mark.filterwarnings("default"),
]


@pytest.fixture(scope="module", autouse=True)
def read_once():
    """The file is parsed and dequantised once."""
    smollm2()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("read_model", "read_tokenizer"):
            read, found = getattr(gguf_files, name), []

            def copied(*given, read=read, found=found):
                found[:] = found or [read(*given)]
                return copy.deepcopy(found[0])

            patch.setattr(gguf_files, name, copied)
        yield


@pytest.fixture(scope="module")
def example():
    """The first example of the README: the names it made, what it printed, and what the README
    says it prints.
    """
    found = re.search(
        r"test_real_model.py[^\n]*-->\n```python\n(.*?)```\n+```text\n(.*?)```",
        README.read_text("utf-8"),
        re.S,
    )
    assert found is not None
    names = {}
    with redirect_stdout(StringIO()) as printed:
        exec(compile(found[1], "README.md", "exec"), names)
    return names, printed.getvalue(), found[2]


def test_the_first_example_of_the_readme_prints_what_it_says(example):
    _, printed, said = example
    assert printed == said


def test_a_row_that_sees_itself_alone_becomes_the_sink(example):
    """The first result of the study on one text: without training, wherever the row stands."""
    lm = example[0]["lm"]
    ids_1S = torch.tensor([lm.needed_tokenizer()(BOOK * 4)["input_ids"][:64]])
    shares = {}
    for name, edits, key, causal in (
        ("causal", (), 0, True),
        ("full", (), 0, False),
        ("row 0", ("lone_rows:rows=0",), 0, False),
        ("row 30", ("lone_rows:rows=30",), 30, False),
    ):
        with (
            sinklab.intervene(lm.model, *edits),
            sinklab.trace(lm.model) as seen,
            torch.inference_mode(),
        ):
            lm.model(ids_1S, causal=causal)
        shares[name] = float((seen.received[0][..., key] / seen.visible[0][..., key]).mean())
    assert shares["causal"] > 0.3 and shares["row 0"] > 0.25 and shares["row 30"] > 0.25, shares
    assert shares["full"] < 0.1, shares


def test_the_second_token_becomes_the_sink_where_the_first_is_blocked(example):
    """What `sinklab tour --real` says of it."""
    lm = example[0]["lm"]
    ids_1S = torch.tensor([lm.needed_tokenizer()(BOOK * 4)["input_ids"][:64]])
    strong = {}
    for name, edits in (
        ("clean", ()),
        ("blocked", ("block_keys:keys=positions:positions=0,when=now",)),
    ):
        with (
            sinklab.intervene(lm.model, *edits),
            sinklab.trace(lm.model) as seen,
            torch.inference_mode(),
        ):
            lm.model(ids_1S, causal=True)
        is_strong_LHK = seen.received[0][0] / seen.visible[0][0] > 0.3
        strong[name] = is_strong_LHK[..., :2].float().mean((0, 1)).tolist()
    assert strong["clean"][0] > 0.5 and strong["clean"][1] < 0.05, strong
    assert strong["blocked"][0] == 0 and strong["blocked"][1] > 0.2, strong


def test_the_packaged_sink_token_is_the_sink():
    """It takes more of the attention than any token of the text; the study has 0.39 on 40 texts."""
    lm = sinklab.load("smollm2-diffusion-sink")
    ids_1S = torch.tensor([lm.needed_tokenizer()(BOOK * 4)["input_ids"][:64]])
    with sinklab.trace(lm.model) as seen, torch.inference_mode():
        lm.model(ids_1S)
    share_K = (seen.received[0] / seen.visible[0]).mean((0, 1, 2))
    assert int(share_K.argmax()) == 0 and share_K[0] > 0.3, share_K[:3]


def test_it_has_the_sink_of_models_with_rotary_positions():
    """One repeated token without a start token leaves nothing to choose: 0, as Gu et al. have it
    for such models.

    With 100 rows of each, which take minutes on one thread: natural 77.4, by sequence 73.0, repeat
    0.
    """
    study = script("studies/strength")
    lm, found = sinklab.load(smollm2()), {}
    texts = str(shared("data/books_pd/valid.jsonl.gz"))
    for name, rows in (("natural", 6), ("repeat", 2)):
        asked = study.Settings(texts=texts, inputs=(name,), starts=("raw",), rows=rows)
        ((_, ids_RT),) = study.kinds(lm, asked)
        found[name] = study.summary(*study.measured(lm, ids_RT, 25), 0.3)
    assert 100 * found["natural"]["sink"] == pytest.approx(75.2, abs=6)
    assert 100 * found["natural"]["sink_by_text"] == pytest.approx(70.1, abs=6)
    assert found["repeat"]["sink"] == found["repeat"]["sink_by_text"] == 0
