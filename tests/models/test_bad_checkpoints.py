"""Each kind of bad checkpoint is one error that names the thing, before memory is allocated.

Covers models/weight_files.py, models/config_check.py, models/config_values.py and models/json_files.py.
"""

import json
import resource
import shutil
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from models.catalog import locate
from models.errors import ModelError
from models.loader import load
from models.weight_files import weight_files
from tests.models.bad_checkpoints import BAD, index, link_as_the_hub_does, renamed
from tests.models.families import FAMILIES, make
from tests.models.harness import CPU, files_of
from tests.tiny_checkpoint import write_checkpoint


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("good") / "model")


@pytest.fixture
def folder(good, tmp_path):
    return shutil.copytree(good, tmp_path / "model")


def open_model(folder):
    return load(locate(str(folder), progress=False), torch.float32, CPU)


@pytest.mark.parametrize("name", BAD)
def test_one_error_that_names_the_thing(folder, name, monkeypatch):
    break_it, message = BAD[name]
    break_it(folder)
    monkeypatch.setattr("models.checkpoint.read_tensors", None)  # would be called after the checks
    with pytest.raises(ModelError, match=message) as caught:
        open_model(folder)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_good_folder_and_an_index_load(folder):
    open_model(folder)
    index(lambda names: None)(folder)
    open_model(folder)


def test_links_of_the_hub_and_within_the_folder(folder, tmp_path):
    index(lambda names: None)(folder)
    open_model(link_as_the_hub_does(folder, tmp_path / "cache"))
    (folder / "data").mkdir()
    (folder / "shard0.safetensors").rename(folder / "data" / "0")
    (folder / "shard0.safetensors").symlink_to("data/0")
    open_model(folder)
    (tmp_path / "link").symlink_to(folder)
    open_model(tmp_path / "link")


def test_a_loop_of_links(folder):
    index(lambda names: None)(folder)
    (folder / "shard0.safetensors").unlink()
    (folder / "shard0.safetensors").symlink_to("shard0.safetensors")
    with pytest.raises(ModelError, match=r"shard0\.safetensors"):
        open_model(folder)


def test_safetensors_beside_other_formats_are_used(folder):
    for name in ("some.gguf", "consolidated.safetensors", "adapter_model.safetensors", "pytorch_model.bin"):
        (folder / name).touch()
    assert weight_files(folder) == [folder / "model.safetensors"]
    renamed("own-name.safetensors")(folder)
    assert weight_files(folder) == [folder / "own-name.safetensors"]
    open_model(folder)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "weights.bin"])
def test_a_file_in_place_of_its_folder(folder, name):
    (folder / name).touch()
    hint = f"; name the folder that it is in: {folder}" if "safetensors" in name else ""
    with pytest.raises(ModelError) as caught:
        open_model(folder / name)
    assert str(caught.value) == f"{folder / name} is neither a folder nor a .gguf file{hint}"


def test_files_without_permission(folder, monkeypatch):
    """Tests may run as root, who may read all, so the refusal is the operating system's in name only."""

    def refuse(self, **_):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr("pathlib.Path.is_file", refuse)
    with pytest.raises(ModelError, match=r"config\.json cannot be read: Permission denied"):
        open_model(folder)


def test_a_name_that_is_too_long():
    with pytest.raises(ModelError, match="cannot be read: File name too long"):
        locate("x" * 5000)


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 300)
    | st.sampled_from([10**6, 2**31, 2**63, 10**30, -(10**12)])
    | st.floats()
    | st.sampled_from(["", "7", "yarn", "linear", "full_attention", "silu"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["0", "factor"]), inner),
    max_leaves=4,
)
KEYS = {
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "max_position_embeddings", "sliding_window", "layer_types"),
    *("rope_parameters", "rope_scaling", "rope_theta", "rms_norm_eps", "hidden_act", "tie_word_embeddings"),
    *("attention_bias", "mlp_bias", "architectures", "quantization_config", "auto_map", "num_labels"),
}
ROPE_KEYS = (
    *("rope_type", "rope_theta", "factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    *("attention_factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    *("short_factor", "long_factor", "partial_rotary_factor"),
)
ROPES = st.dictionaries(st.sampled_from(ROPE_KEYS), VALUES).map(
    lambda values: {"rope_type": "default", "rope_theta": 1e4, "factor": 2.0, **values}
)


@pytest.fixture(scope="module", params=FAMILIES)
def family_folder(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("family")
    make(request.param).save_pretrained(folder)
    return folder


@pytest.fixture
def memory_limit():
    """Two gigabytes more than the process has, so that a huge allocation is an error here."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (2 << 30), hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/statm")
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_configuration_is_read_or_refused(family_folder, memory_limit, data):
    """Any other exception than ModelError fails the test, and so does running out of memory."""
    path = family_folder / "config.json"
    original = path.read_text()
    config = json.loads(original)
    keys = st.sampled_from(sorted({*KEYS, *config}))
    config |= data.draw(st.dictionaries(keys, VALUES, max_size=2))
    if data.draw(st.booleans()):
        config["rope_parameters"] = data.draw(ROPES)
    try:
        path.write_text(json.dumps(config))
        load(files_of(family_folder), torch.float32, CPU)
    except ModelError as error:
        assert str(error)  # noqa: PT017 - success is as good
    finally:
        path.write_text(original)
