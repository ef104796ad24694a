"""The tokenizer of a run as files that Hugging Face's tokenizers read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from andrea_ablate.data.tokenizers import Tokenizer

END = "<|endoftext|>"  # what a tokenizer of ours without such a token gets, under the id that ends its documents


def write_tokenizer(folder: Path, tokenizer: Tokenizer, max_seq_len: int) -> None:
    """``tokenizer.json`` and ``tokenizer_config.json``, from a tokenizer that has the first (`to_json`)."""
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as Fast

    text, end = tokenizer.to_json(), tokenizer.end
    assert text is not None, "bytes, bpe and file have one"
    model = Fast.from_str(text)
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": max_seq_len}
    if end is not None:
        if model.id_to_token(end) is None:
            model.add_special_tokens([AddedToken(END, special=True, normalized=False)])
        assert model.id_to_token(end) is not None, f"the token after the last one is not {end}"
        config |= {"bos_token": model.id_to_token(end), "eos_token": model.id_to_token(end)}
    (folder / "tokenizer.json").write_text(model.to_str(pretty=True), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
