"""Tiny checkpoints in published formats, with random weights and, where asked for, tokenizer files."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

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
DREAM = {
    "architectures": ["DreamModel"],
    "model_type": "Dream",
    "bos_token_id": 300,
    "eos_token_id": 1,
    "hidden_act": "silu",
    "hidden_size": 32,
    "intermediate_size": 48,
    "mask_token_id": 301,
    "max_position_embeddings": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "pad_token_id": 1,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 310,
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


MDLM = {
    "architectures": ["MDLM"],
    "model_type": "mdlm",
    "cond_dim": 16,
    "dropout": 0.1,
    "hidden_dim": 32,
    "model_length": 64,
    "n_blocks": 2,
    "n_heads": 4,
    "return_dict": False,
    "time_conditioning": False,
    "vocab_size": 62,
}

BD3LM = {
    **MDLM,
    "architectures": ["BD3LM"],
    "model_type": "bd3lm",
    "adaln": True,
    "attn_backend": "flex",
    "block_size": 4,
    "causal": False,
    "cross_attn": True,
    "sampling_eps_max": 0.999,
    "sampling_eps_min": 0.001,
    "var_min": True,
}


def llada_shapes(config):
    """Tensor names of a LLaDA checkpoint, written out independently of the reader."""
    width, inner = config["d_model"], config["mlp_hidden_size"]
    keys = width // config["n_heads"] * (config["n_kv_heads"] or 1)
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
            if config["include_qkv_bias"] and name in ("q_proj", "k_proj", "v_proj"):
                shapes[f"model.transformer.blocks.{i}.{name}.bias"] = shape[:1]
    shapes["model.transformer.ln_f.weight"] = (width,)
    if not config["weight_tying"]:
        shapes["model.transformer.ff_out.weight"] = (config["embedding_size"], width)
    return shapes


def dream_shapes(config):
    width, inner = config["hidden_size"], config["intermediate_size"]
    keys = width // config["num_attention_heads"] * config["num_key_value_heads"]
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], width), "model.norm.weight": (width,)}
    for i in range(config["num_hidden_layers"]):
        here = f"model.layers.{i}."
        for kind, rows in (("q", width), ("k", keys), ("v", keys)):
            shapes[f"{here}self_attn.{kind}_proj.weight"] = (rows, width)
            shapes[f"{here}self_attn.{kind}_proj.bias"] = (rows,)
        shapes[here + "self_attn.o_proj.weight"] = (width, width)
        shapes |= {f"{here}mlp.{kind}_proj.weight": (inner, width) for kind in ("gate", "up")}
        shapes[here + "mlp.down_proj.weight"] = (width, inner)
        shapes |= {f"{here}{norm}.weight": (width,) for norm in ("input_layernorm", "post_attention_layernorm")}
    return {**shapes, "lm_head.weight": (config["vocab_size"], width)}


def smdm_shapes(config, sink=0, gate=False):
    width, inner, text = config["n_embd"], config["intermediate_size"], config["padded_vocab_size"]
    head = width // config["n_head"]
    shapes = {"transformer.wte.weight": (text + 1 + sink, width), "transformer.ln_f.weight": (width,)}
    for i in range(config["n_layer"]):
        here = f"transformer.h.{i}."
        shapes |= {f"{here}norm_{n}.weight": (width,) for n in (1, 2)}
        shapes[here + "attn.attn.weight"] = ((config["n_head"] + 2 * config["n_query_groups"]) * head, width)
        shapes[here + "attn.proj.weight"] = (width, width)
        shapes |= {f"{here}mlp.swiglu.w{n}.weight": (inner, width) for n in (1, 2)}
        shapes[here + "mlp.swiglu.w3.weight"] = (width, inner)
        if gate:
            shapes[here + "attn.gate.weight"] = (width, width)
    return {**shapes, "lm_head.weight": (text, width)}


def dit_shapes(config):
    width, condition, rows = config["hidden_dim"], config["cond_dim"], config["vocab_size"]
    linear = {
        "sigma_map.mlp.0": (condition, 256),
        "sigma_map.mlp.2": (condition, condition),
        "output_layer.linear": (rows, width),
        "output_layer.adaLN_modulation": (2 * width, condition),
    }
    shapes = {"vocab_embed.embedding": (rows, width), "output_layer.norm_final.weight": (width,)}
    shapes["rotary_emb.inv_freq"] = (width // config["n_heads"] // 2,)
    for i in range(config["n_blocks"]):
        here = f"blocks.{i}."
        linear |= {f"{here}mlp.0": (4 * width, width), f"{here}mlp.2": (width, 4 * width)}
        linear[here + "adaLN_modulation"] = (6 * width, condition)
        shapes |= {f"{here}norm{n}.weight": (width,) for n in (1, 2)}
        shapes |= {f"{here}attn_qkv.weight": (3 * width, width), f"{here}attn_out.weight": (width, width)}
    for name, shape in linear.items():
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    return {f"backbone.{name}": shape for name, shape in shapes.items()}


def random_tensors(shapes, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (torch.randn(shape, generator=generator) * 0.2 + (len(shape) == 1)).to(dtype)
        for name, shape in shapes.items()
    }


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
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return folder


def llada(folder, shards=1, **fields):
    config = {**LLADA, **fields}
    tensors = random_tensors(llada_shapes(config))
    return write(folder, config, tensors, shards), tensors


def dream(folder, **fields):
    config = {**DREAM, **fields}
    tensors = random_tensors(dream_shapes(config))
    return write(folder, config, tensors), tensors


def smdm(folder, sink=0, gate=False, **fields):
    config = {**SMDM, **fields}
    tensors = random_tensors(smdm_shapes(config, sink, gate))
    return write(folder, config, tensors), tensors


def mdlm(folder, **fields):
    config = {**MDLM, **fields}
    tensors = random_tensors(dit_shapes(config))
    return write(folder, config, tensors), tensors


def bd3lm(folder, **fields):
    config = {**BD3LM, **fields}
    tensors = random_tensors(dit_shapes(config))
    # bounds of the noise of its training, which are stored with the weights
    tensors |= {f"sampling_eps_{end}": torch.tensor(config[f"sampling_eps_{end}"]) for end in ("min", "max")}
    return write(folder, config, tensors), tensors


def poison(folder):
    """Python files that say so if anyone runs them; returns the file that would then exist."""
    ran = Path(folder) / "ran"
    for module in ("modeling", "configuration", "tokenization"):
        (Path(folder) / f"{module}_x.py").write_text(f"open({str(ran)!r}, 'w')\nraise RuntimeError('code was run')")
    path = Path(folder) / "config.json"
    config = json.loads(path.read_text())
    config["auto_map"] = {
        "AutoConfig": "configuration_x.Config",
        "AutoModel": "modeling_x.Model",
        "AutoModelForCausalLM": "modeling_x.Model",
    }
    path.write_text(json.dumps(config))
    return ran


def save_llada_tokenizer(folder, template=None):
    """tokenizer.json with the chat tokens of LLaDA behind a small vocabulary; the mask is no `mask_token`."""
    tokenizer = tiny_tokenizer()
    data = json.loads(tokenizer.backend_tokenizer.to_str())
    special = ["<|startoftext|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|mdm_mask|>"]
    first = len(tokenizer)
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    data["added_tokens"] += [{"id": first + i, "content": text, **flags} for i, text in enumerate(special)]
    (Path(folder) / "tokenizer.json").write_text(json.dumps(data))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "auto_map": {"AutoTokenizer": ["tokenization_x.T", None]}}
    if template:
        settings["chat_template"] = template
    (Path(folder) / "tokenizer_config.json").write_text(json.dumps(settings))
    return {text: first + i for i, text in enumerate(special)}


def save_dream_tokenizer(folder):
    """vocab.json and merges.txt as Qwen2 has them, two more special tokens, and a class that only code would have."""
    from tokenizers.pre_tokenizers import ByteLevel

    letters = sorted(ByteLevel.alphabet())
    vocabulary = {letter: i for i, letter in enumerate(letters)} | {"he": len(letters), "hel": len(letters) + 1}
    (Path(folder) / "vocab.json").write_text(json.dumps(vocabulary))
    (Path(folder) / "merges.txt").write_text("#version: 0.2\nh e\nhe l\n")
    added = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|beginoftext|>", "<|mask|>"]
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    first = len(vocabulary)
    settings = {
        "added_tokens_decoder": {str(first + i): {"content": text, **flags} for i, text in enumerate(added)},
        "tokenizer_class": "DreamTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_x.DreamTokenizer", None]},
        "bos_token": "<|beginoftext|>",
        "eos_token": "<|endoftext|>",
        "mask_token": "<|mask|>",
        "pad_token": "<|endoftext|>",
    }
    (Path(folder) / "tokenizer_config.json").write_text(json.dumps(settings))
    return {text: first + i for i, text in enumerate(added)}
