"""Text corpora, invented problems, tokenizer training and batches."""

from sinklab.data.battery import LEVELS, SKILLS, Problem, is_right, problems
from sinklab.data.corpora import corpus_documents, fingerprint, read_corpus
from sinklab.data.packing import check_vocabulary, pack, pack_with_documents
from sinklab.data.pairs import Pair, PairCounts, PairRows, Pairs, pair_rows, read_pairs
from sinklab.data.rows import Rows, collate
from sinklab.data.streams import StreamedRows
from sinklab.data.tokenizers import SPECIAL_TOKENS, train_tokenizer

__all__ = [
    "LEVELS",
    "SKILLS",
    "SPECIAL_TOKENS",
    "Pair",
    "PairCounts",
    "PairRows",
    "Pairs",
    "Problem",
    "Rows",
    "StreamedRows",
    "check_vocabulary",
    "collate",
    "corpus_documents",
    "fingerprint",
    "is_right",
    "pack",
    "pack_with_documents",
    "pair_rows",
    "problems",
    "read_corpus",
    "read_pairs",
    "train_tokenizer",
]
