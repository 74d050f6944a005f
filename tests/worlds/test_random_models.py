"""Pages of models that learned nothing: what they say, an untrained twin says as well."""

from pathlib import Path

import pytest
import torch

from sinklab.checkpoints import Loaded
from sinklab.models import DiffusionLM, DiffusionLMConfig
from sinklab.records import open_run
from sinklab.reports.runs import as_studies
from sinklab.reports.study import Study
from sinklab.studies.ablate.figures import ablation_sentences
from sinklab.studies.ablate.study import Ablate, AblateSettings
from sinklab.studies.curve.curves import as_curves, judged
from sinklab.studies.curve.study import CurveSettings, masking_curve
from sinklab.studies.trace.study import StudySettings, study
from sinklab.studies.twins import SHARED
from tiny_diffusion import TEXT, tiny_backbone, tiny_tokenizer

PROMPTS = ("The old man", "", "The sea", "He said", "Will it", "boats and")
WIDTHS = (0.02, 0.2, 0.3, 0.5)
"""deviations of fresh weights: from even attention to sinks in most heads"""


def random_model(seed: int) -> Loaded:
    """Random weights; every other model has an added sink."""
    tokenizer, sinks = tiny_tokenizer(), seed // len(WIDTHS) % 2
    backbone = tiny_backbone(initializer_range=WIDTHS[seed % len(WIDTHS)], eos_token_id=tokenizer.eos_token_id)
    added = {"sink_kind": "token", "sink_count": 1} if sinks else {}
    torch.manual_seed(seed)
    model = DiffusionLM(DiffusionLMConfig(backbone, mask_token_id=tokenizer.mask_token_id, **added)).eval()
    return Loaded(model, tokenizer, "random", None, "diffusion")


def page_of(folder: Path, seed: int) -> Study:
    """A run of random weights, with its twins."""
    (folder / "held.txt").write_text(TEXT * 20)
    settings = StudySettings(
        prompts=PROMPTS,
        new_tokens=6,
        block_length=3,
        mask_sinks=(),
        statistics=("value_norm",),
        ks=(0, 1, 4),
        heldout=str(folder / "held.txt"),
        heldout_rows=6,
        heldout_length=24,
        seed=seed,
        twin=True,
    )
    study(random_model(seed), folder / "run", settings)
    return as_studies(open_run(folder / "run"))[0]


@pytest.mark.slow
def test_what_random_weights_show_is_marked(tmp_path: Path) -> None:
    pages, said = [], 0
    for seed in range(20):
        (folder := tmp_path / str(seed)).mkdir()
        page = page_of(folder, seed)
        said += len(page.in_twins)
        pages.append([name for name, is_shown in page.in_twins.items() if not is_shown])
    assert said > 50, "these pages find a lot"
    assert sum(map(bool, pages)) <= 2, pages


@pytest.mark.slow
def test_what_curves_and_maps_of_random_weights_show_is_marked(tmp_path: Path) -> None:
    (tmp_path / "held.txt").write_text(TEXT * 60)
    text = {"heldout": str(tmp_path / "held.txt"), "rows": 32, "length": 24, "twin": True}
    unmarked, told = {"curve": 0, "map": 0}, 0
    for seed in range(20):
        loaded = random_model(seed)
        run = masking_curve(loaded, tmp_path / f"curve-{seed}", CurveSettings(ks=(1, 8), seed=seed, **text))
        found = [one for one in judged(as_curves(open_run(run))).values() if one.holds is not None]
        told += len(found)
        unmarked["curve"] += any(not one.shared for one in found)
        run = Ablate()(loaded, tmp_path / f"map-{seed}", AblateSettings(k=8, seed=seed, **text))
        said = " ".join(ablation_sentences([open_run(run)]))
        some = (
            "rises in 0 and falls in 0" not in said,
            "these keys more weight lose" in said and ": whether" not in said,
        )
        told += sum(some)
        unmarked["map"] += sum(some) > said.count(SHARED)
    print(f"{told} findings; pages with an unmarked one: {unmarked}")
    assert told > 10, "random weights show a lot"
    assert max(unmarked.values()) <= 2, unmarked
