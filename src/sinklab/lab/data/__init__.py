"""Text corpora, invented problems, tokenizer training and batches."""

from sinklab.core.registry import exports

__getattr__, __dir__, __all__ = exports(
    __name__,
    battery="LEVELS Problem SKILLS is_right problems",
    corpora="corpus_documents fingerprint read_corpus",
    pairs="Pair PairCounts Pairs pair_rows read_pairs",
    rows="Rows SPECIAL_TOKENS begin_rows collate pack pack_with_documents row_start "
    "train_tokenizer",
    streams="StreamedRows",
)
