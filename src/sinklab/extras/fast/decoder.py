"""The fast decoder: a decoder's layers without the wrappers around them, and without states that
are not wanted.

One form for Llama, Qwen2 and Qwen3, in the last layer without the queries and the MLP of positions
with unwanted logits. Stock linear layers, norms and MLPs are called as functions of their weights;
anything else in their place (adapters, quantised projections) as the module it is. The slow twin is
the decoder's own forward.

On CUDA the partial evaluations of a block, which have the same shapes and buffers at every step,
are replayed as one graph in place of some 900 launches: the first of a shape runs as it is, the
second is recorded. An evaluation that cannot be recorded runs as it is, and that is the slow twin
of a record.
"""

# B batch, S canvas, W columns that run, Q columns wanted, E hidden size, H query
# heads, G key/value heads, D head dim, K keys
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.llama import modeling_llama
from transformers.models.qwen2 import modeling_qwen2
from transformers.models.qwen3 import modeling_qwen3

from sinklab.core import compat
from sinklab.core.attention.context import is_observed, is_watched, reads_wait, running
from sinklab.core.compat import attention_of
from sinklab.core.instrument.routes import TAPS, TapHook
from sinklab.core.instrument.tap import Tap
from sinklab.core.registry import fast_decoders
from sinklab.core.subject.canvas import Places
from sinklab.core.subject.head import Head
from sinklab.core.subject.masks import CanvasGeometry, take
from sinklab.core.subject.prefix import SinkPrefix
from sinklab.extras.fast.arithmetic import linear_for
from sinklab.extras.fast.attending import Heard, View, additive, rotated, told
from sinklab.extras.fast.compat import forward_hooks, has_global_hooks
from sinklab.lab.caching.blocks import BlockStore, narrowed
from sinklab.lab.caching.session import ColumnDenoiser, KeyValueStore, Outputs
from sinklab.lab.sink_logits import LogitPrefix

_LAYERS = (
    modeling_llama.LlamaDecoderLayer,
    modeling_qwen2.Qwen2DecoderLayer,
    modeling_qwen3.Qwen3DecoderLayer,
)
_ATTENTIONS = (
    modeling_llama.LlamaAttention,
    modeling_qwen2.Qwen2Attention,
    modeling_qwen3.Qwen3Attention,
)
_MLPS = (modeling_llama.LlamaMLP, modeling_qwen2.Qwen2MLP, modeling_qwen3.Qwen3MLP)
_NORMS = (modeling_llama.LlamaRMSNorm, modeling_qwen2.Qwen2RMSNorm, modeling_qwen3.Qwen3RMSNorm)
# Memories whose evaluations attend to all columns, as a trace reads them.
_OPEN_STORES = (type(None), SinkPrefix, LogitPrefix, KeyValueStore, BlockStore)


def _is_known(model: Any) -> bool:
    """Whether the model's layers are of a kind computed here. Checked before anything else of them
    is read.
    """
    layers = getattr(model.model, "layers", ())
    return bool(layers) and all(
        type(layer) in _LAYERS and type(layer.self_attn) in _ATTENTIONS for layer in layers
    )


class Layer:
    """One decoder layer. The functions it calls are looked up once: at these sizes a look-up costs
    as much as a kernel.
    """

    def __init__(self, layer: Any, gate: Any) -> None:
        attention = layer.self_attn
        self.input_norm = _norm(layer.input_layernorm)
        self.post_norm = _norm(layer.post_attention_layernorm)
        self.q_norm, self.k_norm = (
            _norm(getattr(attention, name)) if hasattr(attention, name) else None
            for name in ("q_norm", "k_norm")
        )
        self.q, self.k, self.v = (
            _stock(one) or one for one in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        # A gate multiplies through a hook on the output projection: that one is called as a module.
        self.gate, self.o = (
            gate,
            _added(attention.o_proj, None if gate is not None else _stock(attention.o_proj)),
        )
        self.mlp = _added(layer.mlp, _mlp(layer.mlp))
        self.index = attention.layer_idx
        self.dim = attention.head_dim
        self.scale = attention.scaling
        self.heads = attention.config.num_attention_heads
        self.groups = attention.config.num_key_value_heads

    def __call__(self, x_BWE: Tensor, view: View, memory: Any, wanted_Q: Tensor | None) -> Tensor:
        """States after this layer, (B, W, E), or (B, Q, E) at the wanted columns alone."""
        cos, sin = view.cos_BW1D, view.sin_BW1D
        batch, width = x_BWE.shape[:2]
        y_BWE = self.input_norm(x_BWE)
        k_BGKD = rotated(
            self.k(y_BWE).reshape(batch, width, self.groups, self.dim), self.k_norm, cos, sin
        )
        v_BGKD = self.v(y_BWE).reshape(batch, width, self.groups, self.dim).transpose(1, 2)
        if memory is not None:
            k_BGKD, v_BGKD = memory.update(k_BGKD, v_BGKD, self.index)
        if wanted_Q is not None:
            x_BWE, y_BWE = x_BWE.index_select(1, wanted_Q), y_BWE.index_select(1, wanted_Q)
            cos, sin = cos.index_select(1, wanted_Q), sin.index_select(1, wanted_Q)
            width, view = len(wanted_Q), view.of(wanted_Q, self.heads // self.groups)
        q_BHWD = rotated(
            self.q(y_BWE).reshape(batch, width, self.heads, self.dim), self.q_norm, cos, sin
        )
        if self.gate is not None:
            self.gate.pending = self.gate(y_BWE)
        out_BWA, mask = view.attend(q_BHWD, k_BGKD, v_BGKD, memory, self.index, self.scale)
        x_BWE = self.o(out_BWA, x_BWE)
        x_BWE = self.mlp(self.post_norm(x_BWE), x_BWE)
        if view.heard is not None:
            given = {"query": q_BHWD, "key": k_BGKD, "value": v_BGKD, "attn_mask": mask}
            view.heard.layer(self.index, given | {"scale": self.scale}, out_BWA, x_BWE)
        return x_BWE


def _norm(norm: Any) -> Callable[[Tensor], Tensor]:
    # transformers' norms round float64 to float32 on the way: here the result must be theirs.
    if type(norm) not in _NORMS or norm.weight.dtype == torch.float64:
        return norm
    weight, eps = norm.weight, norm.variance_epsilon
    shape, dtype, share = weight.shape, weight.dtype, 1 / len(weight)
    eps_1 = torch.tensor(eps, device=weight.device)
    # Only a GPU has torch.rms_norm as one kernel; on the CPU these five take half of its time.
    by_hand = weight.device.type == "cpu" and dtype == torch.float32

    def normed(x: Tensor) -> Tensor:
        if x.dtype != dtype:
            return norm(x)
        if not by_hand:
            return torch.rms_norm(x, shape, weight, eps)
        length = torch.linalg.vector_norm(x, 2, -1, True)
        return (x * torch.addcmul(eps_1, length, length, value=share).rsqrt_()).mul_(weight)

    return normed


def _stock(module: Any) -> Callable[[Tensor], Tensor] | None:
    """A stock linear layer, or a head that has a row for every id, as a function of its weights, or
    None: a quantiser stores a tensor of another class, which no kernel called by name knows.
    """
    is_plain = type(module) is nn.Linear or (
        type(module) is Head and module.vocab_size == module.out_features
    )
    return (
        linear_for(module.weight, module.bias)
        if is_plain and type(module.weight) is nn.Parameter
        else None
    )


def _added(
    module: Any, stock: Callable[[Tensor], Tensor] | None
) -> Callable[[Tensor, Tensor], Tensor]:
    """(y, x) -> x + module(y)."""
    if stock is None:
        return lambda y, x: x + module(y)

    def added(y: Tensor, x: Tensor) -> Tensor:
        # In place: nothing else holds what a stock layer made (under autocast it is narrower than
        # x).
        out = stock(y)
        return out.add_(x) if out.dtype == x.dtype else x + out

    return added


def _mlp(module: Any) -> Callable[[Tensor], Tensor] | None:
    """A stock gated MLP as a function of its weights, or None."""
    if type(module) not in _MLPS or module.config.hidden_act != "silu":
        return None
    gate, up, down = _stock(module.gate_proj), _stock(module.up_proj), _stock(module.down_proj)
    if gate is None or up is None or down is None:
        return None

    return lambda x_BWE: down(F.silu(gate(x_BWE), inplace=True).mul_(up(x_BWE)))


Compute = Callable[[Tensor, Tensor, Tensor, KeyValueStore], Tensor]
"""(x_BWE, columns_W, output_index_Q, memory) -> states (B, Q, E)."""


@dataclass(frozen=True, eq=False)
class Recorded:
    """A graph with the tensors that it reads, and the one that it writes."""

    graph: torch.cuda.CUDAGraph
    given: tuple[Tensor, Tensor, Tensor]
    states_BQE: Tensor

    @classmethod
    def of(
        cls, compute: Compute, memory: KeyValueStore, given: tuple[Tensor, Tensor, Tensor]
    ) -> Recorded:
        """Record one evaluation; nothing is computed. Raises RuntimeError for operations that no
        graph can hold.
        """
        x_BWE, columns_W, output_index_Q = (tensor.clone() for tensor in given)
        before, graph = memory.columns, torch.cuda.CUDAGraph()
        generator = torch.cuda.default_generators[x_BWE.device.index]
        drawn = torch.Generator(x_BWE.device)
        drawn.set_state(generator.get_state())
        # from here on the memory is written where the record's own columns say
        memory.columns = columns_W
        try:
            with (
                torch.cuda.device(x_BWE.device),
                torch.cuda.graph(graph, capture_error_mode="thread_local"),
            ):
                states_BQE = compute(x_BWE, columns_W, output_index_Q, memory)
        except RuntimeError:
            # after a recording that failed it would go on to draw for a graph
            generator.graphsafe_set_state(drawn)
            raise
        finally:
            memory.columns = before
        return cls(graph, (x_BWE, columns_W, output_index_Q), states_BQE)

    def __call__(self, given: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        """The states, valid until the next call."""
        for held, new in zip(self.given, given, strict=True):
            held.copy_(new)
        self.graph.replay()
        return self.states_BQE


def can_replay(x_BWE: Tensor, columns: Tensor, memory: Any) -> bool:
    """Whether this evaluation may become a graph: on CUDA, of some columns, into buffers that
    stay.
    """
    is_shared = type(memory) is KeyValueStore and memory.columns is columns
    return (
        x_BWE.is_cuda
        and is_shared
        and torch.is_inference_mode_enabled()
        and not torch.is_autocast_enabled("cuda")
        and not torch.cuda.is_current_stream_capturing()
    )


def replayed(
    compute: Compute,
    memory: KeyValueStore,
    x_BWE: Tensor,
    columns_W: Tensor,
    output_index_Q: Tensor,
) -> Tensor:
    """Result of ``compute``, by a graph from the third evaluation of a shape on; the memory keeps
    its graphs.
    """
    given = (x_BWE, columns_W, output_index_Q)
    shape = (*x_BWE.shape, len(output_index_Q))
    known = memory.graphs.get(shape)
    if known is None:
        memory.graphs[shape] = "seen"
        return compute(*given, memory)
    if known == "seen":
        try:
            known = Recorded.of(compute, memory, given)
        except RuntimeError as error:
            known = f"not recorded: {error}"
        memory.graphs[shape] = known
    return known(given) if isinstance(known, Recorded) else compute(*given, memory)


class FastDecoder:
    """The decoder of a model of known layers, and whether its result equals the plain decoder's
    now.

    It does for attention through SDPA, no dropout, nothing compiled, no hook or patched forward but
    our own, and no trace or intervention on the model; :meth:`is_faithful` is checked before every
    evaluation. Traces that do not ask for the model's own forward are told of each layer (`tap`).
    """

    records = True  # whether evaluations may become CUDA graphs

    def __init__(self, model: Any) -> None:
        decoder, modules = model.model, list(model.modules())
        gates = getattr(model, "gates", None) or [None] * len(decoder.layers)
        self.model, self.decoder, self.norm = model, decoder, _norm(decoder.norm)
        self.head: Callable[[Tensor], Tensor] = _stock(model.lm_head) or model.lm_head
        self.layers = [
            Layer(layer, gate) for layer, gate in zip(decoder.layers, gates, strict=True)
        ]
        self._shared = self.layers[0].heads // self.layers[0].groups
        self._is_stock = not any(
            "forward" in vars(module) or compat.is_compiled(module) for module in modules
        )
        self._hooks = [hooks for module in modules for hooks in forward_hooks(module)]
        self._tables: tuple[CanvasGeometry, View] | None = None

    def is_faithful(self) -> bool:
        """Whether this form may stand for the decoder now, and nobody listens."""
        return not is_watched(self.model) and self._is_usual()

    def tap(self) -> Tap | None:
        """The tap whose listeners are to be told of this form's evaluations; None if one of them,
        or somebody else, is to see the model's own, or changes it.
        """
        tap = TAPS.get(id(self.model))
        if tap is None or is_watched(self.model, 2) or not is_observed(self.model):
            return None
        is_free = not any(listener.exact for listener in tap.listeners)
        return tap if is_free and self._is_usual() else None

    def _is_usual(self) -> bool:
        decoder = self.decoder
        return (
            self._is_stock
            and not decoder.training
            and attention_of(decoder.config) == "sdpa"
            and not has_global_hooks()
            and all(
                _is_ours(hook) for hooks in filter(None, self._hooks) for hook in hooks.values()
            )
        )

    def __call__(
        self,
        x_BWE: Tensor,
        geometry: CanvasGeometry,
        columns: slice | Tensor,
        output_index_Q: Tensor,
        memory: Any,
        mask: Tensor | EllipsisType | None = ...,
        heard: Heard | None = None,
    ) -> Tensor:
        """Normed states (B, Q, E) at the wanted columns, from embeddings (B, W, E) of the columns
        that run.

        Args:
            geometry: of the canvas.
            columns: those that run; ``output_index_Q`` are the wanted ones among them.
            memory: its ``update`` returns the keys and values of all columns; None if those that
                run are all.
            mask: bool, broadcastable to (B, 1, W, K), or None for nothing blocked, in place of the
                canvas's.
            heard: see `View`.
        """
        whole = self._view(x_BWE, geometry)
        if (
            mask is ...
            and heard is None
            and self.records
            and isinstance(columns, Tensor)
            and can_replay(x_BWE, columns, memory)
        ):
            return replayed(partial(self._states, whole), memory, x_BWE, columns, output_index_Q)
        if mask is not ...:
            whole = replace(whole, mask_B1WK=None if mask is None else additive(mask, x_BWE.dtype))
        whole = replace(whole, heard=heard)
        return self._states(whole, x_BWE, columns, output_index_Q, memory)

    def _states(
        self,
        whole: View,
        x_BWE: Tensor,
        columns: slice | Tensor,
        output_index_Q: Tensor,
        memory: Any,
    ) -> Tensor:
        # the canvas's mask has all its rows, one that was given those that run
        is_whole = (
            whole.mask_B1WK is not None and whole.mask_B1WK.shape[2] == whole.cos_BW1D.shape[1]
        )
        tables: Any = {
            "cos_BW1D": take(whole.cos_BW1D, columns),
            "sin_BW1D": take(whole.sin_BW1D, columns),
        }
        view = replace(whole, **tables).of(columns if is_whole else slice(None), self._shared)
        for layer in self.layers[:-1]:
            x_BWE = layer(x_BWE, view, memory, None)
        if view.heard is not None:
            every_BWE = self.layers[-1](x_BWE, view, memory, None)
            return self.norm(every_BWE.index_select(1, output_index_Q))
        return self.norm(self.layers[-1](x_BWE, view, memory, output_index_Q))

    def _view(self, like: Tensor, geometry: CanvasGeometry) -> View:
        """The view of the whole canvas, computed once for all its evaluations."""
        if self._tables is None or self._tables[0] is not geometry:
            cos_BSD, sin_BSD = self.decoder.rotary_emb(like, geometry.position_ids_BS)
            mask = geometry.mask
            # Made additive once: SDPA would do it in every layer.
            added = mask if mask is None or mask.is_floating_point() else additive(mask, like.dtype)
            # x·cos + roll(x, D/2)·sin needs no negated copy of x
            first, second = sin_BSD[:, :, None].chunk(2, dim=-1)
            turned = torch.cat([-first, second], dim=-1)
            self._tables = geometry, View(cos_BSD[:, :, None], turned, added)
        return self._tables[1]


def _is_ours(hook: Any) -> bool:
    return isinstance(hook, TapHook) or getattr(hook, "__module__", "").startswith(
        ("sinklab.core.subject.", "sinklab.extras.fast.", "sinklab.lab.sink_logits")
    )


@fast_decoders.register("layers")
class FastDenoiser(ColumnDenoiser):
    """The denoiser of a model of known layers: by the fast decoder while that is faithful, else by
    the model's own forward.
    """

    _block: tuple[slice | Tensor, Tensor] | None = None

    @classmethod
    def serving(
        cls, model: Any, attention_BS: Tensor | None, plain: bool = False
    ) -> FastDenoiser | None:
        """The denoiser of this model; None if a kind of layer is not known, or the model is divided
        over processes.
        """
        is_served = not plain and _is_known(model) and not compat.is_divided(model)
        return cls(model, attention_BS) if is_served else None

    @cached_property
    def _fast(self) -> FastDecoder:
        return FastDecoder(self.model)

    @property
    def is_fast(self) -> bool:  # type: ignore[override]
        """Whether the fast decoder stands for the model's own in an evaluation made now."""
        return self._fast.is_faithful()

    def _tap(self, store: Any) -> Tap | None:
        """The tap to be told of an evaluation with this memory; None for one that chooses keys, and
        finds queries in its own way.
        """
        return self._fast.tap() if type(store) in _OPEN_STORES else None

    def outputs(self, at: Places) -> Outputs:
        """The states to compute: where finding those that are wanted would wait for the device,
        those of the whole block.
        """
        if at.columns is None or not reads_wait(at.wanted_BS.device):
            return super().outputs(at)
        if self._block is None or self._block[0] is not at.columns:
            columns = self.with_sources(at.columns)
            if isinstance(columns, slice):
                columns = torch.arange(columns.start, columns.stop, device=at.wanted_BS.device)
            self._block = at.columns, columns
        return Outputs.of(at, self.sources(at), self._block[1])

    def full_pass(self, ids_BS: Tensor, at: Places, store: Any = None) -> Tensor:
        """Logits (M, V) with all columns computed."""
        wanted_BS = at.wanted_BS
        geometry = self.geometry(ids_BS, wanted_BS)
        store = store or geometry.sinks
        is_served = self.is_fast or self._tap(store) is not None
        if not is_served:
            return super().full_pass(ids_BS, at, store)
        every = slice(0, ids_BS.shape[1])
        mask: Tensor | EllipsisType | None = ...
        seen = self.visible(wanted_BS)
        if seen is not None:
            mask = narrowed(geometry, seen).mask
        outputs = self.outputs(at)
        states_BQE = self.states(ids_BS, every, outputs.columns_Q, store, mask)
        return self.head(outputs.of_states(states_BQE))

    def states(
        self,
        ids_BS: Tensor,
        columns: slice | Tensor,
        output_index_Q: Tensor,
        store: Any,
        mask: Tensor | EllipsisType | None = ...,
    ) -> Tensor:
        """Final states (B, Q, E); arguments as of the plain denoiser."""
        tap = self._tap(store)
        if tap is None and not self.is_fast:
            return super().states(ids_BS, columns, output_index_Q, store, mask)
        assert self._geometry is not None, "geometry() comes first"
        is_partial = type(store) is KeyValueStore and store.columns is columns
        may_replay = is_partial and tap is None and mask is ... and reads_wait(ids_BS.device)
        if may_replay and isinstance(columns, slice):
            # numbers on the device: the same kernels for every block
            columns = torch.arange(columns.start, columns.stop, device=ids_BS.device)
            store.columns = columns
        embeds_BWE = self.model.model.embed_tokens(take(ids_BS, columns))
        given = (embeds_BWE, self._geometry, columns, output_index_Q, store, mask)
        if tap is None:
            return self._fast(*given)
        with running(ids_BS, columns), told(tap) as heard:
            return self._fast(*given, heard=heard)

    def head(self, states: Tensor) -> Tensor:
        """Logits of states."""
        is_served = self.is_fast or self._fast.tap() is not None
        return self._fast.head(states) if is_served else super().head(states)
