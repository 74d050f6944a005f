"""Tiny diffusion models, built in process; the tokenizer that goes with them is the lab's."""

from copy import deepcopy
from functools import cache

import torch
from tokenizers.processors import TemplateProcessing
from transformers import LlamaConfig

from sinklab.core.subject import DiffusionLM, DiffusionLMConfig
from tiny_models import SIZES

TEXT = (
    "The old man sat by the sea, and the boy looked at the boats. “Will it rain?” he said; the "
    "wind was rising.\n"
)
VOCABULARY = 280
PAD, END, MASK = 0, 1, 2
"""ids that the tokenizer has too"""


@cache
def tiny_tokenizer():
    from sinklab.lab.data import train_tokenizer

    return train_tokenizer([TEXT] * 4, VOCABULARY)


def beginning_tokenizer():
    """A tokenizer that puts a start token before each text, as Llama's does."""
    tokenizer = deepcopy(tiny_tokenizer())
    tokenizer.add_special_tokens({"bos_token": "<|begin|>"})
    start = ("<|begin|>", tokenizer.bos_token_id)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|begin|> $A", special_tokens=[start]
    )
    assert tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id == VOCABULARY
    return tokenizer


def tiny_backbone(context=64, **changes):
    """Two layers, 32 wide, with weights large enough that attention is not uniform."""
    fields = {
        "vocab_size": VOCABULARY,
        "max_position_embeddings": context,
        "bos_token_id": None,
    }
    return LlamaConfig(**SIZES | fields | changes)


MADE = {}


def tiny_model(*given, **settings):
    """A copy of what was made of these settings once, and the state of the generator then."""
    name = repr((given, settings))
    if name not in MADE:
        MADE[name] = new_model(*given, **settings), torch.get_rng_state()
    model, state = MADE[name]
    torch.set_rng_state(state)
    return deepcopy(model)


def new_model(sink=0, *, seed=0, context=64, **settings):
    backbone = tiny_backbone(context, pad_token_id=PAD, eos_token_id=END)
    kind = "token" if sink else "none"
    torch.manual_seed(seed)
    fields = {
        "mask_token_id": MASK,
        "sink_kind": kind,
        "sink_count": sink,
        **settings,
    }
    return DiffusionLM(DiffusionLMConfig(backbone, **fields)).eval()


def tiny_loaded(sink=0, *, family="diffusion", **settings):
    from sinklab.lab.checkpoints import Loaded

    return Loaded(tiny_model(sink, **settings), tiny_tokenizer(), "tiny test model", None, family)


def save_tiny(folder, sink=0, **settings):
    """A folder that `load` and the command line can read."""
    tiny_model(sink, **settings).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder
