"""Every statistic of a trace and what every rule makes of received attention, on two layers: full,
causal and under a cache that keeps keys; and the dims of what a recording holds.

Models and texts are those of removals.py: random weights in float64, two rows with padding on both
sides, masked, committed and given positions. One model has all statistics; those with an added
sink, a gate or a logit sink have the ones that these change. Flags of a rule are written as the
keys that it takes, a character each, heads apart by a comma. Under a cache that keeps keys only
forwards that run some of the queries are recorded. Besides: attention read causally, by
windows and by the last row; models that attend otherwise (score caps, sink logits, encoders, a
module of torch); rules on the arrays of a run folder.

A recording is float32: numbers are held to the digits that it has.
"""

from typing import Any

import torch
from removals import FIGURES, MODELS, PARTS, ROWS, canvas_of, draw, steps_of, tiny
from transformers import (
    BertConfig,
    BertForMaskedLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)

import sinklab
from frozen import Cells

TOLERANCE = 3e-6
STATISTICS = (
    "received",
    "received_by_state",
    # the eight of the default are more than these texts have
    "received_from_masked:least=1",
    "received_by_window",
    "last_row",
    "value_norm",
    "key_norm",
    "value_norm_by_head",
    "key_norm_by_head",
    "key_cosine",
    "drift",
    "drift:of=value",
    "head_output",
    "row_entropy",
    "row_logsumexp",
    "output_norm",
    "noop_bound",
    "massive_activations",
    "outliers",
    "layer_similarity",
)
OF_CALLS = ("received", "last_row", "value_norm", "row_entropy", "row_logsumexp", "output_norm")
"""What is measured of attention alone, and of the further models."""
RULES = (
    "excess",
    "excess:epsilon=1",
    "excess:epsilon=0.2,scale=mean",
    "excess:epsilon=1.5,scale=zscore",
    "excess:epsilon=10,scale=percent",
    "gu",
    "gu:weight=0.1",
    "top",
    "top:k=2",
)
FORWARDS = {
    "full": ({}, {"steps": 2}),
    "causal": ({"attention": "causal"}, {"steps": 2}),
    "first alone": ({"attention": "first_alone"}, {"steps": 2}),
    "guided": ({}, {"steps": 2, "cfg_scale": 0.5}),
    "prefix": ({}, {**PARTS, "steps": 4, "cache": "prefix"}),
    "dual": ({}, {**PARTS, "steps": 4, "cache": "dual"}),
}
"""Settings of the model and of the decoding."""
CACHED = (1, 3)
"""Steps that read a cache: the first of a block fills it, by a forward of the whole canvas."""
SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
KINDS = {
    "llama": (LlamaForCausalLM, LlamaConfig, {"num_key_value_heads": 2}),
    "eager": (LlamaForCausalLM, LlamaConfig, {"num_key_value_heads": 2}),
    "caps": (
        Gemma2ForCausalLM,
        Gemma2Config,
        {"num_key_value_heads": 2, "head_dim": 4, "attn_logit_softcapping": 2.0},
    ),
    "sink logits": (
        GptOssForCausalLM,
        GptOssConfig,
        {"num_key_value_heads": 2, "head_dim": 4, "num_local_experts": 2, "sliding_window": 8},
    ),
    "masked": (BertForMaskedLM, BertConfig, {}),
}


def cells(group: str) -> Cells:
    """The cells of a model, or those of other models and of run folders."""
    for name, value in others() if group == "others" else of_model(group):
        yield f"{group}/{name}", value


def of_model(group: str) -> Cells:
    """Statistics, flags and dims of a model in every forward."""
    for forward, (settings, how) in FORWARDS.items():
        # the forward of a guided step that is recorded has no guidance: few of its numbers are held
        names = STATISTICS if group == "gqa" and forward != "guided" else OF_CALLS
        if group != "gqa" and forward not in ("full", "dual"):
            continue
        model, canvas = tiny(**MODELS[group], **settings), canvas_of(ROWS)
        only = {"steps": CACHED} if "cache" in how else {}
        with sinklab.trace(model, names, canvas=canvas, maps=[(1, 1, 2)], **only) as recording:
            for step in steps_of(model, canvas, how):
                recording.mark(step)
        yield from numbers(forward, recording, names)
        yield from flags(forward, recording)
        yield f"{forward}/dims", dims(recording, names)


def numbers(forward: str, recording: Any, names: tuple[str, ...]) -> Cells:
    """What was recorded, step by step; sums of the arrays that are longer than a page."""
    for name in names:
        steps = torch.from_numpy(recording.array(name))
        yield f"{forward}/{name}", [*map(digits_of, steps)]
    for name in ("visible", "positions"):
        yield f"{forward}/{name}", [digits_of(one) for one in getattr(recording, name)]


def digits_of(values: torch.Tensor) -> Any:
    """Values with the digits that float32 has; of many numbers the sums over the last axis."""
    if values.numel() > 300:
        values = values.double().nansum(-1)
    return [float(f"{one:.8g}") for one in values.double().flatten().tolist()]


def flags(forward: str, recording: Any) -> Cells:
    """Keys that each rule calls sinks, by step, row and layer: in what a recording has; and in its
    arrays, scaled as if all positions had run.
    """
    names = ("received", "visible", "positions")
    received, visible, positions = map(recording.array, names)
    arrays = {"visible": visible[:, :, None, None], "positions": positions[..., None, None]}
    for rule in RULES:
        found = [
            sinks_of(received_BLHS, rule, visible=visible_BS[:, None, None])
            for received_BLHS, visible_BS in zip(
                recording.values("received"), recording.visible, strict=True
            )
        ]
        yield f"{forward}/sinks/{rule}", found
        yield f"{forward}/sinks of arrays/{rule}", [sinks_of(received, rule, **arrays)]


def sinks_of(received: Any, rule: str, visible: Any, positions: Any = None) -> list[str]:
    """Keys of each head that are sinks: the one place to adapt to another way to ask a rule."""
    from sinklab.core.registry import rules
    from sinklab.core.sinks import find_sinks

    found = find_sinks(received, rules.parse(rule), visible, positions)
    heads = torch.as_tensor(found).flatten(0, -3).tolist()
    return [",".join(keys_of(row) for row in layer) for layer in heads]


def keys_of(row: list[bool]) -> str:
    """A character a key."""
    return "".join(FIGURES[key] for key, is_sink in enumerate(row) if is_sink)


def dims(recording: Any, names: tuple[str, ...]) -> dict[str, Any]:
    """Axes, shapes and types of all that a recording holds; positions and states themselves."""
    found: dict[str, Any] = {}
    for name in names:
        array = recording.array(name)
        found[name] = [list(recording.dims(name)), list(array.shape), str(array.dtype)]
    for name in ("visible", "positions", "columns", "query_state", "key_state"):
        steps = getattr(recording, name)
        found[name] = [[list(one.shape), str(one.dtype), one.flatten()] for one in steps]
    for name in ("layers", "forwards_per_step"):
        found[name] = [*map(str, getattr(recording, name))]
    # every layer is recorded, and the marks are the steps themselves
    found["layer_indices"] = [*map(str, range(len(recording.layers)))]
    found["step_numbers"] = [str(step.index) for step in recording.steps]
    found["head_indices"] = [*map(str, range(recording.received[0].shape[2]))]
    found["prefix"] = recording.prefix
    found["map"] = digits_of(recording.map(1, 1, 2))
    return found


def others() -> Cells:
    """Models that attend otherwise, a causal one by windows, and rules on arrays of a folder."""
    ids_BS = torch.tensor([[5, 9, 3, 7, 4, 8, 11, 2, 6, 10], [0, 0, 12, 3, 5, 9, 7, 4, 8, 6]])
    for kind in KINDS:
        model = model_of(kind)
        names = (*OF_CALLS, "received_by_window") if kind == "llama" else OF_CALLS
        # padding on the left sees no key, of which eager attention makes NaN in float64
        given_BS = ids_BS.roll(-2, -1) if kind == "eager" else ids_BS
        try:
            with sinklab.trace(model, names) as recording, torch.no_grad():
                model(given_BS, attention_mask=(given_BS != 0).long())
        except ValueError:
            yield f"{kind}/refused", "refused: ValueError"
            continue
        yield from numbers(kind, recording, names)
        yield from flags(kind, recording)
    layer = torch.nn.MultiheadAttention(16, 4, batch_first=True).double().eval()
    draw(layer)
    states_BSD = torch.randn(
        2, 9, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    # with gradients: without them torch takes a path of its own, which is refused
    with sinklab.trace(layer) as recording:
        layer(states_BSD, states_BSD, states_BSD, need_weights=False)
    yield from numbers("module of torch", recording, ("received", "value_norm"))
    yield from of_runs()


def model_of(kind: str) -> Any:
    """A tiny model of transformers in float64, its weights drawn here."""
    model_type, config_type, more = KINDS[kind]
    torch.manual_seed(0)
    config = config_type(**SIZES, **more, max_position_embeddings=32, pad_token_id=0)
    if kind in ("eager", "caps", "sink logits"):
        config._attn_implementation = "eager"
    model = model_type(config).double().eval()
    draw(model)
    return model


def of_runs() -> Cells:
    """Sinks in run folders by each rule, of a model that denoises and of a causal one."""
    for name in ("tiny", "tiny-causal"):
        lm = sinklab.load(name, dtype="float64")
        own = {"block_length": 2} if name == "tiny" else {}
        run = lm.watch("The house stood at the end of a", 4, statistics=("received",), **own)
        for rule in ("excess:epsilon=1", "gu:weight=0.2", "top:k=2"):
            found = run.with_rule(rule).sinks()
            yield (
                f"runs/{name}/{rule}",
                {
                    "columns": [*found.columns],
                    "sinks": len(found),
                    "received": float(f"{found['received'].sum():.5g}"),
                    "positions": found.groupby("layer")["position"].sum().tolist(),
                },
            )
        xarray = run.to_xarray()
        yield (
            f"runs/{name}/xarray",
            {
                str(name): [list(one.dims), list(one.shape), one.dtype.kind]
                for name, one in xarray.variables.items()
            },
        )
