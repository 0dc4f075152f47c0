"""Builds the tokenizer that the metadata of a GGUF file describes."""

from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from models.end_tokens import CONTROL
from models.errors import ModelError
from models.gguf.pre_tokenizers import pre_tokenizer

USER_DEFINED, BYTE = 4, 6  # values of tokenizer.ggml.token_type
_PHI3_KEPT = {"<unk>", "<s>", "<|endoftext|>"}  # after these Phi-3 keeps white space
ROLES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}


def build_tokenizer(metadata: dict[str, Any]) -> PreTrainedTokenizerFast:
    """Return the tokenizer with special tokens and chat templates. Raises ModelError."""
    kind = metadata.get("tokenizer.ggml.model")
    if kind not in _BUILDERS:
        raise ModelError(f"its tokenizer is of the kind {kind!r}; supported: {', '.join(_BUILDERS)}")
    try:
        backend, add_bos = _BUILDERS[kind](metadata)
        roles = {f"{role}_token": text for role in ROLES if (text := _special(metadata, role)) is not None}
        _add_tokens(backend, metadata)
        _add_ends(backend, metadata, add_bos, roles)
    except ModelError:
        raise
    except Exception as error:  # the library raises bare Exceptions
        raise ModelError(f"its tokenizer cannot be read: {error!r}") from error
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **roles)
    tokenizer.chat_template = _chat_templates(metadata)
    return tokenizer


def _tokens(metadata: dict[str, Any]) -> list[tuple[str, int]]:
    """Return the text and type of each token; type 1, normal, in files without types."""
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list):
        raise ModelError("the metadata has no list tokenizer.ggml.tokens")
    kinds = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    if not isinstance(kinds, list) or len(kinds) != len(tokens):
        raise ModelError(
            f"tokenizer.ggml.token_type is not a list of {len(tokens)} types, one for each token"
        )
    return list(zip(tokens, kinds, strict=True))


def _vocabulary(metadata: dict[str, Any]) -> dict[str, int]:
    tokens = _tokens(metadata)
    vocabulary = {text: token_id for token_id, (text, _) in enumerate(tokens)}
    if not tokens or len(vocabulary) != len(tokens):
        raise ModelError("its vocabulary is empty or names a token twice")
    return vocabulary


def _byte_level(metadata: dict[str, Any]) -> tuple[Tokenizer, bool]:
    """Return a BPE over bytes, and True if BOS is added where the file is silent."""
    pre = pre_tokenizer(str(metadata.get("tokenizer.ggml.pre", "")))
    merges = [tuple(merge.split(" ")) for merge in metadata.get("tokenizer.ggml.merges") or ()]
    tokenizer = Tokenizer(BPE(_vocabulary(metadata), merges, ignore_merges=pre.ignore_merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.patterns),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    if metadata.get("tokenizer.ggml.add_space_prefix"):
        tokenizer.normalizer = normalizers.Prepend(" ")
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, pre.add_bos


def _sentencepiece(metadata: dict[str, Any]) -> tuple[Tokenizer, bool]:
    """Return a BPE over characters with `▁` for a space; bytes have tokens of their own.

    The space before the first word is also added after each control token, as in llama.cpp.
    """
    vocabulary = _vocabulary(metadata)
    unknown = _special(metadata, "unk")
    model = BPE(
        vocabulary, _merges(metadata, vocabulary), unk_token=unknown, fuse_unk=True, byte_fallback=True
    )
    tokenizer = Tokenizer(model)
    has_prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    prefix = [normalizers.Prepend("▁")] if has_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer, True


def _merges(metadata: dict[str, Any], vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    """Return the merges of the file, or else each pair that makes a token, by the token's score."""
    if merges := metadata.get("tokenizer.ggml.merges"):
        return [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    scores = metadata.get("tokenizer.ggml.scores")
    if not scores or len(scores) != len(vocabulary):
        raise ModelError("its tokenizer has neither merges nor a score for each token")
    pairs = []
    for token_id, (text, kind) in enumerate(_tokens(metadata)):
        if kind in (CONTROL, BYTE):
            continue
        for cut in range(1, len(text)):
            left, right = text[:cut], text[cut:]
            if left in vocabulary and right in vocabulary:
                pairs.append((-scores[token_id], vocabulary[left], vocabulary[right], left, right))
    return [(left, right) for *_, left, right in sorted(pairs)]


def _special(metadata: dict[str, Any], role: str) -> str | None:
    """Return the text of a special token; None if the file has none."""
    token_id = metadata.get(f"tokenizer.ggml.{ROLES[role]}_token_id")
    tokens = metadata.get("tokenizer.ggml.tokens") or []
    if not isinstance(token_id, int) or not 0 <= token_id < len(tokens):
        return None
    return str(tokens[token_id])


def _add_tokens(tokenizer: Tokenizer, metadata: dict[str, Any]) -> None:
    """Let control and user-defined tokens be found whole in a text."""
    tokens = _tokens(metadata)
    strips = _strips_after_control(metadata)
    tokenizer.add_special_tokens(
        [
            AddedToken(text, normalized=False, special=True, rstrip=strips and text not in _PHI3_KEPT)
            for text, kind in tokens
            if kind == CONTROL
        ]
    )
    tokenizer.add_tokens(
        [AddedToken(text, normalized=False) for text, kind in tokens if kind == USER_DEFINED]
    )


def _strips_after_control(metadata: dict[str, Any]) -> bool:
    """Return True for Phi-3, whose control tokens take the white space after them, which no key says."""
    return metadata.get("general.architecture") == "phi3" and metadata.get("tokenizer.ggml.model") == "llama"


def _add_ends(tokenizer: Tokenizer, metadata: dict[str, Any], add_bos: bool, roles: dict[str, str]) -> None:
    """Add BOS and EOS to every text where the file, or else its kind of tokenizer, says so."""
    bos = roles.get("bos_token") if metadata.get("tokenizer.ggml.add_bos_token", add_bos) else None
    eos = roles.get("eos_token") if metadata.get("tokenizer.ggml.add_eos_token", False) else None
    if bos is None and eos is None:
        return
    single = [*([bos] if bos else []), "$A", *([eos] if eos else [])]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=single,
        pair=[*single, *(piece if piece != "$A" else "$B" for piece in single)],
        special_tokens=[(text, tokenizer.token_to_id(text)) for text in {bos, eos} if text is not None],
    )


def _chat_templates(metadata: dict[str, Any]) -> str | dict[str, str] | None:
    """Return the chat template, or several by name."""
    prefix = "tokenizer.chat_template."
    named = {key.removeprefix(prefix): str(text) for key, text in metadata.items() if key.startswith(prefix)}
    default = metadata.get("tokenizer.chat_template")
    if not named:
        return None if default is None else str(default)
    return named if default is None else {"default": str(default), **named}


_BUILDERS = {"gpt2": _byte_level, "llama": _sentencepiece}
