"""What is said of a real model, SmolLM2-135M, where the package that brings it is installed."""

import re
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
import torch

import sinklab
from sinklab.lab.checkpoints import from_causal
from tiny_gguf import smollm2

README = Path(__file__).parents[1] / "README.md"
BOOK = "It was a bright cold day in April, and the clocks were striking thirteen. "

pytestmark = [pytest.mark.slow, pytest.mark.smollm2]


@pytest.mark.filterwarnings("default")
def test_the_first_example_of_the_readme_prints_what_it_says():
    smollm2()
    found = re.search(
        r"test_real_model.py[^\n]*-->\n```python\n(.*?)```\n+```text\n(.*?)```",
        README.read_text("utf-8"),
        re.S,
    )
    assert found is not None
    printed = StringIO()
    with redirect_stdout(printed):
        exec(compile(found[1], "README.md", "exec"), {})
    assert printed.getvalue() == found[2]


@pytest.mark.filterwarnings("default")
def test_a_row_that_sees_itself_alone_becomes_the_sink():
    """The first result of the study on one text: without training, wherever the row stands."""
    lm = from_causal(smollm2(), logit_shift=True)
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


@pytest.mark.filterwarnings("default")
def test_the_packaged_sink_token_is_the_sink():
    """It takes more of the attention than any token of the text; the study has 0.39 on 40 texts."""
    smollm2()
    lm = sinklab.load("smollm2-diffusion-sink")
    ids_1S = torch.tensor([lm.needed_tokenizer()(BOOK * 4)["input_ids"][:64]])
    with sinklab.trace(lm.model) as seen, torch.inference_mode():
        lm.model(ids_1S)
    share_K = (seen.received[0] / seen.visible[0]).mean((0, 1, 2))
    assert int(share_K.argmax()) == 0 and share_K[0] > 0.3, share_K[:3]
