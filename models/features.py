"""Describes architectures by what their specs have beyond the defaults of the spec's fields."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

from models.checkpoint import read_family_spec
from models.errors import ModelError
from models.families import family_of, registered_names
from models.formats import CONVERSIONS, STORED
from models.spec import AttentionSpec, DecoderSpec, MoeSpec

Features = dict[str, tuple[str, ...]]
"""Part of the decoder -> what is special about it: `{"attention": ("window 4096", "qk norm")}`."""

_PARTS = ("decoder", "norm", "layer", "attention", "rope", "mlp", "moe")  # in this order
_SCORE_HEAD = "ForSequenceClassification"


@dataclass(frozen=True)
class Architecture:
    """An architecture with a language model head, as a config.json names it.

    `features` are those of its default configuration in transformers; None if there is none that works.
    `has_scores`: it is also read with a score head, as `...ForSequenceClassification`. `gguf_names` are its
    family's in GGUF files.
    """

    name: str
    features: Features | None
    has_scores: bool
    gguf_names: tuple[str, ...]

    @property
    def description(self) -> str:
        """Return the features as text."""
        return "(no default configuration)" if self.features is None else in_words(self.features)


@dataclass(frozen=True)
class Supported:
    """What can be loaded: architectures, and weight formats by name.

    `stored_formats` are quantizations of safetensors checkpoints, `gguf_types` of tensors in GGUF files,
    `conversions` of unquantized weights while they are loaded.
    """

    architectures: tuple[Architecture, ...]
    stored_formats: tuple[str, ...]
    gguf_types: tuple[str, ...]
    conversions: tuple[str, ...]


def supported() -> Supported:
    """Return what the registries contain. Imports transformers and gguf, which takes seconds."""
    from models.gguf.architectures import gguf_names_of
    from models.gguf.dequantize import TYPE_NAMES

    registered = registered_names()
    architectures = tuple(
        Architecture(
            name,
            _default_features(name),
            f"{_stem(name)}{_SCORE_HEAD}" in registered,
            gguf_names_of(name),
        )
        for name in sorted(registered, key=str.lower)
        if not name.endswith(_SCORE_HEAD)
    )
    return Supported(architectures, tuple(STORED), TYPE_NAMES, tuple(CONVERSIONS))


def features_of(spec: DecoderSpec) -> Features:
    """Return what a model has beyond the defaults, with the number of layers where only some have it."""
    counts: dict[tuple[str, str], int] = {}
    for layer in spec.layers:
        for feature in dict.fromkeys(_differences(layer)):
            counts[feature] = counts.get(feature, 0) + 1
    found: dict[str, list[str]] = {}
    bases = {layer.attention.rope.theta for layer in spec.layers if layer.attention.rope is not None}
    if len(bases) > 1:
        found["rope"] = [f"bases {' and '.join(f'{base:,.0f}' for base in sorted(bases))}"]
    for part, text in _differences(spec):
        found.setdefault(part, []).append(text)
    for (part, text), count in counts.items():
        where = "" if count == spec.num_layers else f" ({count} of {spec.num_layers} layers)"
        found.setdefault(part, []).append(text + where)
    return {part: tuple(found[part]) for part in sorted(found, key=_place)}


def _place(part: str) -> int:
    return _PARTS.index(part) if part in _PARTS else len(_PARTS)


def in_words(features: Mapping[str, Sequence[str]]) -> str:
    """Return features as a line of text: `attention: window 4096, qk norm; layer: norms after`."""
    return "; ".join(f"{part}: {', '.join(texts)}" for part, texts in features.items())


def _differences(spec: Any) -> Iterator[tuple[str, str]]:
    """Yield part and text of each field, also of nested specs, that differs from its default."""
    part = _name(spec)
    if isinstance(spec, AttentionSpec):
        if spec.rope is None:
            yield part, "no rotation"
        elif spec.rope.dim < spec.head_dim:
            yield part, f"rotates {spec.rope.dim} of {spec.head_dim} elements"
    if isinstance(spec, MoeSpec):
        yield part, f"{spec.router.top_k} of {spec.num_experts} experts"
    for field in fields(spec):
        value = getattr(spec, field.name)
        name = field.name.replace("_", " ")
        if is_dataclass(value):
            if field.default is not MISSING:
                yield part, f"{_name(value)} scaling" if name == "scaling" else name
            yield from _differences(value)
        elif field.default is MISSING or value == field.default or isinstance(value, tuple):
            continue
        elif isinstance(value, bool):
            yield part, name if value else f"not {name}"
        else:
            text = f"{value:g}" if isinstance(value, float) else str(value).replace("_", " ")
            yield part, text if name == "kind" else f"{name} {text}"


def _name(spec: Any) -> str:
    """Return the name of a part: `attention` for an AttentionSpec, `yarn` for a YarnScaling."""
    return type(spec).__name__.removesuffix("Spec").removesuffix("Scaling").lower()


def _stem(architecture: str) -> str:
    return architecture.partition("For")[0]


def _default_features(architecture: str) -> Features | None:
    """Return the features of the configuration that transformers makes without arguments."""
    import transformers

    names = (f"{_stem(architecture)}{kind}" for kind in ("TextConfig", "Config"))
    classes = (getattr(transformers, name) for name in names if hasattr(transformers, name))
    if (make_config := next(classes, None)) is None:
        return None
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)  # some defaults contradict each other, and it warns of them
    try:
        config = make_config().to_dict() | {"architectures": [architecture]}
    finally:
        logger.setLevel(level)
    try:
        return features_of(read_family_spec(family_of([architecture]), config, Path(architecture)))
    except ModelError:  # a number of experts that is null, for one: no published model has these defaults
        return None
