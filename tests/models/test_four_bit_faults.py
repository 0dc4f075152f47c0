"""Faults of checkpoints of four bits: an error that names the module or the tensor, never other numbers.

Covers models/formats/stored_int.py, models/formats/mxfp4.py and models/loader.py.
"""

import json

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from models.errors import ModelError
from models.formats import STORED, stored_format
from models.formats.base import WHOLE, LinearShape
from models.loader import load
from tests.models.families import make
from tests.models.harness import CPU, files_of
from tests.models.packed_int_checkpoints import (
    AWQ,
    GPTQ,
    awq_tensors,
    gptq_tensors,
    linears,
    llama,
    packed_tensors,
    quantized,
    save,
)
from tests.models.test_auto_round import CONFIG as AUTO_ROUND
from tests.models.test_bad_checkpoints import VALUES
from tests.models.test_compressed_tensors import CONFIG as PACKED
from tests.models.test_compressed_tensors import GROUP, WEIGHTS

ASYMMETRIC = {"group_0": GROUP | {"weights": WEIGHTS | {"symmetric": False}}}
CONFIGS = {
    "awq": AWQ,
    "gptq": GPTQ,
    "auto-round": AUTO_ROUND,
    "pack-quantized": PACKED | {"config_groups": ASYMMETRIC},
}
MODULES = {"down": "model.layers.1.mlp.down_proj", "k": "model.layers.0.self_attn.k_proj"}


def packed(name, codes, scales, zeros, groups):
    if name == "awq":
        return awq_tensors(codes, scales, zeros)
    if name == "pack-quantized":
        return packed_tensors(codes, scales, zeros, None)
    parts = gptq_tensors(codes, scales, zeros, groups, 1)
    if name == "auto-round":
        del parts["g_idx"]
    return parts


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """A folder for each format."""
    folders = {}
    for name, config in CONFIGS.items():
        model, tensors = llama(), {}
        for module, linear in linears(model).items():
            groups = torch.arange(linear.in_features) // 64
            codes, scales, zeros, _ = quantized(linear.weight.data, 64, True)
            tensors[module] = packed(name, codes, scales, zeros, groups)
        folders[name] = tmp_path_factory.mktemp(name)
        save(model, folders[name], tensors, config)
    return folders


def filled(value):
    """Replace the first element."""

    def change(tensor):
        tensor.view(-1)[0] = value
        return tensor

    return change


KINDS = {  # of scales, packed weights and packed zero points
    "awq": ("scales", "qweight", "qzeros"),
    "gptq": ("scales", "qweight", "qzeros"),
    "auto-round": ("scales", "qweight", "qzeros"),
    "pack-quantized": ("weight_scale", "weight_packed", "weight_zero_point"),
}
FAULTS = [  # index of the kind, what is changed, and the error: {0} is the module, {1} the tensor
    (0, filled(torch.nan), r"{0}.*: scales( of 'k')? are not finite"),
    (0, filled(torch.inf), r"{0}.*: scales( of 'k')? are not finite"),
    (0, torch.zeros_like, r"{0}.*: a scale( of 'k')? is 0 in a group whose weights are not"),
    (0, torch.Tensor.double, r"{0}.*scales? holds torch.float64, and scales are floats of 16 or 32 bits"),
    (0, torch.Tensor.int, r"{0}.*scales? holds torch.int32"),
    (0, lambda tensor: tensor.to(torch.float8_e4m3fn), r"{0}.*scales? holds torch.float8_e4m3fn"),
    (
        1,
        torch.Tensor.float,
        r"{0}.*(qweight|weight_packed) holds torch.float32, and 4 bits are packed in int32",
    ),
    (1, torch.Tensor.long, r"{0}.* holds torch.int64, and 4 bits are packed"),
    (2, torch.Tensor.short, r"{0}.* holds torch.int16, and 4 bits are packed"),
    *((kind, lambda tensor: None, r"lacks {1}") for kind in range(3)),
    *(
        (kind, lambda tensor: tensor[:-1], r"{1} has the shape .*; the configuration says")
        for kind in range(3)
    ),
    *((kind, torch.Tensor.flatten, r"{1} has the shape .*; the configuration says") for kind in range(3)),
    (1, lambda tensor: torch.cat([tensor, tensor], 1), r"{1} has the shape"),
]


def changed(folder, target, tensors=None, **config):
    """Write a checkpoint again, with tensors by name changed (or left out), and other settings."""
    found = load_file(folder / "model.safetensors")
    for name, change in (tensors or {}).items():
        new = change(found.pop(name))
        if new is not None:
            found[name] = new.contiguous()
    save_file(found, target / "model.safetensors")
    settings = json.loads((folder / "config.json").read_text())
    settings["quantization_config"] |= config
    (target / "config.json").write_text(json.dumps(settings))
    return files_of(target)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("module", MODULES.values(), ids=MODULES)
@pytest.mark.parametrize(("kind", "change", "message"), FAULTS)
def test_a_faulty_tensor_is_named(checkpoints, name, module, kind, change, message, tmp_path):
    tensor = f"{module}.{KINDS[name][kind]}"
    files = changed(checkpoints[name], tmp_path, {tensor: change})
    with pytest.raises(ModelError, match=message.format(module, tensor)):
        load(files, torch.float32, CPU)


@pytest.mark.parametrize("name", CONFIGS)
def test_outputs_of_one_product_have_scales_of_one_dtype(checkpoints, name, tmp_path):
    """The largest of a wider dtype would become infinite."""
    tensor = f"{MODULES['k']}.{KINDS[name][0]}"
    files = changed(checkpoints[name], tmp_path, {tensor: torch.Tensor.bfloat16})
    with pytest.raises(ModelError, match=r"scales? holds torch\.(bfloat16|float16), and other scales"):
        load(files, torch.float32, CPU)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (filled(-1), "g_idx( of 'k')? has groups that are none of the"),
        (filled(3), "g_idx( of 'k')? has"),
        (filled(10**6), "g_idx( of 'k')? has groups that are none of the"),
        (torch.Tensor.float, "g_idx holds torch.float32, and not int32 or int64"),
        (lambda tensor: None, "lacks {0}.g_idx"),
        (lambda tensor: tensor[1:], "{0}.g_idx has the shape"),
        (torch.zeros_like, "g_idx has not 64 inputs in each group"),
    ],
)
@pytest.mark.parametrize("module", MODULES.values(), ids=MODULES)
def test_faulty_groups_of_inputs(checkpoints, module, change, message, tmp_path):
    files = changed(checkpoints["gptq"], tmp_path, {f"{module}.g_idx": change})
    with pytest.raises(ModelError, match=message.format(module)):
        load(files, torch.float32, CPU)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("size", [0, -2, 16, 32, 48, 96, 128, 10**9, "64", None, 64.0, True])
def test_a_wrong_group_size(checkpoints, name, size, tmp_path):
    group = GROUP | {"weights": WEIGHTS | {"symmetric": False, "group_size": size}}
    config = {"group_size": size} if name != "pack-quantized" else {"config_groups": {"group_0": group}}
    files = changed(checkpoints[name], tmp_path, **config)
    with pytest.raises(ModelError, match=r"group_size|groups of|groups \d+ inputs|scales? has the shape"):
        load(files, torch.float32, CPU)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("bits", [1, 2, 3, 5, 8, 16, "4", None, 4.5])
def test_a_wrong_number_of_bits(checkpoints, name, bits, tmp_path):
    group = GROUP | {"weights": WEIGHTS | {"num_bits": bits, "symmetric": False}}
    config = {"bits": bits} if name != "pack-quantized" else {"config_groups": {"group_0": group}}
    files = changed(checkpoints[name], tmp_path, **config)
    # AutoRound leaves linears of 16 bits out, and eight bits take another shape than four.
    with pytest.raises(ModelError, match=r"bits is not supported|has the shape|lacks .*\.weight"):
        load(files, torch.float32, CPU)


@pytest.mark.parametrize("in_features", [200, 72])
@pytest.mark.parametrize("bits", [4, 8])
def test_a_last_group_that_is_not_full(in_features, bits):
    """GPTQ and AutoRound allow it."""
    torch.manual_seed(0)
    groups = torch.arange(in_features) // 64
    codes, scales, zeros, values = quantized(torch.randn(24, in_features), 64, True, groups, bits)
    for config, drop in ((GPTQ, None), (AUTO_ROUND, "g_idx")):
        shape = LinearShape(in_features, {"": 24})
        weights = stored_format(config)(config | {"bits": bits}, torch.float32, CPU, WHOLE)(
            [MODULES["down"]], shape
        )
        parts = gptq_tensors(codes, scales, zeros, groups, 1, bits)
        parts.pop(drop, None)
        assert weights.parameters() == {kind: tuple(tensor.shape) for kind, tensor in parts.items()}
        for kind, tensor in parts.items():
            weights.fill(kind, tensor)
        x = torch.randn(3, in_features)
        torch.testing.assert_close(weights.matmul(x), x @ values.t(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("in_features", "out_features"), [(196, 24), (192, 20), (100, 23), (193, 24)])
def test_sizes_that_cannot_be_packed(bits, in_features, out_features):
    whole = 32 // bits
    for config in (GPTQ, AUTO_ROUND, AWQ)[: 2 if bits == 8 else 3]:
        make_linear = stored_format(config)(config | {"bits": bits}, torch.float32, CPU, WHOLE)
        shape = LinearShape(in_features, {"": out_features})
        if in_features % whole == out_features % whole == 0 and config is not AWQ:
            assert make_linear([MODULES["down"]], shape).parameters()
        else:
            with pytest.raises(
                ModelError, match=f"down_proj: {out_features} outputs and {in_features} inputs"
            ):
                make_linear([MODULES["down"]], shape).parameters()


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpt_oss")
    make("gpt_oss in MXFP4").save_pretrained(folder)
    return folder


EXPERTS = "model.layers.1.mlp.experts.down_proj"


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("scales", filled(255), f"{EXPERTS}_.*: a scale of '0' is not a number"),
        ("scales", torch.Tensor.bfloat16, f"{EXPERTS}_.*: 0.scales holds torch.bfloat16"),
        ("scales", lambda tensor: None, f"lacks {EXPERTS}_scales$"),
        ("scales", lambda tensor: tensor[..., :-1], f"{EXPERTS}_scales.* has the shape"),
        ("blocks", torch.Tensor.int, f"{EXPERTS}_.*: 0.blocks holds torch.int32"),
        ("blocks", lambda tensor: None, f"lacks {EXPERTS}_blocks$"),
        ("blocks", lambda tensor: tensor.flatten(2), f"{EXPERTS}_blocks.* has the shape"),
    ],
)
def test_faults_of_mxfp4(gpt_oss, kind, change, message, tmp_path):
    load(changed(gpt_oss, tmp_path), torch.float32, CPU)
    files = changed(gpt_oss, tmp_path, {f"{EXPERTS}_{kind}": change})
    with pytest.raises(ModelError, match=message):
        load(files, torch.float32, CPU)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_configuration_is_read_or_refused(checkpoints, data, tmp_path):
    """Any other exception than ModelError fails the test."""
    folder = checkpoints[data.draw(st.sampled_from(sorted(CONFIGS)))]
    keys = {"bits", "group_size", "dynamic", "extra_config", "modules_to_not_convert", "lm_head", "version"}
    keys |= {
        "config_groups",
        "ignore",
        "packing_format",
        "block_name_to_quantize",
        "quantization",
        "data_type",
    }
    keys |= {"quant_algo", "checkpoint_format", "modules_in_block_to_quantize", "exclude_modules"}
    config = data.draw(st.dictionaries(st.sampled_from(sorted(keys)), VALUES, min_size=1, max_size=2))
    if data.draw(st.booleans()):
        config["quant_method"] = data.draw(st.sampled_from(sorted(STORED)))
    try:
        load(changed(folder, tmp_path, **config), torch.float32, CPU)
    except ModelError as error:
        assert str(error)  # noqa: PT017 - success is as good
