"""The script on the strength of sinks: the protocol of Gu et al. on tiny models; a real one has it
in tests/test_real_model.py.
"""

import json
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from launched import ROOT, script
from tiny_diffusion import tiny_loaded
from tiny_llama import tiny_llama

pytestmark = pytest.mark.usefixtures("heldout")

study = script("studies/strength")


def settings(**changes):
    return study.Settings(**{"rows": 9, "length": 12, "batch": 3, "texts": "held.txt", **changes})


@pytest.mark.slow
def test_the_smallest_run(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["strength.py", "tiny-causal", "--smallest", "--out", "out"])
    study.main()
    table = pd.read_csv("out/summary.csv")
    assert table["control"].fillna("").tolist() == [""] * 6 + ["initialised", "permuted"]
    assert (table["rows"] == 8).all() and table["sink"].between(0, 1).all()
    shares = pd.read_csv("out/classes.csv").groupby(study.KIND)["share"].sum()
    assert np.allclose(shares, 1) and Path("out/strength.png").stat().st_size > 1000
    assert "LLaMA3-8B" in capsys.readouterr().out


def test_the_weights_are_those_of_the_attention_maps():
    """Each head's map by transformers' eager attention: column means over the queries that may see
    the key.
    """
    loaded, asked = tiny_llama(), settings(inputs=("natural", "random"), starts=("start",))
    for _, ids_RT in study.kinds(loaded, asked):
        loaded.model.set_attn_implementation("sdpa")
        found, _ = study.measured(loaded, ids_RT, 4)
        loaded.model.set_attn_implementation("eager")
        with torch.no_grad():
            maps_RLHQK = torch.stack(loaded.model(ids_RT, output_attentions=True).attentions, 1)
        first_RLH, share_RLHK = maps_RLHQK[..., 0].mean(-1), maps_RLHQK.mean(-2)
        assert np.allclose(found["first"], first_RLH.ravel(), atol=1e-5)
        assert np.allclose(found["strongest"], share_RLHK.amax(-1).ravel(), atol=1e-5)
        assert (found["at"] == share_RLHK.argmax(-1).ravel().numpy()).all()
        places_RN = torch.tensor(found["at"].to_numpy()).view(9, -1)
        assert found["token_id"].tolist() == ids_RT.gather(1, places_RN).ravel().tolist()
        line = study.summary(found, pd.Series(range(9)), 0.3)
        assert line["sink"] == pytest.approx(float((first_RLH.mean(0) > 0.3).float().mean()))
        by_text_R = (first_RLH > 0.3).float().mean((1, 2))
        assert line["sink_by_text"] == pytest.approx(float(by_text_R.mean()))


def test_a_diffusion_model_is_read_at_every_ratio_and_added_sinks_are_places():
    loaded = tiny_loaded(1)
    asked = settings(ratios=(0.0, 0.15, 0.9), inputs=("random",), starts=("raw",), epsilon=0.05)
    kinds = dict(study.kinds(loaded, asked))
    assert [kind[2] for kind in kinds] == [0.0, 0.15, 0.9]
    plain_RT, *masked = kinds.values()
    few, many = (ids_RT == loaded.model.config.mask_token_id for ids_RT in masked)
    assert (few.sum(1) == 2).all() and (many.sum(1) == 11).all() and (few <= many).all()
    assert torch.equal(plain_RT[~few], masked[0][~few])
    table, _ = study.measured(loaded, plain_RT, 9)
    assert table["at"].min() == -1 and (table["token_id"][table["at"] == -1] == study.ADDED).all()
    assert "sink" in set(study.classes(loaded, table, 0.05)["class"])


def test_the_page_on_masked_models_says_what_the_study_measured():
    """The table of docs/masked_models.md, columns 2 to 4, is that of
    studies/smollm2_diffusion/points.
    """
    page = (ROOT / "docs" / "masked_models.md").read_text("utf-8").replace("**", "")
    head = "| masked | SmolLM2, causal |"
    rows = page[page.index(head) :].splitlines()[2:6]
    cells = {
        row.split("|")[1].strip(): [cell.strip() for cell in row.split("|")[2:5]] for row in rows
    }
    for place, name in enumerate(("parent", "lifted", "iii-0-500")):
        points = json.loads(
            (ROOT / "studies" / "smollm2_diffusion" / "points" / f"{name}.json").read_text()
        )
        for ratio, one in points["strength"].items():
            share, strong = (100 * np.mean(one[key]) for key in ("strongest_share", "strong_heads"))
            assert (
                cells[f"{float(ratio):.0%}".replace("%", " %")][place]
                == f"{share:.1f} % ({strong:.1f} %)"
            )
