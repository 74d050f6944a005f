"""The conformance suites of added sinks and of checkpoint families."""

# B batch, L text, N sinks, K = N + L, G key/value heads, D head dim, A = G × D, M positions that
# are not padding
import copy
import json
import math
import shutil
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from conformance.values import refusal, tiny_model
from masked_twin import masked_form
from sinklab.core.attention.context import watching
from sinklab.core.compat import stated
from sinklab.core.instrument.tracing import trace
from sinklab.core.registry import caches, sinks
from sinklab.lab.checkpoints import describe, load, save_sink
from sinklab.lab.checkpoints import families as readers
from sinklab.lab.checkpoints.materialize import empty_model, sources_of
from sinklab.lab.checkpoints.weights import open_weights
from sinklab.lab.sink_logits import logits_of
from sinklab.lab.training.model import freeze

Form = Callable[[Any, Tensor, Tensor], Tensor]
"""Logits of a model from ids and places that are not padding."""


def check_sink(kind: str) -> None:
    """Hold a kind of added sink to the contract of models, training, decoding and traces, with tiny
    random models.

    On either side that it can stand on: its parameters have the shapes that it names, and a new
    model's other weights are those of a model without it; the prefix equals its slow twin (the
    masked form of Eq. 6 for a token, a cache of transformers filled by hand for keys and values)
    and, for a token, the form in which it is trained within the sequence, in outputs and gradients;
    every parameter gets a gradient; training it alone is training its parameters; a saved one loads
    again bit for bit, as a model and as a sink file; under every cache a watched model, which takes
    the plain path, writes the same, and with everything recomputed at each step the same as without
    a cache; a trace shows a column a sink.

    Args:
        kind: as ``sink_kind`` of a model's config: a name in :data:`sinklab.core.registry.sinks`,
            with options if it has some.

    Raises:
        AssertionError: for the first of these that does not hold.
    """
    for side in sinks.parse(kind).sides:
        model = tiny_model(sink_kind=kind, sink_count=2, sink_side=side)
        _check_parameters(model, tiny_model())
        _check_slow_twin(model.double(), torch.ones(2, 10, dtype=torch.long))
        _check_slow_twin(model, torch.tensor([[0] * 3 + [1] * 7, [1] * 8 + [0] * 2]))
    _check_saved(tiny_model(sink_kind=kind, sink_count=2, sink_side=side))
    _check_decoding(tiny_model(sink_kind=kind, sink_count=2))


def _check_parameters(model: Any, plain: Any) -> None:
    sink = model.config.sink
    ours = dict(model.named_parameters())
    theirs = dict(plain.named_parameters())
    assert ours.keys() - theirs.keys() == {*sink.tensors}, (
        f"the model has other new parameters than {sink.tensors}"
    )
    for name in sink.tensors:
        assert ours[name].shape == sink.shape(model.config, name), (
            f"{name} has another shape than the kind says"
        )
        assert ours[name].isfinite().all(), f"{name} is not initialised"
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs), (
        "a sink changes how other weights start"
    )
    limit = model.config.backbone.max_position_embeddings
    assert model.config.text_positions == limit - 2 * sink.positions, (
        "text and sinks do not fill the context"
    )
    trained = freeze(copy.deepcopy(model), "sink")
    assert sorted(trained) == sorted(sink.tensors), f"training the sink alone would train {trained}"


def _check_slow_twin(model: Any, real_BL: Tensor) -> None:
    sink = model.config.sink
    forms: dict[str, Form] = {}
    if sink.positions:
        forms = {"slow twin": masked_form}
    elif bool(real_BL.all()):
        forms = {"slow twin": _filled_cache}
    expected = _outcome(model, _with_prefix, real_BL)
    for what, form in forms.items():
        for name, found in _outcome(model, form, real_BL).items():
            close = (found - expected[name]).abs().max() <= 1e-5 * max(
                1, float(expected[name].abs().max())
            )
            assert close, f"the prefix does not equal its {what}: {name} differs"
    for name in sink.tensors:
        assert name in expected and expected[name].abs().max() > 0, f"{name} gets no gradient"


def _with_prefix(model: Any, ids_BL: Tensor, real_BL: Tensor) -> Tensor:
    return model(ids_BL, real_BL).logits


def _outcome(model: Any, form: Form, real_BL: Tensor) -> dict[str, Tensor]:
    """Logits at positions that are not padding, and the gradients of a function of them."""
    model.zero_grad()
    ids_BL = torch.arange(1, 1 + real_BL.numel()).view_as(real_BL)
    logits_MV = form(model, ids_BL, real_BL)[real_BL.bool()]
    torch.manual_seed(1)
    (logits_MV * torch.randn_like(logits_MV)).sum().backward()
    gradients = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    return {"logits": logits_MV.detach(), **gradients}


def _filled_cache(model: Any, ids_BL: Tensor, real_BL: Tensor) -> Tensor:
    """The decoder with a cache of transformers that holds the prefix; for texts without padding."""
    prefix = model.sink_prefix(ids_BL.shape[1])
    cache = DynamicCache(config=model.config.backbone)
    for layer, (keys, values) in enumerate(zip(prefix.keys, prefix.values, strict=True)):
        cache.update(*(states.expand(len(ids_BL), -1, -1, -1) for states in (keys, values)), layer)
    positions = torch.arange(ids_BL.shape[1])[None]

    def give(attention: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        added_HN = logits_of(prefix, attention.layer_idx)
        mask_HLK = added_HN.new_zeros(
            len(added_HN), ids_BL.shape[1], prefix.count + ids_BL.shape[1]
        )
        mask_HLK[..., : prefix.count] += added_HN[:, None]
        return args, kwargs | {"attention_mask": mask_HLK[None]}

    layers = []
    if logits_of(prefix) is not None:
        layers = model.model.layers
    with ExitStack() as hooks:
        for layer in layers:
            hooks.callback(layer.self_attn.register_forward_pre_hook(give, with_kwargs=True).remove)
        out = model.model(ids_BL, past_key_values=cache, position_ids=positions, is_causal=False)
    return model.lm_head(out.last_hidden_state)


def _check_saved(model: Any) -> None:
    ids = torch.arange(12)[None]
    sink = model.config.sink
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        model.save_pretrained(folder)
        expected = model(ids).logits
        assert torch.equal(load(folder).model(ids).logits, expected), (
            "a model that was saved has other logits"
        )
        file = save_sink(model, Path(folder, "sink.safetensors"))
        plain = load(folder, sink_kind="none", sink_count=0).model
        assert not {*sink.tensors} & plain.state_dict().keys(), (
            "a sink that is taken away leaves tensors behind"
        )
        plain.save_pretrained(Path(folder, "plain"))
        again = load(Path(folder, "plain"), sink=file).model
        assert torch.equal(again(ids).logits, expected), "a sink from a file gives other logits"


def _check_decoding(model: Any) -> None:
    ids = torch.arange(1, 7)[None]
    decoding = {"max_new_tokens": 8, "block_length": 4, "seed": 0}
    count = model.config.sink_count
    for cache in caches:
        model.config.block_length = None
        # an exact one is for attention in blocks
        is_exact = stated(caches[cache], "is_exact")
        if is_exact:
            model.config.block_length = 4
        with watching(model):
            uncached = model.generate(ids, **decoding)
        written = model.generate(ids, cache=cache, **decoding)
        with trace(model) as recording:
            watched = model.generate(ids, cache=cache, **decoding)
        assert torch.equal(written, watched), (
            f"under the cache {cache}, watched and unwatched models differ"
        )
        assert recording.prefix == count, (
            f"a trace under the cache {cache} sees {recording.prefix} sinks, not {count}"
        )
        columns = {received.shape[-1] for received in recording.received}
        assert columns == {count + 14}, (
            f"a trace under the cache {cache} has {columns} columns, not {count} + 14"
        )
        if not is_exact:
            written = model.generate(ids, cache=f"{cache}:refresh_every=1", **decoding)
        assert torch.equal(written, uncached), (
            f"under the cache {cache}, recomputing everything changes the text"
        )


def check_family(name: str, folder: str | Path) -> None:
    """Hold a checkpoint family to the contract of the loader, with a tiny checkpoint of it.

    The config is read without weights; a field that is absent, of another kind or that cannot be
    represented is refused by name; every tensor of the model comes from exactly one of the
    checkpoint, and none is left over; a saved model loads again, bit for bit; no Python file of the
    checkpoint is run.

    Args:
        name: of the family in :data:`sinklab.lab.registry.families`.
        folder: a checkpoint of that family with safetensors, which stays as it is.

    Raises:
        AssertionError: for the first of these that does not hold.
    """
    with tempfile.TemporaryDirectory() as temporary:
        here = Path(shutil.copytree(folder, Path(temporary, "checkpoint")))
        config = readers.read_config(here / "config.json", name)
        assert describe(here / "config.json").published_family == name, (
            f"the config is not recognised as {name}"
        )
        _check_fields(name, here, config)
        # transformers reads the tensors of others, under names old and new
        if not readers.known_families()[name].own_class:
            _check_tensors(here, config)
        # a Python file that the config names is not run
        ran = here / "ran"
        (here / "code_x.py").write_text(f"open({str(ran)!r}, 'w')\n")
        kinds = ("AutoConfig", "AutoModel", "AutoModelForCausalLM")
        named = dict.fromkeys(kinds, "code_x.Thing")
        (here / "config.json").write_text(json.dumps({**config, "auto_map": named}))
        loaded, again = load(here), Path(temporary, "again")
        assert not ran.exists(), "code of the checkpoint was run"
        loaded.model.save_pretrained(again)
        ids = torch.arange(min(8, loaded.model.config.get_text_config().vocab_size))[None]
        logits = []
        for one in (loaded, load(again)):
            with torch.inference_mode(), torch.random.fork_rng(devices=[]):
                # one that renoises draws its canvas: the same twice
                torch.manual_seed(0)
                logits.append(one.model(ids).logits)
        assert torch.equal(*logits), "a model that was saved and loaded again has other logits"


def _check_fields(name: str, folder: Path, config: dict) -> None:
    """Every field, absent or of another kind, is read all the same or refused with a ValueError."""

    def configured(config: dict) -> None:
        readers.configured(readers.read(config, str(folder)), {}, str(folder))

    def refused(config: dict) -> str:
        return refusal(ValueError, configured, config)

    for field in readers.known_families()[name].represented:
        said = refused({**config, field: "a value that no checkpoint has"})
        assert field in said, (
            f"a value of {field} that cannot be represented is not refused by name: {said!r}"
        )
    for field in config:
        refused({key: value for key, value in config.items() if key != field})
        refused({**config, field: {"of": "another kind"}})


def _check_tensors(folder: Path, config: dict) -> None:
    weights = open_weights(folder, str(folder))
    shapes = {one: stored.shape for one, stored in weights.items()}
    plan = readers.read(config, str(folder), shapes)
    model = empty_model(readers.configured(plan, {}, str(folder)), str(folder))
    try:
        sources = sources_of(plan, model, weights, {}, str(folder))
    except ValueError as error:
        raise AssertionError(
            f"the plan names other tensors than the checkpoint has, see tensor_names: {error}"
        ) from error
    taken: dict[str, int] = {}
    for piece in sources.values():
        for name in piece.names:
            taken[name] = taken.get(name, 0) + piece.like.numel() // len(piece.names)
    for name, used in taken.items():
        numbers = math.prod(shapes[name])
        assert used == numbers, f"{used} of the {numbers} numbers of {name} are used"
