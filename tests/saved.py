"""A tiny model with a byte tokenizer, saved as a folder that lm-eval can load; knows no policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from evalkit.model import tiny


def save(folder: Path, **overrides: Any) -> Path:
    """Save a tiny random Llama over bytes, with specials <s> and </s>, into `folder`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<s>": 0, "</s>": 1, **{letter: i + 2 for i, letter in enumerate(alphabet)}}
    core = Tokenizer(BPE(vocabulary, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>").save_pretrained(folder)
    tiny(vocab_size=len(vocabulary), bos_token_id=0, eos_token_id=1, pad_token_id=1, **overrides).save_pretrained(folder)
    return folder
