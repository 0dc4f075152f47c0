"""A Llama of random weights, and as a checkpoint on disk that loads in a moment: one character a token."""

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tests.engine.toy import EOS, VOCAB_SIZE
from tests.engine.toy_engine import toy_tokenizer

ASCII = [chr(ord(" ") + token_id) for token_id in range(VOCAB_SIZE)]


def tiny_llama(seed: int, **config: Any) -> LlamaForCausalLM:
    """A two-layer Llama whose random weights depend on `seed`; `config` says what is not as usual."""
    usual = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.5,  # or all tokens would be about as likely
    }
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**(usual | config))).eval()


def write_checkpoint(folder: Path, seed: int = 0) -> Path:
    """Write a Llama and a tokenizer; returns the folder."""
    tiny_llama(seed, eos_token_id=EOS, bos_token_id=None).save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=toy_tokenizer(ASCII)).save_pretrained(folder)
    return folder
