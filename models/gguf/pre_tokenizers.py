"""How each pre-tokenizer that a GGUF file may name cuts a text into words, before merges are applied.

The file has the name alone (`tokenizer.ggml.pre`); the patterns are those of the models' own tokenizer.json.
A wrong one gives other tokens than the model was trained on, so a name that is not here is refused.
"""

from typing import NamedTuple

from models.errors import ModelError

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
BEFORE = r"[^\r\n\p{L}\p{N}]?"
SYMBOLS = r" ?[^\s\p{L}\p{N}]+"

GPT2 = rf"'(?:[sdmt]|ll|ve|re)| ?\p{{L}}+| ?\p{{N}}+|{SYMBOLS}|\s+(?!\S)|\s+"
LLAMA3 = rf"{CONTRACTIONS}|{BEFORE}\p{{L}}+|\p{{N}}{{1,3}}|{SYMBOLS}[\r\n]*|{SPACES}"
QWEN2 = rf"{CONTRACTIONS}|{BEFORE}\p{{L}}+|\p{{N}}|{SYMBOLS}[\r\n]*|{SPACES}"
SEED = rf"{CONTRACTIONS}|{BEFORE}\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{SPACES}"
TEKKEN = rf"{BEFORE}{UPPER}*{LOWER}+|{BEFORE}{UPPER}+{LOWER}*|\p{{N}}|{SYMBOLS}[\r\n/]*|{SPACES}"
GPT4O = (
    rf"{BEFORE}{UPPER}*{LOWER}+{CONTRACTIONS}?|{BEFORE}{UPPER}+{LOWER}*{CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}|{SYMBOLS}[\r\n/]*|{SPACES}"
)
DIGIT = r"\p{N}"
CJK = "[一-龥ࠀ-一가-퟿]+"


class PreTokenizer(NamedTuple):
    """Patterns that cut a text one after the other, and what the name implies where a file is silent.

    `ignore_merges`: a word of the vocabulary is one token even if no merges lead to it.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False


_GPT2 = PreTokenizer((GPT2,))
_DIGITS = PreTokenizer((DIGIT, GPT2))
_LLAMA3 = PreTokenizer((LLAMA3,), ignore_merges=True, add_bos=True)
_CL100K = PreTokenizer((LLAMA3,))
_QWEN2 = PreTokenizer((QWEN2,))
_GPT4O = PreTokenizer((GPT4O,))

PRE_TOKENIZERS = {
    **dict.fromkeys(("gpt-2", "phi-2", "olmo", "mpt", "exaone4", "trillion", "mellum", "gigachat"), _GPT2),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _DIGITS
    ),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "midm-2.0"), _LLAMA3),
    **dict.fromkeys(("smaug-bpe", "dbrx", "glm4", "chatglm-bpe"), _CL100K),
    **dict.fromkeys(
        ("qwen2", "deepseek-r1-qwen", "kormo", "megrez", "stablelm2", "hunyuan", "grok-2"), _QWEN2
    ),
    **dict.fromkeys(("gpt-4o", "llama4"), _GPT4O),
    "tekken": PreTokenizer((TEKKEN,), ignore_merges=True, add_bos=True),
    "seed-coder": PreTokenizer((SEED,)),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", CJK, DIGIT)),
}


def pre_tokenizer(name: str) -> PreTokenizer:
    """Return the pre-tokenizer of that name. Raises ModelError for a name that is not known."""
    if name in PRE_TOKENIZERS:
        return PRE_TOKENIZERS[name]
    raise ModelError(
        f"its pre-tokenizer {name!r} is not known here, and with another one the model would see other "
        "tokens than it was trained on; use the checkpoint that the file was made from"
        if name
        else "it names no pre-tokenizer (tokenizer.ggml.pre), as old files do; convert the model again"
    )
