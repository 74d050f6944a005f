"""A tiny DiffusionGemma with random weights, made by transformers' own class."""

import pytest
import torch
import transformers

ROWS, CANVAS, WINDOW, IMAGE = 48, 6, 5, 47
TEXT = {
    "vocab_size": ROWS,
    "hidden_size": 32,
    "intermediate_size": 32,
    "moe_intermediate_size": 8,
    "num_experts": 4,
    "top_k_experts": 2,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "global_head_dim": 16,
    "num_global_key_value_heads": 1,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "sliding_window": WINDOW,
    "max_position_embeddings": 128,
    "use_bidirectional_attention": "vision",
}
VISION = {
    "model_type": "gemma4_vision",
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "patch_size": 4,
    "pooling_kernel_size": 2,
    "position_embedding_size": 16,
}


def tiny_gemma():
    """The same every time; skips the calling test where transformers has no such class."""
    if not hasattr(transformers, "DiffusionGemmaForBlockDiffusion"):
        pytest.skip(f"transformers {transformers.__version__} has no DiffusionGemma")
    config = transformers.AutoConfig.for_model(
        "diffusion_gemma",
        text_config=TEXT,
        vision_config=VISION,
        canvas_length=CANVAS,
        image_token_id=IMAGE,
        boi_token_id=45,
        eoi_token_id=46,
    )
    torch.manual_seed(0)
    model = transformers.DiffusionGemmaForBlockDiffusion(config).eval()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if "layer_scalar" in name:
                # encoder and decoder share all weights but these
                tensor.uniform_(0.5, 1.5)
            elif name.endswith("proj.weight") or "experts" in name:
                tensor.normal_(0, 0.3)
        model.model.decoder.embed_tokens.weight.normal_(0, 1)
        # else what rounds differently at one step is another text a few steps later
        model.model.decoder.self_conditioning.down_proj.weight.mul_(0.03)
    return model


def save_gemma(folder):
    tiny_gemma().save_pretrained(folder)
    return folder
