"""Tiny random masked language models of transformers, and a tokenizer of words for them."""

from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    BertConfig,
    BertForMaskedLM,
    EsmConfig,
    EsmForMaskedLM,
    ModernBertConfig,
    ModernBertForMaskedLM,
    PreTrainedTokenizerFast,
    RobertaConfig,
    RobertaForMaskedLM,
)

# RoBERTa's padding must have the id 1, as its positions begin behind it
SPECIAL = ("[CLS]", "[PAD]", "[SEP]", "[UNK]", "[MASK]")
WORDS = (
    "the",
    "house",
    "stood",
    "at",
    "end",
    "of",
    "a",
    "lane",
    "and",
    "sea",
    "was",
    "dark",
    "old",
    "man",
    "said",
)
CLS, PAD, SEP, UNK, MASK = range(5)
ROWS = len(SPECIAL) + len(WORDS)
LENGTH = 30
"""Tokens that a text may have."""
SIZES = {
    "vocab_size": ROWS,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}
SIZES |= {"intermediate_size": 48, "pad_token_id": PAD, "initializer_range": 0.3}
FAMILIES = ("bert", "roberta", "modernbert", "esm")


def tiny_masked(kind):
    """A model of a family with random weights, large enough to tell tokens apart; in evaluation
    mode.
    """
    torch.manual_seed(3)
    with_ends = {"bos_token_id": CLS, "eos_token_id": SEP}
    model: Any
    if kind == "bert":
        model = BertForMaskedLM(BertConfig(**SIZES, max_position_embeddings=LENGTH))
    elif kind == "roberta":
        model = RobertaForMaskedLM(
            RobertaConfig(**SIZES, **with_ends, max_position_embeddings=LENGTH + PAD + 1)
        )
    elif kind == "modernbert":
        ends = {**with_ends, "cls_token_id": CLS, "sep_token_id": SEP}
        config = ModernBertConfig(
            **SIZES, **ends, local_attention=4, max_position_embeddings=LENGTH
        )
        model = ModernBertForMaskedLM(config)
    else:
        how = {
            "mask_token_id": MASK,
            "token_dropout": True,
            "position_embedding_type": "rotary",
        }
        model = EsmForMaskedLM(EsmConfig(**SIZES, **how, max_position_embeddings=LENGTH))
    return model.eval()


def word_tokenizer():
    """A tokenizer of `WORDS` that writes [CLS] before and [SEP] behind a text, like BERT's."""
    vocabulary = {word: number for number, word in enumerate((*SPECIAL, *WORDS))}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    frame = [("[CLS]", CLS), ("[SEP]", SEP)]
    words.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=frame
    )
    names = {"cls_token": "[CLS]", "pad_token": "[PAD]", "sep_token": "[SEP]", "unk_token": "[UNK]"}
    return PreTrainedTokenizerFast(tokenizer_object=words, mask_token="[MASK]", **names)


def save_masked(kind, folder):
    """A folder as `save_pretrained` writes it."""
    tiny_masked(kind).save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    return folder
