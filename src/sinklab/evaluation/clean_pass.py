"""Denoising where an intervention chooses in forwards that run unedited."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

from sinklab.probing import InterventionLog
from sinklab.sampling import Canvas, DecodingSettings, Step


def asks_clean_pass(edits: Iterable[Any]) -> bool:
    """Whether an edit chooses in forwards that run unedited."""
    return any(getattr(edit, "source", None) == "clean_pass" for edit in edits)


def check_cache(edits: Iterable[Any], cache: str) -> None:
    """Raise ValueError for a cache, where edits choose in clean passes."""
    if cache != "none" and asks_clean_pass(edits):
        raise ValueError(
            "source=clean_pass runs an unedited forward before each edited one, which would overwrite what "
            f"cache={cache} remembers; decode without a cache"
        )


class CleanPassFirst:
    """A denoiser that runs each evaluation unedited before it runs it edited."""

    def __init__(self, denoiser: Any, log: InterventionLog) -> None:
        self._denoiser, self._log = denoiser, log

    def __call__(self, ids_BS: Tensor, wanted_BS: Tensor) -> Tensor:
        with self._log.probing():
            self._denoiser(ids_BS, wanted_BS)
        return self._denoiser(ids_BS, wanted_BS)


def denoised(model: Any, canvas: Canvas, settings: DecodingSettings, asking: InterventionLog | None) -> Iterator[Step]:
    """The steps of `model.denoise`, each evaluation behind a clean one.

    Args:
        asking: the log of interventions that choose in clean passes; None for a plain run.
    """
    if asking is None:
        return model.denoise(canvas, settings)
    config, real_BS = model.config, canvas.attention_BS
    eos_ids = [*config.eos_ids, *([] if config.eot_token_id is None else [config.eot_token_id])]
    denoiser = CleanPassFirst(model.denoiser(None if bool(real_BS.all()) else real_BS), asking)
    return settings.decode(denoiser, canvas, eos_ids=eos_ids, text_vocabulary=config.text_vocab_size)
