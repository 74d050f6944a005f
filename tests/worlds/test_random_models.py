"""Pages of models that learned nothing: what they say, an untrained twin says as well."""

from pathlib import Path

import pytest
import torch

from sinklab.checkpoints import Loaded
from sinklab.models import DiffusionLM, DiffusionLMConfig
from sinklab.records import open_run
from sinklab.reports.runs import as_studies
from sinklab.reports.study import Study
from sinklab.studies.trace.study import StudySettings, study
from tiny_diffusion import TEXT, tiny_backbone, tiny_tokenizer

PROMPTS = ("The old man", "", "The sea", "He said", "Will it", "boats and")
WIDTHS = (0.02, 0.2, 0.3, 0.5)
"""deviations of fresh weights: from even attention to sinks in most heads"""


def page_of(folder: Path, seed: int) -> Study:
    """A run of random weights, with its twins; every other model has an added sink."""
    tokenizer, sinks = tiny_tokenizer(), seed // len(WIDTHS) % 2
    backbone = tiny_backbone(initializer_range=WIDTHS[seed % len(WIDTHS)], eos_token_id=tokenizer.eos_token_id)
    added = {"sink_kind": "token", "sink_count": 1} if sinks else {}
    torch.manual_seed(seed)
    model = DiffusionLM(DiffusionLMConfig(backbone, mask_token_id=tokenizer.mask_token_id, **added)).eval()
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
    study(Loaded(model, tokenizer, "random", None, "diffusion"), folder / "run", settings)
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
