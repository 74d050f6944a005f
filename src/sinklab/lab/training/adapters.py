"""Adapters of a run: written beside its model, taken out of a checkpoint, and put in when another
run goes on.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from sinklab.core.subject.config import DiffusionLMConfig
from sinklab.core.subject.sinks import tensors_of
from sinklab.lab.checkpoints.adapters import (
    AdapterFile,
    adapter_tensors,
    base_hash,
    check_fit,
    read_adapters,
    save_adapters,
)
from sinklab.lab.checkpoints.published import read_plan
from sinklab.lab.files import refused
from sinklab.lab.training.checkpoints import settings_of, step_of
from sinklab.lab.training.checks import variant
from sinklab.lab.training.settings import TrainSettings

FILE = "adapters.safetensors"


def facts_of(
    state: Mapping[str, Tensor],
    config: DiffusionLMConfig,
    settings: TrainSettings,
    step: int,
    base: str = "",
) -> AdapterFile:
    """Facts of the adapters in the state of a model after so many steps of a run; ``base`` names
    the adapted model.
    """
    name = str(settings.init_from)
    rows = read_plan(name)[0].backbone.vocab_size
    if not base:
        base = name
        if Path(name).exists():
            # the last name of a folder: its path says nothing elsewhere
            base = Path(name).name
    own: dict[str, Any] = {}
    if settings.objective != "autoregressive":
        own = {key: getattr(config, key) for key in (*variant(settings), "logit_shift")}
    tokens = step * settings.batch * settings.length
    if settings.adapters is not None:
        tokens += read_adapters(settings.adapters)[0].tokens
    return AdapterFile(
        base=base,
        base_sha256=base_hash(state, config, rows),
        base_rows=rows,
        rank=settings.lora_rank,
        objective=settings.objective,
        mask_token_id=config.mask_token_id,
        settings=own,
        tokens=tokens,
        seed=settings.seed,
    )


def write(model: Any, settings: TrainSettings, step: int) -> Path:
    """Write the adapters of a model that still has them into the run folder, and return the
    file.
    """
    state = model.state_dict()
    facts = facts_of(state, model.config, settings, step)
    return save_adapters(
        facts, adapter_tensors(state, tensors_of(model.config)), Path(settings.out) / FILE
    )


def extract(checkpoint: str | Path, file: str | Path | None = None, *, base: str = "") -> Path:
    """Write the adapters of a checkpoint of a run (``RUN/checkpoints/checkpoint-500``), which keeps
    all weights.

    Args:
        checkpoint: its folder; the run folder above it says how it was trained.
        file: path to write; ``adapters.safetensors`` in the checkpoint when left out.
        base: name of the model that was adapted, for later readers.

    Returns:
        the file, which :func:`sinklab.lab.checkpoints.adapters.read_adapters` reads.

    Raises:
        ValueError: for a folder that is no checkpoint of a run with adapters.
    """
    checkpoint = Path(checkpoint)
    settings = settings_of(checkpoint.parent.parent)
    fault = f"the weights of {checkpoint} cannot be read"
    with refused(fault, SafetensorError, OSError, ValueError):
        config: Any = DiffusionLMConfig.from_pretrained(checkpoint)
        state = load_file(checkpoint / "model.safetensors")
    tensors = adapter_tensors(state, tensors_of(config))
    if not any(".lora_A." in name for name in tensors):
        raise ValueError(
            f"{checkpoint} has no adapters: its run trains {settings.train_only!r}; train with lora"
        )
    facts = facts_of(state, config, settings, step_of(checkpoint), base)
    return save_adapters(facts, tensors, file or checkpoint / FILE)


def check_start(model: Any, settings: TrainSettings) -> AdapterFile:
    """The facts of the adapters that a run goes on from; ``model`` is the base, before it has
    adapters.

    Raises:
        ValueError: if they are of another base, rank, objective or variant than the settings say,
            or damaged.
    """
    file = str(settings.adapters)
    facts, tensors = read_adapters(file)
    wanted = {"lora_rank": facts.rank, "objective": facts.objective, **facts.settings}
    here = {"lora_rank": settings.lora_rank, "objective": settings.objective}
    here |= {name: getattr(model.config, name) for name in facts.settings}
    other = {name: value for name, value in wanted.items() if here[name] != value}
    if other:
        flags = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in other.items())
        raise ValueError(
            f"a run keeps the form of the adapters that it goes on from, and {file} has another; "
            f"{flags}"
        )
    check_fit(model, facts, tensors, str(settings.init_from), file)
    return facts


@torch.no_grad()
def put_in(model: Any, settings: TrainSettings) -> None:
    """Give the adapters of a model, and its sink, the values of the file that the run goes on
    from.
    """
    parameters = dict(model.named_parameters())
    for name, tensor in read_adapters(str(settings.adapters))[1].items():
        for half in ("lora_A", "lora_B"):
            name = name.replace(f".{half}.weight", f".{half}.default.weight")
        parameters[name].copy_(tensor)
