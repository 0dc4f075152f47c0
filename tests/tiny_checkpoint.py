"""A checkpoint on disk that loads in a moment: random weights, one character a token."""

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tests.engine.toy import EOS, VOCAB_SIZE
from tests.engine.toy_engine import toy_tokenizer

ASCII = [chr(ord(" ") + token_id) for token_id in range(VOCAB_SIZE)]


def write_checkpoint(folder: Path, seed: int = 0) -> Path:
    """Write a two-layer Llama whose weights depend on `seed`; returns the folder."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.5,  # or all tokens would be about as likely
        eos_token_id=EOS,
        bos_token_id=None,
    )
    torch.manual_seed(seed)
    LlamaForCausalLM(config).save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=toy_tokenizer(ASCII)).save_pretrained(folder)
    return folder
