"""Data: corpora, tokenizers, the prepared token files, windows; Lightning's part, datamodule.py, is imported apart."""

from andrea_ablate.data import shards, synthetic  # each registers its source
from andrea_ablate.data.corpora import CORPORA
from andrea_ablate.data.prepare import Corpus, prepare, tokenizer_of
from andrea_ablate.data.tokenizers import TOKENIZERS
from andrea_ablate.data.windows import Windows

__all__ = ["CORPORA", "TOKENIZERS", "Corpus", "Windows", "prepare", "shards", "synthetic", "tokenizer_of"]
