"""MDLM and BD3-LM checkpoints: a diffusion transformer (DiT), with modulated norms, as a
backbone.
"""

# B batch, S sequence, D hidden size, C width of the condition
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    LlamaConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding

from sinklab.core.models.head import Head, check_labels, recomputed_loss
from sinklab.core.registry import backbones, families
from sinklab.lab.checkpoints.families import (
    CheckpointPlan,
    Config,
    Family,
    Shapes,
    Source,
    formats_of,
    published,
)

FORMATS = formats_of(__package__)

# fixed in the authors' code; their configs have no fields for them
FREQUENCIES, MLP_RATIO, ROPE_THETA, LOWERED = 128, 4, 10000.0, -1e6
EMBEDDING = "backbone.vocab_embed.embedding"


class DiTHead(Head):
    """A head with a bias. The logit of the last id, [MASK], is lowered by 1e6: its row was never
    trained.

    Source: ``_subs_parameterization`` in `diffusion.py` of kuleshov-group/mdlm.
    """

    def __init__(self, hidden_size: int, rows: int, vocab_size: int) -> None:
        super().__init__(hidden_size, rows, vocab_size)
        self.bias = nn.Parameter(torch.zeros(rows))

    def forward(self, states_MD: Tensor, *loss: Any) -> Tensor:
        """Logits (…, V), or with the other arguments of :meth:`Head.forward` the loss."""
        if loss and loss[0] is not None:
            labels_M, weights_M, chunk, liger = loss
            if liger:
                raise ValueError(
                    "Liger's loss has no bias, but the head of a DiT has; leave liger out"
                )
            check_labels(labels_M, self.out_features - 1)
            return recomputed_loss(self.forward, states_MD, labels_M, weights_M, chunk)
        logits_MV = nn.functional.linear(states_MD, self.weight, self.bias)
        logits_MV[..., -1] += LOWERED
        return logits_MV


class DiTConfig(LlamaConfig):
    """Sizes of a DiT: those of a Llama, since it has a Llama's attention, and ``condition_size``,
    the width of the modulating vector.
    """

    model_type = "sinklab_dit"
    head_class = DiTHead
    takes_no_sink = "a DiT (MDLM, BD3-LM) takes no added sink and no gate"

    condition_size: int = 128


class Condition(nn.Module):
    """Vector that modulates every layer: silu of an MLP of the embedded time; the noise level is
    always 0, as published.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(2 * FREQUENCIES, size), nn.Linear(size, size)

    def forward(self) -> Tensor:
        """The condition (C,), the same for all texts."""
        # cosines, then sines of 0
        time = torch.cat(
            [self.up.weight.new_ones(FREQUENCIES), self.up.weight.new_zeros(FREQUENCIES)]
        )
        silu = nn.functional.silu
        return silu(self.down(silu(self.up(time))))


class MLP(nn.Module):
    """Two linear maps with a tanh-GELU between them."""

    def __init__(self, size: int, inner: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(size, inner), nn.Linear(inner, size)

    def forward(self, x_BSD: Tensor) -> Tensor:
        """(B, S, D) to (B, S, D)."""
        return self.down(nn.functional.gelu(self.up(x_BSD), approximate="tanh"))


class Modulation(nn.Linear):
    """Shifts, scales and gates of a layer, from the condition; all are 0 before training."""


class DiTLayer(nn.Module):
    """Attention and MLP; the condition shifts and scales the norm before each, and gates the output
    of each.
    """

    def __init__(self, config: Any, index: int) -> None:
        super().__init__()
        size = config.hidden_size
        self.self_attn = LlamaAttention(config, index)
        self.mlp = MLP(size, config.intermediate_size)
        self.input_layernorm = nn.LayerNorm(size, bias=False)
        self.post_attention_layernorm = nn.LayerNorm(size, bias=False)
        self.modulation = Modulation(config.condition_size, 6 * size)

    def forward(self, x_BSD: Tensor, condition_C: Tensor, **attention: Any) -> Tensor:
        """States (B, S, D) after this layer; ``attention`` are keywords of the attention layer."""
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = self.modulation(condition_C).chunk(6)
        y_BSD = self.input_layernorm(x_BSD) * (1 + scale) + shift
        x_BSD = x_BSD + gate * self.self_attn(hidden_states=y_BSD, **attention)[0]
        y_BSD = self.post_attention_layernorm(x_BSD) * (1 + mlp_scale) + mlp_shift
        return x_BSD + mlp_gate * self.mlp(y_BSD)


class FinalNorm(nn.Module):
    """The norm behind the last layer, shifted and scaled like those of the layers."""

    def __init__(self, size: int, condition_size: int) -> None:
        super().__init__()
        self.scaling = nn.LayerNorm(size, bias=False)
        self.modulation = Modulation(condition_size, 2 * size)

    def forward(self, x_BSD: Tensor, condition_C: Tensor) -> Tensor:
        """(B, S, D) to (B, S, D)."""
        shift, scale = self.modulation(condition_C).chunk(2)
        return self.scaling(x_BSD) * (1 + scale) + shift


@backbones.register(DiTConfig.model_type)
class DiTModel(PreTrainedModel):
    """The backbone without its head, as :class:`~sinklab.core.models.DiffusionLM` runs one.

    Source: `models/dit.py` of kuleshov-group/mdlm and `models/hf/modeling_bd3lm.py` of
    kuleshov-group/bd3lms.
    """

    config_class = DiTConfig
    _supports_sdpa = True
    _no_split_modules = ["DiTLayer"]  # noqa: RUF012 (transformers reads a plain class attribute)

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.condition = Condition(config.condition_size)
        self.layers = nn.ModuleList(
            DiTLayer(config, index) for index in range(config.num_hidden_layers)
        )
        self.final_norm = FinalNorm(config.hidden_size, config.condition_size)
        self.rotary_emb = LlamaRotaryEmbedding(config)
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        # transformers.initialization skips tensors that a checkpoint has already filled
        from transformers import initialization as init

        super()._init_weights(module)
        if isinstance(module, Modulation):
            init.zeros_(module.weight)

    def train(self, mode: bool = True) -> "DiTModel":
        """Raises ValueError for anything but ``eval()``: training these models is not built."""
        if mode:
            raise ValueError(
                "MDLM and BD3-LM (a DiT) can be loaded, traced, edited, scored and decoded, but "
                "not trained; train another model, or these with the code of their authors"
            )
        return super().train(mode)

    def forward(
        self,
        inputs_embeds: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        use_cache: bool = False,
        **attention: Any,
    ) -> BaseModelOutput:
        """Final states (B, S, D) of embedded tokens, as a transformers decoder gives them."""
        states_BSD, condition_C = inputs_embeds, self.condition()
        attention |= {"attention_mask": attention_mask}
        attention |= {"position_embeddings": self.rotary_emb(states_BSD, position_ids)}
        for layer in self.layers:
            states_BSD = layer(states_BSD, condition_C, **attention)
        return BaseModelOutput(last_hidden_state=self.final_norm(states_BSD, condition_C))


AutoConfig.register(DiTConfig.model_type, DiTConfig, exist_ok=True)
AutoModel.register(DiTConfig, DiTModel, exist_ok=True)


@families.register("mdlm")
class MDLM(Family):
    """``MDLM``: full attention; [MASK] is the last row of the vocabulary."""

    architectures = ("MDLM",)
    model_types = ("mdlm",)
    represented: ClassVar = {"time_conditioning": (False,)}
    tensor_names: ClassVar = FORMATS["mdlm"]["tensors"]
    tokenizer_class = PreTrainedTokenizerFast
    published: ClassVar = published("mdlm", FORMATS)

    def read(self, config: Config, shapes: Shapes | None) -> CheckpointPlan:
        """Plan of a DiT with its fixed rotary base, MLP and head width."""
        fields = self.fields(config, FORMATS["mdlm"]["fields"])
        backbone = DiTConfig(
            **fields,
            intermediate_size=MLP_RATIO * fields["hidden_size"],
            num_key_value_heads=fields["num_attention_heads"],
            rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        )
        return CheckpointPlan(self, backbone, {"mask_token_id": fields["vocab_size"] - 1})

    def source(self, plan: CheckpointPlan, target: str) -> Source:
        """Query, key and value are taken out of one matrix, one behind the other."""
        name, _ = super().source(plan, target)
        if target == "model.embed_tokens.weight":
            return EMBEDDING, None
        kind = target.split(".")[-2]
        size = plan.backbone.hidden_size
        kinds = ["q_proj", "k_proj", "v_proj"]
        if kind not in kinds:
            return name, None
        return name, partial(torch.narrow, dim=0, start=kinds.index(kind) * size, length=size)


@families.register("bd3lm")
class BD3LM(MDLM):
    """``BD3LM``: the same, with attention in blocks."""

    architectures = ("BD3LM",)
    model_types = ("bd3lm",)
    represented: ClassVar = {
        "time_conditioning": (False,),
        "adaln": (True,),
        "causal": (False,),
        "cross_attn": (True,),
    }
    published: ClassVar = published("bd3lm", FORMATS)
    # bounds of the noise of its training
    unread = ("sampling_eps_min", "sampling_eps_max")

    def read(self, config: Config, shapes: Shapes | None) -> CheckpointPlan:
        """The plan of an MDLM, with the length of its blocks."""
        plan = super().read(config, shapes)
        settings = {**(plan.settings or {}), "block_length": self.field(config, "block_size")}
        return CheckpointPlan(self, plan.backbone, settings)
