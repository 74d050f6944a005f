"""Tiny checkpoints in published formats, with random weights and, where asked for, tokenizer
files.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from tiny_diffusion import tiny_tokenizer

LLADA = {
    "architectures": ["LLaDAModelLM"],
    "model_type": "llada",
    "activation_type": "silu",
    "alibi": False,
    "attention_dropout": 0.0,
    "attention_layer_norm": False,
    "block_type": "llama",
    "d_model": 32,
    "embedding_size": 300,
    "vocab_size": 280,
    "eos_token_id": 1,
    "pad_token_id": 1,
    "include_bias": False,
    "include_qkv_bias": False,
    "input_emb_norm": False,
    "layer_norm_type": "rms",
    "mask_token_id": 299,
    "max_sequence_length": 64,
    "mlp_hidden_size": 48,
    "multi_query_attention": None,
    "n_heads": 4,
    "n_kv_heads": 4,
    "n_layers": 2,
    "rms_norm_eps": 1e-5,
    "rope": True,
    "rope_full_precision": True,
    "rope_theta": 500000.0,
    "scale_logits": False,
    "torch_dtype": "bfloat16",
    "weight_tying": False,
}
SMDM = {
    "name": "Diff_LLaMA_toy",
    "padded_vocab_size": 60,
    "vocab_size": 60,
    "rotary_percentage": 1.0,
    "parallel_residual": False,
    "bias": False,
    "n_query_groups": 2,
    "shared_attention_norm": False,
    "_norm_class": "FusedRMSNorm",
    "norm_eps": 1e-5,
    "_mlp_class": "LLaMAMLP",
    "condense_ratio": 1,
    "block_size": 40,
    "n_layer": 2,
    "n_head": 4,
    "n_embd": 32,
    "intermediate_size": 48,
}
# a decoder's own fields, as a checkpoint of 2025 has them, and what the five formats change
_DECODER = {
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "dtype": "bfloat16",
    "eos_token_id": 1,
    "hidden_act": "silu",
    "hidden_size": 32,
    "initializer_range": 0.02,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "transformers_version": "4.57.0",
    "use_cache": True,
    "vocab_size": 310,
}
DREAM = {
    **_DECODER,
    "architectures": ["DreamModel"],
    "model_type": "Dream",
    "bos_token_id": 300,
    "mask_token_id": 301,
    "pad_token_id": 1,
    "sliding_window": None,
    "use_sliding_window": False,
}
_QWEN = {
    "layer_types": ["full_attention", "full_attention"],
    "max_window_layers": 28,
    "sliding_window": None,
    "use_sliding_window": False,
}
_QWEN3 = {**_QWEN, "attention_bias": False, "head_dim": 12}
_LLAMA = {"attention_bias": False, "head_dim": 8, "mlp_bias": False, "pretraining_tp": 1}
ADAPTED = {
    "a2d-qwen3": {
        **_QWEN3,
        "architectures": ["A2DQwen3LMHeadModel"],
        "model_type": "a2d-qwen3",
        "tie_word_embeddings": True,
        "auto_map": {"AutoModelForMaskedLM": "modeling_qwen3.A2DQwen3LMHeadModel"},
    },
    "a2d-qwen2": {**_QWEN, "architectures": ["A2DQwen2LMHeadModel"], "model_type": "a2d-qwen2"},
    "a2d-llama": {**_LLAMA, "architectures": ["A2DLlamaLMHeadModel"], "model_type": "a2d-llama"},
    "sdar": {
        **_QWEN3,
        "architectures": ["SDARForCausalLM"],
        "model_type": "sdar",
        "attn_implementation": "flex_attention",
        "block_size": 4,
        "debug": False,
        "ep_size": 1,
        "fuse_cross_entropy": True,
        "mask_token_id": 301,
    },
    "fast-dllm-v2": {
        **_QWEN,
        "architectures": ["Fast_dLLM_QwenForCausalLM"],
        "model_type": "Fast_dLLM_Qwen",
        "bd_size": 8,
        "conplemenrary_mask": True,
        "pad_token_id": 1,
    },
    "illada": {
        "architectures": ["ILLaDAForCausalLM"],
        "model_type": "illada",
        "attention_bias": False,
        "layer_norm_eps": None,
        "mlp_bias": False,
        "pad_token_id": 0,
        "resid_pdrop": 0.0,
        "tie_word_embeddings": True,
    },
}
UNSAID = {
    "a2d-qwen3": "<|mask|>",
    "a2d-qwen2": "<|mask|>",
    "a2d-llama": "<|mask|>",
    "sdar": "<|MASK|>",
    "fast-dllm-v2": "|<MASK>|",
    "illada": "<[MASK]>",
}
"""What the tokenizer of a format calls [MASK], without naming it as its mask token."""


NORMS = ("input_layernorm", "post_attention_layernorm")


BASES = {"a2d-qwen2": "qwen2", "Fast_dLLM_Qwen": "qwen2", "Dream": "qwen2"}
BASES |= {"a2d-qwen3": "qwen3", "sdar": "qwen3"}


def adapted_shapes(config):
    """Tensors of a decoder under a name of its own, as transformers' class has them."""
    foreign = ("architectures", "attn_implementation", "auto_map", "model_type")
    fields = {name: value for name, value in config.items() if name not in foreign}
    base = AutoConfig.for_model(BASES.get(config["model_type"], "llama"), **fields)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(base)
    tensors, tied = model.state_dict().items(), model.all_tied_weights_keys
    return {name: tuple(tensor.shape) for name, tensor in tensors if name not in tied}


# the second layer is dense
LLADA_MOE = {
    **_DECODER,
    "architectures": ["LLaDAMoEModelLM"],
    "model_type": "llada",
    "attention_bias": False,
    "clip_qkv": None,
    "dense_intermediate_size": 48,
    "expert_intermediate_size": 12,
    "mask_token_id": 59,
    "moe_layer_freq": [1, 0, 1],
    "moe_router_enable_expert_bias": False,
    "moe_router_score_function": "softmax",
    "norm_topk_prob": None,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 3,
    "pad_token_id": 1,
    "partial_rotary_factor": 1,
    "qk_layernorm": True,
    "rms_norm_eps": 1e-5,
    "rope_theta": 50000,
    "routed_scaling_factor": 1,
    "shared_expert_intermediate_size": None,
    "vocab_size": 60,
}
LLADA2 = {
    **_DECODER,
    "architectures": ["LLaDA2MoeModelLM"],
    "model_type": "llada2_moe",
    "first_k_dense_replace": 1,
    "head_dim": 16,
    "mask_token_id": 59,
    "moe_intermediate_size": 12,
    "n_group": 4,
    "norm_topk_prob": True,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "num_hidden_layers": 3,
    "num_shared_experts": 2,
    "pad_token_id": 1,
    "partial_rotary_factor": 0.5,
    "rope_theta": 600000,
    "routed_scaling_factor": 2.5,
    "score_function": "sigmoid",
    "topk_group": 2,
    "use_bias": False,
    "use_qk_norm": True,
    "use_qkv_bias": False,
    "vocab_size": 60,
}


def llada_shapes(config):
    """Tensor names of a LLaDA checkpoint, written out independently of the reader."""
    width, inner = config["d_model"], config["mlp_hidden_size"]
    keys = width // config["n_heads"] * config["n_kv_heads"]
    layer = {
        "attn_norm": (width,),
        "q_proj": (width, width),
        "k_proj": (keys, width),
        "v_proj": (keys, width),
        "attn_out": (width, width),
        "ff_norm": (width,),
        "ff_proj": (inner, width),
        "up_proj": (inner, width),
        "ff_out": (width, inner),
    }
    shapes = {"model.transformer.wte.weight": (config["embedding_size"], width)}
    for i in range(config["n_layers"]):
        for name, shape in layer.items():
            shapes[f"model.transformer.blocks.{i}.{name}.weight"] = shape
    shapes["model.transformer.ln_f.weight"] = (width,)
    if not config["weight_tying"]:
        shapes["model.transformer.ff_out.weight"] = (config["embedding_size"], width)
    return shapes


def smdm_shapes(config, sink=0, gate=False):
    width, inner, text = config["n_embd"], config["intermediate_size"], config["padded_vocab_size"]
    head = width // config["n_head"]
    shapes = {
        "transformer.wte.weight": (text + 1 + sink, width),
        "transformer.ln_f.weight": (width,),
    }
    for i in range(config["n_layer"]):
        here = f"transformer.h.{i}."
        shapes |= {f"{here}norm_{n}.weight": (width,) for n in (1, 2)}
        shapes[here + "attn.attn.weight"] = (
            (config["n_head"] + 2 * config["n_query_groups"]) * head,
            width,
        )
        shapes[here + "attn.proj.weight"] = (width, width)
        shapes |= {f"{here}mlp.swiglu.w{n}.weight": (inner, width) for n in (1, 2)}
        shapes[here + "mlp.swiglu.w3.weight"] = (width, inner)
        if gate:
            shapes[here + "attn.gate.weight"] = (width, width)
    return {**shapes, "lm_head.weight": (text, width)}


def _mlp_shapes(here, width, inner):
    return {f"{here}{kind}_proj.weight": (inner, width) for kind in ("gate", "up")} | {
        f"{here}down_proj.weight": (width, inner)
    }


def llada_moe_shapes(config):
    width, heads = config["hidden_size"], config["num_attention_heads"]
    head = width // heads
    keys = head * config["num_key_value_heads"]
    shapes = {
        "model.embed_tokens.weight": (config["vocab_size"], width),
        "model.norm.weight": (width,),
    }
    for i, is_moe in enumerate(config["moe_layer_freq"]):
        here = f"model.layers.{i}."
        for kind, shape in (
            ("q", (width, width)),
            ("k", (keys, width)),
            ("v", (keys, width)),
            ("o", (width, width)),
        ):
            shapes[f"{here}self_attn.{kind}_proj.weight"] = shape
        shapes |= {f"{here}self_attn.{kind}_norm.weight": (head,) for kind in "qk"}
        shapes |= {f"{here}{norm}.weight": (width,) for norm in NORMS}
        if not is_moe:
            shapes |= _mlp_shapes(here + "mlp.", width, config["dense_intermediate_size"])
            continue
        shapes[here + "mlp.gate.weight"] = (config["num_experts"], width)
        for expert in range(config["num_experts"]):
            shapes |= _mlp_shapes(
                f"{here}mlp.experts.{expert}.", width, config["expert_intermediate_size"]
            )
    return {**shapes, "lm_head.weight": (config["vocab_size"], width)}


def llada2_shapes(config):
    width, head, inner = config["hidden_size"], config["head_dim"], config["moe_intermediate_size"]
    queries, keys = (config[f"num_{kind}_heads"] * head for kind in ("attention", "key_value"))
    shapes = {
        "model.word_embeddings.weight": (config["vocab_size"], width),
        "model.norm.weight": (width,),
    }
    for i in range(config["num_hidden_layers"]):
        here = f"model.layers.{i}."
        shapes[here + "attention.query_key_value.weight"] = (queries + 2 * keys, width)
        if config["use_qkv_bias"]:
            shapes[here + "attention.query_key_value.bias"] = (queries + 2 * keys,)
        shapes[here + "attention.dense.weight"] = (width, queries)
        shapes |= {f"{here}attention.{kind}_layernorm.weight": (head,) for kind in ("query", "key")}
        shapes |= {f"{here}{norm}.weight": (width,) for norm in NORMS}
        if i < config["first_k_dense_replace"]:
            shapes |= _mlp_shapes(here + "mlp.", width, config["intermediate_size"])
            continue
        shapes[here + "mlp.gate.weight"] = (config["num_experts"], width)
        shapes[here + "mlp.gate.expert_bias"] = (config["num_experts"],)
        for expert in range(config["num_experts"]):
            shapes |= _mlp_shapes(f"{here}mlp.experts.{expert}.", width, inner)
        shapes |= _mlp_shapes(
            here + "mlp.shared_experts.", width, inner * config["num_shared_experts"]
        )
    return {**shapes, "lm_head.weight": (config["vocab_size"], width)}


def random_tensors(shapes, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (torch.randn(shape, generator=generator) * 0.2 + (len(shape) == 1)).to(dtype)
        for name, shape in shapes.items()
    }


def made(folder, config, shapes, shards=1):
    """The folder of a checkpoint with random weights, and these."""
    tensors = random_tensors(shapes)
    return write(folder, config, tensors, shards), tensors


def write(folder, config, tensors, shards=1):
    """config.json and safetensors files, with an index when there are several."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    names, places = list(tensors), {}
    for number in range(shards):
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name] for name in names[number::shards]}
        save_file(part, folder / file, metadata={"format": "pt"})
        places |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": places})
    )
    return folder


def maker(defaults, shapes):
    """A function that makes folders of a format, with other fields where they are given."""

    def make(folder, shards=1, **fields):
        config = {**defaults, **fields}
        return made(folder, config, shapes(config), shards)

    return make


llada, dream = maker(LLADA, llada_shapes), maker(DREAM, adapted_shapes)
llada_moe, llada2 = maker(LLADA_MOE, llada_moe_shapes), maker(LLADA2, llada2_shapes)


def adapted(folder, name, **fields):
    config = {**_DECODER, **ADAPTED[name], **fields}
    return made(folder, config, adapted_shapes(config))


def smdm(folder, sink=0, gate=False, **fields):
    config = {**SMDM, **fields}
    return made(folder, config, smdm_shapes(config, sink, gate))


def config_of(folder, file="config.json"):
    """What a JSON file of a checkpoint says."""
    return json.loads((Path(folder) / file).read_text())


def edit(folder, file="config.json", **fields):
    """Change fields of a JSON file of a checkpoint; one that is "absent" is taken out."""
    config = {**config_of(folder, file), **fields}
    kept = {name: value for name, value in config.items() if value != "absent"}
    (Path(folder) / file).write_text(json.dumps(kept))
    return folder


def poison(folder):
    """Python files that say so if anyone runs them; returns the file that would then exist."""
    ran = Path(folder) / "ran"
    for module in ("modeling", "configuration", "tokenization"):
        (Path(folder) / f"{module}_x.py").write_text(
            f"open({str(ran)!r}, 'w')\nraise RuntimeError('code was run')"
        )
    named = {one: "modeling_x.Model" for one in ("AutoModel", "AutoModelForCausalLM")}
    edit(folder, auto_map={"AutoConfig": "configuration_x.Config", **named})
    return ran


SPECIAL = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
SPECIAL |= {"special": True}
"""Flags of a special token."""


def save_llada_tokenizer(folder, template=None):
    """tokenizer.json with the chat tokens of LLaDA behind a small vocabulary; the mask is no
    `mask_token`.
    """
    tokenizer = tiny_tokenizer()
    data = json.loads(tokenizer.backend_tokenizer.to_str())
    special = [
        "<|startoftext|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eot_id|>",
        "<|mdm_mask|>",
    ]
    first = len(tokenizer)
    data["added_tokens"] += [
        {"id": first + i, "content": text, **SPECIAL} for i, text in enumerate(special)
    ]
    (Path(folder) / "tokenizer.json").write_text(json.dumps(data))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "auto_map": {"AutoTokenizer": ["tokenization_x.T", None]},
    }
    if template:
        settings["chat_template"] = template
    (Path(folder) / "tokenizer_config.json").write_text(json.dumps(settings))
    return {text: first + i for i, text in enumerate(special)}


def save_adapted_tokenizer(folder, name):
    """tokenizer.json with a chat's tokens and [MASK], which is special but not named as the mask
    token.
    """
    ids = save_llada_tokenizer(folder)
    text = (Path(folder) / "tokenizer.json").read_text()
    end = "<|eot_id|>" if name == "a2d-llama" else "<|im_end|>"
    for old, new in (
        ("<|mask|>", "<|plain|>"),
        ("<|mdm_mask|>", UNSAID[name]),
        ("<|eot_id|>", end),
    ):
        text = text.replace(json.dumps(old), json.dumps(new))
        ids = {new if one == old else one: number for one, number in ids.items()}
    (Path(folder) / "tokenizer.json").write_text(text)
    return ids


def save_dream_tokenizer(folder, *more):
    """vocab.json and merges.txt as Qwen2 has them, two special tokens and more, and a class that
    only code has.
    """
    from tokenizers.pre_tokenizers import ByteLevel

    letters = sorted(ByteLevel.alphabet())
    vocabulary = {letter: i for i, letter in enumerate(letters)} | {
        "he": len(letters),
        "hel": len(letters) + 1,
    }
    (Path(folder) / "vocab.json").write_text(json.dumps(vocabulary))
    (Path(folder) / "merges.txt").write_text("#version: 0.2\nh e\nhe l\n")
    added = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|beginoftext|>", "<|mask|>", *more]
    first = len(vocabulary)
    settings = {
        "added_tokens_decoder": {
            str(first + i): {"content": text, **SPECIAL} for i, text in enumerate(added)
        },
        "tokenizer_class": "DreamTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_x.DreamTokenizer", None]},
        "bos_token": "<|beginoftext|>",
        "eos_token": "<|endoftext|>",
        "mask_token": "<|mask|>",
        "pad_token": "<|endoftext|>",
    }
    (Path(folder) / "tokenizer_config.json").write_text(json.dumps(settings))
    return {text: first + i for i, text in enumerate(added)}
