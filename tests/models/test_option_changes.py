"""Any option of a configuration that changes transformers' logits changes ours alike, or is refused by name.

Options are those of the configuration class, so one that a family does not read is found here.
`make test-long` tries nearly all.
"""

from typing import Any

import pytest
import torch
import transformers
from hypothesis import HealthCheck, assume, given, note, settings
from hypothesis import strategies as st

from models.errors import ModelError
from models.loader import load
from tests.models.families import FAMILIES, make, prompt
from tests.models.harness import CPU, files_of, forward_logits, transformers_logits

IS_LONG = settings.get_current_profile_name() == "long"
# Options that do not change logits, and sizes that FAMILIES chooses so that the test is fast.
IGNORED = {
    *("architectures", "dtype", "id2label", "label2id", "model_type", "transformers_version", "use_cache"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "num_hidden_layers", "vocab_size"),
}
ROTARY: list[dict[str, Any]] = [
    {"rope_type": "default", "rope_theta": 5e5},
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "attention_factor": 1.3},
    {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "mscale": 0.7,
        "mscale_all_dim": 0.5,
        "truncate": False,
    },
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
]
ACTIVATIONS = ["silu", "gelu", "gelu_pytorch_tanh", "gelu_new", "relu", "relu2", "quick_gelu"]


def other_values(key: str, value: Any) -> list[Any]:
    """Return values to try instead of an option's."""
    if key == "rope_parameters":
        return [{"rope_theta": 1e4, **rope} for rope in ROTARY]
    if key in ("hidden_act", "hidden_activation"):
        return ACTIVATIONS
    if key == "sliding_window":
        return [7, None]
    if key == "layer_types" and value:
        return [value[::-1], ["full_attention"] * len(value)]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, value * 2, max(value - 1, 1), max(value // 2, 1)]
    if isinstance(value, float):
        return [value * 1.7 or 0.3]
    if value is None:
        return [True, 1.3, 5]
    if isinstance(value, list) and all(item in (0, 1) for item in value):
        return [[1 - item for item in value]]
    return []


@st.composite
def changes(draw: st.DrawFn) -> tuple[str, str, Any]:
    """Draw a family, an option of its configuration class, and another value for it."""
    name = draw(st.sampled_from([name for name, family in FAMILIES.items() if family.make is None]))
    family = FAMILIES[name]
    config = getattr(transformers, family.architecture).config_class(**family.config).to_dict()
    options = {
        key: other_values(key, value)
        for key, value in config.items()
        if key not in IGNORED and other_values(key, value)
    }
    key = draw(st.sampled_from(sorted(options)))
    return name, key, draw(st.sampled_from(options[key]))


@settings(max_examples=3000 if IS_LONG else 60, suppress_health_check=list(HealthCheck))
@given(changes())
def test_a_changed_option_is_computed_like_transformers_or_refused(
    tmp_path_factory: pytest.TempPathFactory, change: tuple[str, str, Any]
) -> None:
    name, key, value = change
    note(f"{name}: {key} = {value}")
    ids = prompt(70)
    try:
        model = make(name, **{key: value})
        expected = transformers_logits(model, ids)
    except Exception as error:
        note(f"transformers refuses it: {error!r}")
        assume(False)
    assume(torch.isfinite(expected).all())
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    try:
        decoder = load(files_of(folder), torch.float32, CPU)
    except ModelError as error:
        note(f"refused: {error}")
        return
    found = forward_logits(decoder, ids, [30, 1, 39])
    worst = (found - expected).abs().max().item() / expected.abs().max().item()
    assert worst < 1e-4, f"logits differ by {worst:.1e} of the largest"
