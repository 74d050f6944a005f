"""A diffusion language model: a decoder of transformers made bidirectional.

An added sink and a gate are hooks, so that no model code is copied and tensors keep their names.
"""

# B batch, S sequence, N added sinks, D hidden size, V vocabulary, M wanted positions (row-major),
# A attention width (heads × head dim)
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModel, AutoModelForMaskedLM, PreTrainedModel
from transformers.modeling_outputs import MaskedLMOutput

from sinklab.core.compat import stated
from sinklab.core.errors import check_tensor
from sinklab.core.registry import denoisers, fast_decoders, fast_path
from sinklab.core.subject import masks
from sinklab.core.subject.config import DiffusionLMConfig
from sinklab.core.subject.denoising import ModelDenoiser
from sinklab.core.subject.generation import GenerateByDenoising
from sinklab.core.subject.head import Head, LossTargets
from sinklab.core.subject.masks import CanvasGeometry
from sinklab.core.subject.prefix import SinkPrefix, take_prefix


def _round_to_bfloat16(
    module: nn.Module, args: tuple, tables: tuple[Tensor, Tensor]
) -> tuple[Tensor, ...]:
    """Hook: round the cosines and sines of a rotary embedding."""
    return tuple(table.bfloat16().to(table.dtype) for table in tables)


class Gate(nn.Linear):
    """Gated attention: sigmoid(X·W_g + b) of a layer's normed input X, on its attention output (Eq.
    8–10); ``bias`` is the initial b, None leaves it out (Eq. 9).

    Its hooks are bound methods: a copied model uses the copy's gate.
    """

    def __init__(self, hidden_size: int, width: int, bias: float | None) -> None:
        super().__init__(hidden_size, width, bias=bias is not None)
        self.bias_start = bias
        self.pending: Tensor | None = None
        """Factors for the next output projection."""

    def reset_parameters(self) -> None:
        """Draw nothing here: the model does, with its other weights."""

    def __getstate__(self) -> dict[str, Any]:
        # factors of an interrupted call cannot be copied
        return super().__getstate__() | {"pending": None}

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Factors (B, S, A) in (0, 1)."""
        return torch.sigmoid(super().forward(x_BSD))

    def remember(self, attention: nn.Module, args: tuple, kwargs: dict) -> None:
        """Compute the factors from the input of attention."""
        self.pending = self(kwargs["hidden_states"])

    def multiply(self, projection: nn.Module, args: tuple) -> tuple | None:
        """Apply the factors once."""
        if self.pending is None:
            return None
        factors = self.pending
        self.pending = None
        # accelerate may have put the gate elsewhere
        return (args[0] * factors.to(args[0].device), *args[1:])

    def attach(self, attention: Any) -> None:
        """Add the hooks to an attention and its ``o_proj``."""
        attention.register_forward_pre_hook(self.remember, with_kwargs=True)
        attention.o_proj.register_forward_pre_hook(self.multiply)


class DiffusionLM(GenerateByDenoising, PreTrainedModel):
    """Predicts the tokens under [MASK] from both sides.

    A sink enters every layer as a key/value prefix, which equals the masked (L + N)² form of Eq. 6.
    """

    config_class = DiffusionLMConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_attention_backend = True
    _supports_flash_attn = True
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: DiffusionLMConfig) -> None:
        super().__init__(config)
        backbone = config.backbone
        self.model = AutoModel.from_config(backbone)
        self.lm_head = Head(
            backbone.hidden_size,
            config.output_vocab_size or backbone.vocab_size,
            backbone.vocab_size,
        )
        if config.rope_dtype == "bfloat16":
            self.model.rotary_emb.register_forward_hook(_round_to_bfloat16)
        for layer in self.model.layers:
            layer.self_attn.register_forward_pre_hook(take_prefix, with_kwargs=True)
        sink = config.sink
        if sink is not None:
            sink.attach(self.model)
            for name in sink.tensors:
                self.register_parameter(name, nn.Parameter(torch.empty(sink.shape(config, name))))
        if config.gate != "none":
            self.gates = nn.ModuleList()
            for attention in (layer.self_attn for layer in self.model.layers):
                gate = Gate(backbone.hidden_size, attention.o_proj.in_features, config.gate_bias)
                gate.attach(attention)
                self.gates.append(gate)
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        std = self.config.backbone.initializer_range
        # skips tensors that a checkpoint has filled
        from transformers import initialization as init

        if isinstance(module, nn.Linear):
            init.normal_(module.weight, mean=0.0, std=std)
            if module.bias is not None:
                init.constant_(module.bias, stated(module, "bias_start", 0.0))
        elif module is self and self.config.sink is not None:
            for name in self.config.sink.tensors:
                # a copy, which a kind may fill by any function of torch
                started = torch.empty_like(self.get_parameter(name))
                self.config.sink.initialize(name, started, std)
                init.copy_(self.get_parameter(name), started)

    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, *args: Any, **settings: Any
    ) -> nn.Embedding:
        """Change the size of the vocabulary, as in transformers.

        Raises ValueError if [MASK] would be cut off, or the head is smaller than the embedding.
        """
        rows = self.config.output_vocab_size
        mask_id = self.config.mask_token_id
        if rows not in (None, self.config.vocab_size):
            raise ValueError(
                f"the head has {rows} rows for {self.config.vocab_size} ids, so the two cannot be "
                "resized together; leave the vocabulary as it is"
            )
        if new_num_tokens is not None and mask_id is not None and new_num_tokens <= mask_id:
            raise ValueError(
                f"{new_num_tokens} rows would cut off [MASK] (id {mask_id}); keep at least "
                f"{mask_id + 1}"
            )
        embedding = super().resize_token_embeddings(new_num_tokens, *args, **settings)
        size = embedding.num_embeddings
        with torch.device("meta"):
            head = Head(self.config.backbone.hidden_size, size, size)
        # transformers made a plain Linear; its weight may be tied
        head.weight = self.lm_head.weight
        self.lm_head = head.train(self.training)
        self.model.vocab_size = size
        if rows is not None:
            self.config.output_vocab_size = size
        return embedding

    def _set_gradient_checkpointing(  # type: ignore[override]
        self, enable: bool = True, gradient_checkpointing_func: Any = checkpoint, **settings: Any
    ) -> None:
        """Raises ValueError for reentrant checkpointing, which loses the gradient of the sink."""
        if enable and stated(gradient_checkpointing_func, "keywords", {}).get(
            "use_reentrant", True
        ):
            raise ValueError(
                "gradient checkpointing with use_reentrant=True drops the gradient of the sink; "
                "turn it on with use_reentrant=False"
            )
        super()._set_gradient_checkpointing(enable, gradient_checkpointing_func, **settings)

    def sink_prefix(self, length: int, lengths_B: Tensor | None = None) -> SinkPrefix | None:
        """The sinks for texts of these lengths, or None."""
        sink = self.config.sink
        if sink is None:
            return None
        return sink.prefix(self, length, lengths_B)

    def hidden_states(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        sink_prefix: SinkPrefix | None = None,
        causal: bool = False,
        visible: Tensor | None = None,
        clean: Tensor | None = None,
    ) -> Tensor:
        """Final normed states (B, S, D); arguments as in :meth:`forward`."""
        if input_ids.ndim != 2 or input_ids.shape[1] == 0:
            raise ValueError(
                f"input_ids must have shape (B, S) with S ≥ 1, but have {tuple(input_ids.shape)}"
            )
        self.config.check_length(input_ids.shape[1])
        real_BS = masks.real_positions(input_ids, attention_mask)
        if clean is not None:
            self._check_clean(input_ids, clean, is_alone=visible is None and not causal)
        read = input_ids
        if clean is not None:
            read = torch.cat([input_ids, clean], dim=1)
        embeds_BSD = self.model.embed_tokens(read)
        geometry = CanvasGeometry.of(
            self,
            real_BS,
            embeds_BSD,
            input_ids.shape,
            sinks=sink_prefix,
            causal=causal,
            visible=visible,
            is_doubled=clean is not None,
        )
        states_BSD = self.decoder_states(
            embeds_BSD, geometry.mask, geometry.position_ids_BS, geometry.sinks, is_causal=causal
        )
        return states_BSD[:, : input_ids.shape[1]]

    def decoder_states(
        self,
        embeds_BSD: Tensor,
        mask: Tensor | None,
        position_ids_BS: Tensor,
        sinks: Any,
        *,
        is_causal: bool = False,
    ) -> Tensor:
        """Final normed states (B, S, D) of the columns that run; ``sinks`` is a prefix or store."""
        return self.model(
            inputs_embeds=embeds_BSD,
            attention_mask=mask,
            position_ids=position_ids_BS,
            use_cache=False,
            is_causal=is_causal,
            sink_prefix=sinks,
            without_mask=mask is None,
        ).last_hidden_state

    def _check_clean(self, input_ids: Tensor, clean: Tensor, *, is_alone: bool) -> None:
        if self.config.block_length is None:
            raise ValueError(
                "a clean text beside the noisy one is for attention in blocks, but this model has "
                "full attention; set config.block_length, or leave out clean"
            )
        if not is_alone:
            raise ValueError(
                "with a clean text blocks alone say who sees whom; leave out visible and causal"
            )
        check_tensor("clean", clean, input_ids.shape, "int64", "as input_ids")

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        logits_to_keep: Tensor | None = None,
        sink_prefix: SinkPrefix | None = None,
        causal: bool = False,
        *,
        visible: Tensor | None = None,
        clean: Tensor | None = None,
        labels: Tensor | None = None,
        label_weights: Tensor | None = None,
        head_chunk: int = 4096,
    ) -> MaskedLMOutput:
        """Logits for the token at each position, or with ``labels`` the training loss.

        Args:
            input_ids: token ids (B, S), with [MASK] where to predict.
            attention_mask: 1 for text, 0 for padding (B, S), on either side; None for no padding.
            logits_to_keep: the positions with logits, bool (B, S), or int64 (M,), their ascending
                indices in the flattened batch.
            sink_prefix: from :meth:`sink_prefix`, to compute it once.
            causal: each position sees only the sinks and the positions to its left.
            visible: bool (S, S) or (B, S, S), True where the query (row) of the text may see the
                key, unless something else blocks it.
            clean: with attention in blocks, the text without noise (B, S), in which each block sees
                those before it; None shows them as in ``input_ids``.
            labels: the right id (B, S) at every position of the loss, −100 elsewhere, not shifted.
            label_weights: float (B, S); None for 1.
            head_chunk: positions per chunk of logits.

        Returns:
            an output with ``logits`` (B, S, V) or (M, V); with labels only the ``loss``,
                Σ weight · cross-entropy in nats, in at least float32.

        Raises:
            ValueError: for wrong shapes or labels, a row of padding, or too long a text.
        """
        targets = None
        if labels is not None or label_weights is not None:
            if logits_to_keep is not None:
                raise ValueError(
                    "labels say where the head is applied; pass them or logits_to_keep, not both"
                )
            targets = LossTargets.of(input_ids, labels, label_weights)
        states_BSD = self.hidden_states(
            input_ids, attention_mask, sink_prefix, causal, visible, clean
        )
        if self.config.logit_shift:
            before_BSD = torch.cat([states_BSD[:, :1], states_BSD[:, :-1]], dim=1)
            if attention_mask is not None:
                starts_BS1 = masks.starts(attention_mask).unsqueeze(-1)
                before_BSD = torch.where(starts_BS1, states_BSD, before_BSD)
            states_BSD = before_BSD
        if targets is not None:
            loss = targets.loss(self.lm_head, states_BSD, head_chunk)
            return MaskedLMOutput(loss=loss)
        if logits_to_keep is not None and logits_to_keep.ndim == 1:
            states_BSD = states_BSD.flatten(0, 1).index_select(0, logits_to_keep)
        elif logits_to_keep is not None:
            check_tensor("logits_to_keep", logits_to_keep, input_ids.shape, "bool", "as input_ids")
            states_BSD = states_BSD[logits_to_keep]
        return MaskedLMOutput(logits=self.lm_head(states_BSD))

    def denoiser(
        self, attention_mask: Tensor | None = None, *, plain: bool = False
    ) -> ModelDenoiser:
        """This model as a denoiser for canvases with this padding.

        With ``plain=True`` it is :meth:`forward`, bit for bit; else it may be a faster subclass.
        Make a new one after the weights change: sinks and mask are computed once.
        """
        for paths in (fast_decoders, denoisers):
            found = fast_path(paths, self, attention_mask, plain)
            if found is not None:
                return found
        return ModelDenoiser(self, attention_mask)


AutoConfig.register(DiffusionLMConfig.model_type, DiffusionLMConfig, exist_ok=True)
AutoModel.register(DiffusionLMConfig, DiffusionLM, exist_ok=True)
AutoModelForMaskedLM.register(DiffusionLMConfig, DiffusionLM, exist_ok=True)
