"""The attention of a model in training, on a fixed text under masks that open one by one.

A token once open stays open, as in a denoising run with only right guesses, so that the levels play
the part of steps and sinks can move.
"""

# R rows, B rows of one forward, T levels, L layers, H heads, S text positions, K keys = added sinks
# + S, D width
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from sinklab.core.attention.context import is_observed, running
from sinklab.core.compat import compiled_module
from sinklab.core.instrument import trace
from sinklab.core.sinks import COMMITTED, DEFAULT, MASKED, Rule
from sinklab.core.subject.config import DiffusionLMConfig
from sinklab.lab.analysis.counts import ratio
from sinklab.lab.analysis.facts import MOTION, facts
from sinklab.lab.analysis.movement import summarised

SAMPLE = 1 << 14
"""numbers of a row, about, that its median is taken of"""

REDUCED: dict[str, Any] = {
    "added": torch.amax,
    "first": torch.amax,
    "other": torch.amax,
    "median": torch.mean,
}
"""Reductions of the numbers of all rows to one: their maximum, but the mean of the medians."""


def _note_states(seen: dict[tuple[str, int], list[Tensor]], layer: int, states_BSD: Tensor) -> None:
    """After a layer: its states are of the text, or of the added sinks, which models run unobserved
    and apart.
    """
    size_BSD = states_BSD.abs()
    if not is_observed():
        seen["added", layer].append(size_BSD.amax((1, 2)).float())
        return
    seen["first", layer].append(size_BSD[:, 0].amax(1).float())
    seen["median", layer].append(_spread(size_BSD).median(1).values.float())
    if size_BSD.shape[1] > 1:
        seen["other", layer].append(size_BSD[:, 1:].amax((1, 2)).float())


def measured_activations(
    seen: Mapping[tuple[str, int], list[Tensor]], layers: int
) -> dict[str, np.ndarray]:
    """The measures of a snapshot (L,), NaN if nothing was seen."""
    found = {f"activation_{name}": np.full(layers, np.nan) for name in REDUCED}
    for (name, layer), values in seen.items():
        found[f"activation_{name}"][layer] = REDUCED[name](torch.cat(values)).item()
    greatest = np.fmax(found["activation_first"], found["activation_other"])
    with np.errstate(divide="ignore", invalid="ignore"):
        found["activation_ratio"] = greatest / found["activation_median"]
    return found


def _spread(size_BSD: Tensor) -> Tensor:
    """Some of the numbers of every row, from all its positions and channels."""
    width = size_BSD.shape[2]
    flat = size_BSD.flatten(1)
    stride = max(1, flat.shape[1] // SAMPLE)
    # a stride that shares a factor with the width would read few of the channels
    while math.gcd(stride, width) > 1:
        stride += 1
    return flat[:, ::stride]


@contextmanager
def after_layers(model: Any, see: Callable[[int, Tensor], None]) -> Iterator[None]:
    """Call ``see(number, states_BSD)`` after every decoder layer of a transformers model, detached.

    Raises:
        ValueError: if the model has no decoder with a list of layers.
    """
    decoder = model
    if isinstance(model, PreTrainedModel):
        decoder = model.base_model
    layers = decoder._modules.get("layers")
    if not isinstance(layers, nn.ModuleList):
        raise ValueError(
            f"states are read after each decoder layer, but {type(model).__name__} keeps no list "
            "`layers` in its backbone; pass a DiffusionLM or a Llama-like transformers model"
        )

    def hook(number: int, module: nn.Module, args: tuple, out: Any) -> None:
        if not isinstance(out, Tensor):
            out = out[0]
        see(number, out.detach())

    with ExitStack() as stack:
        for number, module in enumerate(layers):
            stack.callback(module.register_forward_hook(partial(hook, number)).remove)
        yield


HOLDERS = ("added", "first", "early", "other")
"""Places of a main sink: an added one, the first token, the second to fourth tokens, a later
token.
"""


def measured_heads(
    received_RTLHK: np.ndarray,
    value_RTLK: np.ndarray,
    visible_RTK: np.ndarray,
    masked_RTS: np.ndarray,
    added: int,
    rule: Rule = DEFAULT,
) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """The measures of every layer (L,), and the mobility of all layers together.

    Args:
        received_RTLHK: column sums; keys begin with the added sinks.
        value_RTLK: norms of the values.
        visible_RTK: number of queries that see each key.
        masked_RTS: text positions that hold a mask: these are told apart from visible text when
            norms are compared.
        added: N.
        rule: definition of a sink.
    """
    queries = visible_RTK.max()
    text_RTLHS = received_RTLHK[..., added:]
    over = (0, 1, 3)
    states_RTS = np.where(masked_RTS, MASKED, COMMITTED)
    positions_T = np.full(received_RTLHK.shape[1], visible_RTK.max(), np.float32)
    rows = [
        facts(
            {"received": one, "visible": seen, "value_norm": norms, "positions": positions_T},
            states,
            rule=rule,
            added=added,
        )
        for one, seen, norms, states in zip(
            received_RTLHK, visible_RTK, value_RTLK, states_RTS, strict=True
        )
    ]
    found = {name: np.sum([row[name] for row in rows], axis=0) for name in SUMS}
    layers = {
        "sink_share": received_RTLHK[..., :added].sum(-1).mean(over) / queries,
        "top_text_share": text_RTLHS.max(-1).mean(over) / queries,
        "first_share": text_RTLHS[..., 0].mean(over) / queries,
        "sinks": ratio(*found["sum_sinks"]),
        "text_sinks": ratio(found["events"] - found["added_events"], found["mains"]),
        "value_added": ratio(*found["added_norm"]),
        "value_sink": ratio(*found["sink_norm"][:, COMMITTED]),
        "value_other": ratio(*found["rest_norm"][:, COMMITTED]),
        "value_masked": ratio(*(found["sink_norm"] + found["rest_norm"])[:, MASKED]),
    }
    main_RTLH = np.array([row["main"] for row in rows])
    counts = np.array([row["is_sink"] for row in rows]) > 0
    holder = np.digitize(main_RTLH - added, (0, 1, 4))
    layers["main_none"] = (~counts).mean(over)
    layers |= {
        f"main_{name}": (counts & (holder == place)).mean(over)
        for place, name in enumerate(HOLDERS)
    }
    overall = {}
    for name, heads in (
        ("mobility", "heads"),
        ("text_mobility", "text_heads" if added else "heads"),
    ):
        paths = np.array([row[heads][: len(MOTION)] for row in rows])
        fields = dict(zip(MOTION, paths.swapaxes(0, 1), strict=True))
        weight = np.where(np.isnan(fields["mobility"]), 0, fields["strength"] * fields["steps"])
        layers[name] = ratio(
            (weight * np.nan_to_num(fields["mobility"])).sum((0, 2)), weight.sum((0, 2))
        )
        overall[name] = summarised(fields).mobility
    return layers, overall


SUMS = ("sum_sinks", "events", "added_events", "mains", "added_norm", "sink_norm", "rest_norm")


LEVELS = (0.9, 0.7, 0.5, 0.3, 0.1)
"""Shares of a row that are masked."""

MEASURES: tuple[str, ...] = (
    # shares of attention: of added sinks, the greatest key of a head's text, the first token
    "sink_share",
    "top_text_share",
    "first_share",
    # sinks in a head, and those that are tokens of the text
    "sinks",
    "text_sinks",
    # share of heads whose main sink is there, or that have none; the five add up to 1
    *(f"main_{name}" for name in HOLDERS),
    "main_none",
    # chance that two levels have their main sinks apart, NaN without sinks; and of text alone
    "mobility",
    "text_mobility",
    # mean norms of the values of added sinks, of visible text that is a sink and is none, of masks
    "value_added",
    "value_sink",
    "value_other",
    "value_masked",
    # |x| of the residual stream after the layer: greatest, median over the text, and greatest in
    # the text over median; Sun et al. 2024 (arXiv 2402.17762)
    *(f"activation_{name}" for name in REDUCED),
    "activation_ratio",
)
"""Measures of every layer, NaN if there is no such thing."""


@torch.no_grad()
def measured(
    model: nn.Module,
    ids_RS: Tensor,
    *,
    causal: bool = False,
    given: int = 0,
    rule: Rule = DEFAULT,
) -> list[dict[str, Any]]:
    """Sinks, value norms and massive activations of a model on clean text: a row of `MEASURES` for
    the whole model (``layer`` -1) and one a layer.

    The model is left as it was: training mode, random generators, compiled forwards (it runs
    uncompiled meanwhile, in its own precision, without autocast).

    Args:
        model: a DiffusionLM, or a causal transformers model: that one reads the clean text, as with
            ``causal``.
        ids_RS: int64 rows of text without padding.
        causal: read the clean text from left to right: how a model looks during a causal warm
            start.
        given: tokens at the head of each row that are never masked, such as a start token.
        rule: definition of a sink.
    """
    model = _unwrapped(model)
    config: Any = model.config
    is_ours = isinstance(config, DiffusionLMConfig) and config.mask_token_id is not None
    # at -1 no id is masked
    mask_id = -1
    if is_ours and not causal:
        mask_id = config.mask_token_id
    device = next(model.parameters()).device
    shown_TRS = _shown(ids_RS.long().cpu(), mask_id, given)
    activations = defaultdict[tuple[str, int], list[Tensor]](list)
    with (
        _as_it_is(model, device),
        after_layers(model, partial(_note_states, activations)),
        trace(model) as recording,
    ):
        for shown_RS in shown_TRS:
            _run(model, shown_RS.to(device), is_ours, causal)
            recording.mark()
    received, values, visible = (
        recording.array(name).swapaxes(0, 1) for name in ("received", "value_norm", "visible")
    )
    masked = (shown_TRS == mask_id).numpy().swapaxes(0, 1)
    added = recording.prefix
    layers, mobility = measured_heads(received, values, visible, masked, added, rule)
    layers |= measured_activations(activations, received.shape[2])
    overall = {name: _overall(name, values_L) for name, values_L in layers.items()} | mobility
    # of all added sinks together, if every key drew alike
    length = ids_RS.shape[1]
    seen_S = np.full(length, length)
    if mask_id < 0:
        seen_S = np.arange(1, length + 1)
    beside = {"added": added, "even_share": float((added / (added + seen_S)).mean())}
    rows: list[dict[str, Any]] = [{"layer": -1, **beside, **overall}]
    for layer in range(received.shape[2]):
        here = {name: float(values_L[layer]) for name, values_L in layers.items()}
        rows.append({"layer": layer, **beside, **here})
    return rows


def _shown(ids_RS: Tensor, mask_id: int, given: int) -> Tensor:
    """Ids that the model reads, (T, R, S); without a mask (-1) the clean text, one level."""
    if mask_id < 0:
        return ids_RS[None]
    hidden_TRS = nested_masks(ids_RS[:, given:].shape)
    return torch.where(nn.functional.pad(hidden_TRS, (given, 0)), mask_id, ids_RS)


def nested_masks(shape: Sequence[int]) -> Tensor:
    """Masked positions bool (T, R, S), the most masked level first: each row masks round(level · S)
    tokens, at least one, in one order of its own.
    """
    rank_RS = torch.rand(shape, generator=torch.Generator().manual_seed(0)).argsort(1).argsort(1)
    return torch.stack([rank_RS < max(1, round(level * shape[1])) for level in LEVELS])


def _run(model: nn.Module, shown_BS: Tensor, is_ours: bool, causal: bool) -> None:
    """One forward that makes next to no logits."""
    if not is_ours:
        model(shown_BS, logits_to_keep=1, use_cache=False)
        return
    keep_BS = torch.zeros_like(shown_BS, dtype=torch.bool)
    keep_BS[:, -1] = True
    with running(shown_BS):
        model(shown_BS, logits_to_keep=keep_BS, causal=causal)


def _overall(name: str, values_L: np.ndarray) -> float:
    known = values_L[~np.isnan(values_L)]
    if not len(known):
        return float("nan")
    if name.startswith("activation") and name != "activation_median":
        return float(known.max())
    return float(known.mean())


def _unwrapped(model: Any) -> Any:
    """The model inside torch.compile's and data-parallel wrappers."""
    while True:
        inner = compiled_module(model)
        if isinstance(inner, nn.parallel.DistributedDataParallel):
            inner = inner.module
        if inner is model:
            return model
        model = inner


@contextmanager
def _as_it_is(model: Any, device: torch.device) -> Iterator[None]:
    """Look without a trace: evaluation mode, no gradients, no autocast, uncompiled; everything is
    put back.
    """
    with ExitStack() as stack:
        for module in model.modules():
            stack.callback(setattr, module, "training", module.training)
            # Module.compile() keeps the compiled call here and nothing else
            if module._compiled_call_impl is not None:
                stack.callback(setattr, module, "_compiled_call_impl", module._compiled_call_impl)
                module._compiled_call_impl = None
        # accelerate puts a forward that turns autocast on in the model's place, and keeps its own
        # one under this name
        if "_original_forward" in dir(model):
            stack.callback(setattr, model, "forward", model.forward)
            model.forward = model._original_forward
        model.eval()
        devices = [device] * (device.type == "cuda")
        stack.enter_context(torch.random.fork_rng(devices))
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.autocast(device.type, enabled=False))
        yield
