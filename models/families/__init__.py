"""Model families: one file of data each, found by the architecture that a checkpoint names."""

from difflib import get_close_matches
from importlib import import_module
from typing import Any, Protocol, cast

from models.errors import ModelError
from models.spec import DecoderSpec
from models.weight_names import Target

_BY_ARCHITECTURE = {
    "ArceeForCausalLM": "models.families.arcee",
    "Cohere2ForCausalLM": "models.families.cohere2",
    "CohereForCausalLM": "models.families.cohere",
    "Dots1ForCausalLM": "models.families.dots1",
    "Ernie4_5ForCausalLM": "models.families.ernie4_5",
    "Exaone4ForCausalLM": "models.families.exaone4",
    "Gemma2ForCausalLM": "models.families.gemma2",
    "Gemma3ForCausalLM": "models.families.gemma3",
    "Gemma3ForConditionalGeneration": "models.families.gemma3_vision",
    "GemmaForCausalLM": "models.families.gemma",
    "Glm4ForCausalLM": "models.families.glm4",
    "Glm4MoeForCausalLM": "models.families.glm4_moe",
    "GlmForCausalLM": "models.families.glm4",
    "GptOssForCausalLM": "models.families.gpt_oss",
    "GraniteForCausalLM": "models.families.granite",
    "GraniteMoeForCausalLM": "models.families.granitemoe",
    "GraniteMoeSharedForCausalLM": "models.families.granitemoe",
    "InternLM2ForCausalLM": "models.families.internlm2",
    "InternLM3ForCausalLM": "models.families.internlm3",
    "LlamaForCausalLM": "models.families.llama",
    "MiniCPMForCausalLM": "models.families.minicpm",
    "Ministral3ForCausalLM": "models.families.ministral3",
    "MinistralForCausalLM": "models.families.llama",
    "Mistral3ForConditionalGeneration": "models.families.mistral3",
    "MistralForCausalLM": "models.families.llama",
    "MixtralForCausalLM": "models.families.mixtral",
    "NemotronForCausalLM": "models.families.nemotron",
    "Olmo2ForCausalLM": "models.families.olmo2",
    "Olmo3ForCausalLM": "models.families.olmo3",
    "OlmoeForCausalLM": "models.families.olmoe",
    "Phi3ForCausalLM": "models.families.phi3",
    "PhiForCausalLM": "models.families.phi",
    "Qwen2ForCausalLM": "models.families.qwen2",
    "Qwen2MoeForCausalLM": "models.families.qwen2_moe",
    "Qwen3ForCausalLM": "models.families.qwen3",
    "Qwen3MoeForCausalLM": "models.families.qwen3_moe",
    "SeedOssForCausalLM": "models.families.seed_oss",
    "SmolLM3ForCausalLM": "models.families.smollm3",
    "StableLmForCausalLM": "models.families.stablelm",
    "Starcoder2ForCausalLM": "models.families.starcoder2",
    "LlamaForSequenceClassification": "models.families.llama",
    "MistralForSequenceClassification": "models.families.llama",
    "Qwen2ForSequenceClassification": "models.families.qwen2",
    "Qwen3ForSequenceClassification": "models.families.qwen3",
}


class Family(Protocol):
    """The interface of a family's module.

    The map goes from a tensor's name in the checkpoint, without `.weight` or `.bias` and with `*` for the
    layer, to its address in the decoder, or a `Packed` of several; None: it is not loaded.
    """

    WEIGHT_MAP: dict[str, Target]

    def spec(self, config: dict[str, Any]) -> DecoderSpec:
        """Read a Hugging Face configuration."""


def architectures_of(config: dict[str, Any]) -> list[str]:
    """Return the architectures that a Hugging Face configuration names, or the one of its `model_type`.

    Raises ModelError if none are named and `model_type` does not decide it.
    """
    named = config.get("architectures")
    if names := [name for name in (named if isinstance(named, list) else [named]) if isinstance(name, str)]:
        return names
    model_type = config.get("model_type")
    found = _of_model_type(model_type) if isinstance(model_type, str) else []
    if len(found) > 1:
        raise ModelError(
            f"config.json names no architecture, and its model_type '{model_type}' is that of "
            f'{" and ".join(found)}: name one as "architectures"'
        )
    return found


def _of_model_type(model_type: str) -> list[str]:
    """Return the supported architectures that generate text, of a `model_type` as transformers writes it.

    `qwen3_moe` is Qwen3MoeForCausalLM; the suffix `_text` is of a text model beside one with images.
    """
    wanted = model_type.removesuffix("_text").replace("_", "").lower()
    ends = ("ForCausalLM",) if model_type.endswith("_text") else ("ForCausalLM", "ForConditionalGeneration")
    return [
        name
        for name in _BY_ARCHITECTURE
        if name.endswith(ends) and name.partition("For")[0].replace("_", "").lower() == wanted
    ]


def family_of(architectures: list[str]) -> Family:
    """Return the family of a Hugging Face checkpoint. Raises ModelError for unknown `architectures`."""
    for name in architectures:
        if name in _BY_ARCHITECTURE:
            return cast(Family, import_module(_BY_ARCHITECTURE[name]))
    close = [near for name in architectures for near in get_close_matches(name, _BY_ARCHITECTURE)]
    nearest = f"nearest: {', '.join(close)}; " if close else ""
    raise ModelError(
        f"architecture {' / '.join(architectures) or '(none named)':.99} is not supported; {nearest}"
        f"`monoloop models` lists the {len(_BY_ARCHITECTURE)} that are"
    )


def registered_names() -> frozenset[str]:
    """Return the architectures that Hugging Face checkpoints may name."""
    return frozenset(_BY_ARCHITECTURE)
