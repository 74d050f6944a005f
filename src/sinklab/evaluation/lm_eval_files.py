"""lm-eval's own files of a run, in the form in which lm-eval writes them, and its chatter kept away."""

from __future__ import annotations

import copy
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

FEWSHOT_SEED = 1234
"""lm-eval's own, so that the worked examples in a prompt are the ones that others meet."""


@contextmanager
def quiet() -> Iterator[None]:
    """lm-eval without bars of its own and without processes for its resamples."""
    import lm_eval.api.metrics
    import lm_eval.api.task

    metrics_module: Any = lm_eval.api.metrics
    task_module: Any = lm_eval.api.task
    bar, before = task_module.tqdm, os.environ.get("DISABLE_MULTIPROC")
    # progress is told by our own bar; a pool of processes would copy the model's memory
    task_module.tqdm = partial(bar, disable=True)
    os.environ["DISABLE_MULTIPROC"] = "1"
    # resampling announces itself on standard output, where only results belong
    metrics_module.print = lambda *words, **options: None
    try:
        yield
    finally:
        task_module.tqdm = bar
        del metrics_module.print
        if before is None:
            del os.environ["DISABLE_MULTIPROC"]
        else:
            os.environ["DISABLE_MULTIPROC"] = before


def write(folder: Path, results: dict[str, Any], model: Any) -> list[Path]:
    """Write results_<date>.json and samples_<task>_<date>.jsonl with lm-eval's own writer.

    They are written elsewhere and moved, so that a reader never meets half a file.

    Raises:
        OSError: where they cannot be written.
    """
    from lm_eval.loggers import EvaluationTracker
    from lm_eval.loggers.utils import add_tokenizer_info

    settings = model.settings
    whole: dict[str, Any] = copy.deepcopy(results)
    samples = whole.pop("samples", {})
    whole["config"] = {
        "model": "sinklab",
        "model_args": {"pretrained": model.loaded.name},
        "model_num_parameters": model.loaded.model.num_parameters(),
        "model_dtype": str(model.loaded.model.dtype),
        "model_revision": model.loaded.revision,
        "batch_size": settings.batch,
        "device": str(model.loaded.model.device),
        "limit": settings.limit,
        "fewshot_seed": FEWSHOT_SEED,
        "sinklab": settings.kept(),
    }
    whole |= {"date": time.time(), "lm_eval_version": metadata.version("lm_eval")}
    whole["transformers_version"] = metadata.version("transformers")
    add_tokenizer_info(whole, model)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".lm_eval-") as beside:
        # given the name of a file, it puts everything beside that file
        tracker = EvaluationTracker(output_path=str(Path(beside) / "results.json"))
        template = model.tokenizer.chat_template if settings.chat else None
        tracker.general_config_tracker.log_experiment_args(
            "sinklab", {"pretrained": model.loaded.name}, None, template, settings.chat
        )
        tracker.save_results_aggregated(whole, samples)
        for task, rows in samples.items():
            tracker.save_results_samples(task, rows)
        written = sorted(Path(beside).iterdir())
        # its writer reports a failure as a warning and goes on
        if len(written) != 1 + len(samples):
            raise OSError(f"{folder}: lm-eval's result files could not be written; {len(written)} of them were")
        moved = [folder / path.name for path in written]
        for path, target in zip(written, moved, strict=True):
            shutil.move(path, target)
    return moved
