"""Llamas of random weights, and as checkpoints on disk that load in a moment: one character a token."""

from pathlib import Path
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from tests.engine.toy import EOS, VOCAB_SIZE
from tests.engine.toy_engine import toy_tokenizer

ASCII = [chr(ord(" ") + token_id) for token_id in range(VOCAB_SIZE)]


def tiny_config(**config: Any) -> LlamaConfig:
    """Return the configuration of a two-layer Llama; `config` says what is not as usual."""
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
    return LlamaConfig(**(usual | config))


def tiny_llama(seed: int, **config: Any) -> LlamaForCausalLM:
    """Return a language model whose random weights depend on `seed`."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(tiny_config(**config)).eval()


def tiny_classifier(num_labels: int) -> LlamaForSequenceClassification:
    """Return a model with a score head."""
    torch.manual_seed(3)
    return LlamaForSequenceClassification(tiny_config(num_labels=num_labels)).eval()


def write_checkpoint(folder: Path, seed: int = 0) -> Path:
    """Write a Llama and a tokenizer; returns the folder."""
    return write_model(folder, tiny_llama(seed, eos_token_id=EOS, bos_token_id=None))


def write_model(folder: Path, model: PreTrainedModel) -> Path:
    """Write a model and a tokenizer; returns the folder."""
    model.save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=toy_tokenizer(ASCII)).save_pretrained(folder)
    return folder
