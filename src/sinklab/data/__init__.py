"""Text corpora, tokenizer training and batches."""

from sinklab.data.corpora import read_corpus
from sinklab.data.packing import pack
from sinklab.data.tokenizers import SPECIAL_TOKENS, train_tokenizer

__all__ = ["SPECIAL_TOKENS", "pack", "read_corpus", "train_tokenizer"]
