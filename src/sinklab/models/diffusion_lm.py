"""A diffusion language model: any Llama, Qwen2 or Qwen3 decoder made bidirectional, with an optional sink and gate."""

# B batch, S sequence, N sinks, D hidden size, V vocabulary, M wanted positions (row-major), K keys = N + S
from __future__ import annotations

from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModel, PreTrainedModel
from transformers.modeling_outputs import MaskedLMOutput

from sinklab.models import gate as gate_module
from sinklab.models import masks
from sinklab.models.config import DiffusionLMConfig
from sinklab.models.denoising import ModelDenoiser
from sinklab.models.generation import GenerateByDenoising
from sinklab.models.head import Head, LossOptions, LossTargets, ResizableVocabulary
from sinklab.models.sinks import prefix as sink_module
from sinklab.models.sinks.base import tensors_of
from sinklab.models.sinks.prefix import InSequence, SinkPrefix


def _round_to_bfloat16(module: nn.Module, args: tuple, tables: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """The hook that rounds the cosines and sines of a decoder's rotary embedding."""
    return tuple(table.bfloat16().to(table.dtype) for table in tables)


class DiffusionLM(GenerateByDenoising, ResizableVocabulary, PreTrainedModel):
    """Predicts the tokens under [MASK] from both sides.

    The backbone's tensors keep their usual names (``model.layers.…``, ``lm_head.weight``); the sink adds the tensors
    of its kind (``sink_embeddings`` (N, D) of a token), the gate ``gates.i``. The sink enters every layer as a
    key/value prefix, which equals the masked (L + N)² form of Eq. 6 exactly and needs no attention mask.
    """

    config_class = DiffusionLMConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    sink_form = "auto"
    """How sink tokens are trained, with equal results: ``prefix`` (run alone, as at inference), ``sequence`` (run with
    the text, which spares a GPU many small kernels), or ``auto``: the second on CUDA.
    """
    _no_split_modules = ["LlamaDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer"]  # noqa: RUF012
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: DiffusionLMConfig) -> None:
        super().__init__(config)
        backbone = config.backbone
        self.model = AutoModel.from_config(backbone)
        self.lm_head = Head(backbone.hidden_size, config.output_vocab_size or backbone.vocab_size, backbone.vocab_size)
        if config.rope_dtype == "bfloat16":
            self.model.rotary_emb.register_forward_hook(_round_to_bfloat16)
        sink_module.attach(self.model)
        if (sink := config.sink) is not None:
            for name in sink.tensors:
                self.register_parameter(name, nn.Parameter(torch.empty(sink.shape(config, name))))
        if config.gate != "none":
            self.gates = nn.ModuleList()
            for attention in (layer.self_attn for layer in self.model.layers):
                gate = gate_module.Gate(backbone.hidden_size, attention.o_proj.in_features, config.gate_bias)
                gate_module.attach(attention, gate)
                self.gates.append(gate)
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        std = self.config.backbone.initializer_range
        # transformers.initialization skips tensors that a checkpoint has already filled
        from transformers import initialization as init

        if isinstance(module, nn.Linear | gate_module.Gate):
            init.normal_(module.weight, mean=0.0, std=std)
            if module.bias is not None:
                init.constant_(module.bias, getattr(module, "bias_start", 0.0))
        elif module is self and (sink := self.config.sink) is not None:
            for name in sink.tensors:
                # a copy, which a kind may fill by any function of torch
                started = torch.empty_like(self.get_parameter(name))
                sink.initialize(name, started, std)
                init.copy_(self.get_parameter(name), started)

    @classmethod
    def from_backbone(cls, causal_lm: PreTrainedModel, **settings: Any) -> DiffusionLM:
        """A DLM that starts from the weights of an autoregressive model (``settings`` are fields of the config).

        Raises:
            ValueError: if the model is not of a supported type.
        """
        fields = {**causal_lm.config.to_dict(), "dtype": causal_lm.dtype}
        # not .to(dtype): that would round the rotary frequencies too
        model: Any = cls._from_config(DiffusionLMConfig(backbone=fields, **settings), dtype=causal_lm.dtype)
        missing, unexpected = model.load_state_dict(causal_lm.state_dict(), strict=False)
        ours = (*tensors_of(model.config), "gates.")
        if unexpected or any(not name.startswith(ours) for name in missing):
            raise ValueError(f"the backbone's tensors do not fit: missing {missing}, surplus {unexpected}")
        return model

    def _set_gradient_checkpointing(  # type: ignore[override]
        self, enable: bool = True, gradient_checkpointing_func: Any = checkpoint, **settings: Any
    ) -> None:
        """What every way of turning checkpointing on ends in; the sink's prefix survives it.

        Raises:
            ValueError: for reentrant checkpointing, which loses the gradient of the sink.
        """
        if enable and getattr(gradient_checkpointing_func, "keywords", {}).get("use_reentrant", True):
            raise ValueError(
                "gradient checkpointing with use_reentrant=True drops the gradient of the sink; "
                "turn it on with use_reentrant=False"
            )
        super()._set_gradient_checkpointing(enable, gradient_checkpointing_func, **settings)

    def sink_prefix(self, length: int, lengths_B: Tensor | None = None) -> SinkPrefix | None:
        """Keys and values of the sinks for texts of this length (or these, if rows differ); None without a sink."""
        sink = self.config.sink
        return None if sink is None else sink.prefix(self, length, lengths_B)

    def hidden_states(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        sink_prefix: SinkPrefix | None = None,
        causal: bool = False,
        visible: Tensor | None = None,
    ) -> Tensor:
        """Final normed states (B, S, D) of the backbone; arguments as in :meth:`forward`."""
        if input_ids.ndim != 2 or input_ids.shape[1] == 0:
            raise ValueError(f"input_ids must have shape (B, S) with S ≥ 1, but have {tuple(input_ids.shape)}")
        length = input_ids.shape[1]
        if length > (limit := self.config.text_positions):
            raise ValueError(
                f"the sequence has {length} tokens, but the model's context is {limit}; shorten the prompt or canvas"
            )
        real_BS = masks.real_positions(input_ids, attention_mask)
        lengths_B = None if real_BS is None else real_BS.sum(dim=1)
        position_ids = masks.position_ids(real_BS, length, start=self.config.text_start, device=input_ids.device)
        embeds_BSD = self.model.embed_tokens(input_ids)
        sinks, sink = self.config.sink_count, self.config.sink
        prefix: Any = sink_prefix
        in_sequence = prefix is None and sink_module.runs_in_sequence(self)
        if in_sequence and sink is not None:
            prefix = InSequence(sinks, sink.values)
            sinks_NE = sink.embeddings(self)
            embeds_BSD = sink_module.prepended(sinks_NE, embeds_BSD)
            sink_ids = sink_module.positions(self.config, length, lengths_B, sinks_NE.device)
            position_ids = sink_module.prepended(sink_ids, position_ids)
            # transformers takes positions that start anew for a second text, which a causal pass would keep apart
            needs_mask = causal and self.config.sink_side == "end"
        else:
            prefix = self.sink_prefix(length, lengths_B) if prefix is None else prefix
            has_logits = sink_module.logits_of(prefix) is not None
            needs_mask = has_logits or (prefix is not None and masks.transformers_makes_one(self.model))
        if needs_mask and real_BS is None:
            real_BS = torch.ones(1, length, dtype=torch.bool, device=embeds_BSD.device)
        mask = masks.attention_mask(
            real_BS,
            length,
            sinks=sinks,
            causal=causal,
            backend=self.model.config._attn_implementation,
            like=embeds_BSD,
            visible=visible,
            in_sequence=in_sequence,
        )
        out = self.model(
            inputs_embeds=embeds_BSD,
            attention_mask=mask,
            position_ids=position_ids,
            use_cache=False,
            is_causal=causal,
            **({} if prefix is None else {"sink_prefix": prefix}),
        )
        return out.last_hidden_state[:, sinks:] if in_sequence else out.last_hidden_state

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        logits_to_keep: Tensor | None = None,
        sink_prefix: SinkPrefix | None = None,
        causal: bool = False,
        *,
        visible: Tensor | None = None,
        labels: Tensor | None = None,
        **loss: Unpack[LossOptions],
    ) -> MaskedLMOutput:
        """Logits for the token at each position, or with ``labels`` the training loss without ever all logits.

        Args:
            input_ids: token ids (B, S), with [MASK] where a token is to be predicted.
            attention_mask: 1 for text, 0 for padding (B, S), on either side; None means no padding.
            logits_to_keep: bool (B, S); the LM head is applied at the True positions alone.
            sink_prefix: what :meth:`sink_prefix` returned, to compute it once for many calls; None computes it here.
            causal: each position sees the sinks and what stands to its left only (for a causal warm start).
            visible: bool (S, S) or (B, S, S), True where the query (row) may see the key, both counted over the text
                alone; every query sees the sinks. Padding and ``causal`` hide more. Positions do not change.
            labels: the right id (B, S) at every position of the loss, −100 elsewhere; no shift is to be made by the
                caller.
            loss: with labels, fields of :class:`~sinklab.models.head.LossOptions`: ``label_weights``, ``head_chunk``,
                ``liger``.

        Returns:
            an output with ``logits`` of shape (B, S, V), or (M, V) in the row-major order of ``logits_to_keep``. With
            labels: ``loss`` Σ weight · cross-entropy in nats over the labels (float32, or float64 where the
            model is), and no logits.

        Raises:
            ValueError: for shapes that disagree, a row of padding, too long a text, a wrong label, or an absent Liger.
        """
        targets = LossTargets.of(input_ids, labels, logits_to_keep, **loss)
        states_BSD = self.hidden_states(input_ids, attention_mask, sink_prefix, causal, visible)
        if self.config.logit_shift:
            states_BSD = torch.cat([states_BSD[:, :1], states_BSD[:, :-1]], dim=1)
        if targets is not None:
            return MaskedLMOutput(loss=targets.loss(self.lm_head, states_BSD))
        if logits_to_keep is None:
            return MaskedLMOutput(logits=self.lm_head(states_BSD))
        if logits_to_keep.dtype != torch.bool or logits_to_keep.shape != input_ids.shape:
            raise ValueError(
                f"logits_to_keep must be a bool tensor of shape {tuple(input_ids.shape)}, but is "
                f"{logits_to_keep.dtype} of shape {tuple(logits_to_keep.shape)}"
            )
        return MaskedLMOutput(logits=self.lm_head(states_BSD[logits_to_keep]))

    def denoiser(self, attention_mask: Tensor | None = None, *, plain: bool = False) -> ModelDenoiser:
        """This model as a function from (ids, wanted positions) to logits, for canvases with this padding.

        With ``plain=True`` it is :meth:`forward` itself, bit for bit; else a fast decoder may take its place. Its
        ``session()`` remembers keys and values between evaluations, for decoding with a cache. Make a new one after the
        weights change: what does not depend on the text is computed once.
        """
        return ModelDenoiser(self, attention_mask, plain=plain)


AutoConfig.register(DiffusionLMConfig.model_type, DiffusionLMConfig, exist_ok=True)
AutoModel.register(DiffusionLMConfig, DiffusionLM, exist_ok=True)
