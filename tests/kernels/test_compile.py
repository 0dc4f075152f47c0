"""Every Triton kernel compiles for an H100, which needs no GPU: the interpreter checks fewer rules."""

import os
import re
from typing import Any

import pytest

from kernels.act_mul import _act_mul_kernel
from kernels.block_linear import _block_linear_kernel
from kernels.block_linear import launch_shape as block_launch
from kernels.decode_attention import _decode_kernel, launch_shape
from kernels.dispatch import HAS_TRITON
from kernels.eight_bit_linear import _dequantize_kernel as _dequantize_rows_kernel
from kernels.eight_bit_linear import launch_shape as eight_bit_launch
from kernels.expert_routing import _group_kernel, _route_kernel
from kernels.expert_sum import _expert_sum_kernel
from kernels.four_bit_grouped import _four_bit_grouped_kernel
from kernels.four_bit_grouped import tile_shape as four_bit_tile
from kernels.four_bit_linear import _four_bit_linear_kernel
from kernels.four_bit_linear import launch_shape as four_bit_launch
from kernels.four_bit_weight import _dequantize_kernel
from kernels.grouped_linear import _grouped_linear_kernel
from kernels.grouped_linear import tile_shape as grouped_tile
from kernels.grouped_linear_sum import _matvec_sum_kernel
from kernels.layer_norm import _layer_norm_kernel
from kernels.logits import _scaled_logits_kernel
from kernels.logprobs import _top_logprobs_kernel
from kernels.matvec import _matvec_kernel
from kernels.penalties import _apply_penalties_kernel
from kernels.philox import _uniform_kernel
from kernels.prefill_attention import _prefill_kernel, tile_shape
from kernels.quantize_rows import _quantize_kernel
from kernels.rms_norm import _rms_norm_kernel
from kernels.rope_kv_write import _rope_kv_write_kernel
from kernels.router import _router_kernel
from kernels.sampling import _sample_kernel
from kernels.scaled_linear import _scaled_linear_kernel
from kernels.scaled_linear import launch_shape as scaled_launch
from kernels.step_inputs import _decode_inputs_kernel, _step_inputs_kernel
from kernels.token_mask import _apply_token_mask_kernel

pytestmark = pytest.mark.skipif(
    not HAS_TRITON or os.environ.get("TRITON_INTERPRET") == "1",
    reason="needs triton, and not its interpreter",
)

# Types of the arguments by name; other pointers are bf16, other scalars int32.
NAMES = {
    "fp32": "logits_ptr temperature_ptr top_p_ptr min_p_ptr values_ptr presence_ptr frequency_ptr "
    "repetition_ptr cos_sin_ptr partial_ptr statistics_ptr chosen_logprob_ptr top_values_ptr "
    "angles_ptr q_scale_ptr sinks_ptr eps scale softcap "
    "value_scale k_inverse v_inverse",
    "i32": "page_table_ptr query_start_ptr context_lens_ptr num_rows_ptr arrived_ptr work_ptr top_k_ptr "
    "lanes_ptr ids_ptr order_ptr tiles_ptr output_counts_ptr masks_ptr slot_tables_ptr",
    "i64": "seed_ptr position_ptr positions_ptr slot_mapping_ptr slots_ptr tokens_ptr chosen_ptr top_ids_ptr "
    "staging_ptr newest_ptr token_ids_ptr rows_ptr known_ptr new_pages_ptr logits_indices_ptr "
    "sampled_slots_ptr sampled_positions_ptr",
    "fp16": "k_scales_ptr v_scales_ptr",
    "i1": "prompt_mask_ptr",
}
TYPES = {name: dtype for dtype, names in NAMES.items() for name in names.split()}


def type_of(name: str, overrides: dict[str, str]) -> str:
    types = TYPES | overrides
    return "*" + types.get(name, "bf16") if name.endswith("_ptr") else types.get(name, "i32")


def compile_for_h100(kernel, constants: dict[str, Any], num_warps=4, num_stages=2, **overrides: str) -> str:
    """Return the PTX."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {
        name: "constexpr" if name in constants else type_of(name, overrides) for name in kernel.arg_names
    }
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(kernel.arg_names)
        if name.endswith(("_ptr", "_stride", "in_features"))
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    options = {"num_warps": num_warps, "num_stages": num_stages}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]


def attention_constants(head_dim: int, dim_block: int, **more: Any) -> dict[str, Any]:
    return {
        "NUM_KV_HEADS": 8,
        "GROUP": 4,
        "HEAD_DIM": head_dim,
        "DIM_BLOCK": dim_block,
        "PAGE_SIZE": 16,
        "WINDOW": 0,
        "SOFTCAP": False,
        "SINKS": False,
        "KV_KIND": "float",
        "STORED": head_dim,
        "NUM_SCALES": 0,
        **more,
    }


@pytest.mark.parametrize(
    ("head_dim", "dim_block", "options"),
    [
        (128, 128, {"COUNTED": False}),
        (64, 64, {"COUNTED": True}),
        (80, 128, {"COUNTED": True, "WINDOW": 100, "SOFTCAP": True, "SINKS": True, "PAGE_SIZE": 1}),
    ],
)
def test_prefill_attention_uses_the_warpgroup_matrix_unit(head_dim, dim_block, options):
    shape = tile_shape(dim_block, 2)
    constants = attention_constants(
        head_dim, dim_block, BLOCK_M=shape.block_m, BLOCK_N=shape.block_n, **options
    )
    ptx = compile_for_h100(_prefill_kernel, constants, shape.num_warps, shape.num_stages)
    assert "wgmma.mma_async" in ptx
    assert "cp.async" in ptx, "keys and values are loaded ahead"


@pytest.mark.parametrize(
    ("head_dim", "dim_block", "options"),
    [
        (128, 128, {}),
        (64, 64, {}),
        (80, 128, {"WINDOW": 100, "SOFTCAP": True, "SINKS": True, "PAGE_SIZE": 1}),
    ],
)
def test_decode_attention_uses_the_matrix_unit(head_dim, dim_block, options):
    launch = launch_shape(dim_block, 2)
    constants = attention_constants(
        head_dim,
        dim_block,
        USE_PTX=False,
        GROUP_BLOCK=8,
        MEMBERS=4,
        BLOCK_N=launch.block_n,
        **options,
    )
    ptx = compile_for_h100(_decode_kernel, constants, launch.num_warps, launch.num_stages)
    assert "mma.sync" in ptx
    assert "cp.async" in ptx, "keys and values are loaded ahead"


# Types of keys and values, elements of a head of 128 and scales.
QUANTIZED = {"fp8": ("fp8e4nv", 128, 0), "int8": ("i8", 128, 1), "int4": ("u8", 64, 8)}


def quantized(kind: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the constants and the types of arguments of a cache of a kind."""
    dtype, stored, num_scales = QUANTIZED[kind]
    constants = {"KV_KIND": kind, "STORED": stored, "NUM_SCALES": num_scales}
    return constants, {"k_cache_ptr": dtype, "v_cache_ptr": dtype}


@pytest.mark.parametrize("kind", QUANTIZED)
def test_attention_over_quantized_keys(kind):
    constants, types = quantized(kind)
    launch = launch_shape(128, 2)
    decode = attention_constants(
        128, 128, USE_PTX=True, GROUP_BLOCK=8, MEMBERS=4, BLOCK_N=launch.block_n, **constants
    )
    ptx = compile_for_h100(_decode_kernel, decode, launch.num_warps, launch.num_stages, **types)
    assert "mma.sync" in ptx
    assert "cp.async" in ptx, "keys and values are loaded ahead"
    assert "ld.shared.b8" not in ptx, "values are transposed two at a time"
    shape = tile_shape(128, 2)
    prefill = attention_constants(
        128, 128, COUNTED=False, BLOCK_M=shape.block_m, BLOCK_N=shape.block_n, **constants
    )
    ptx = compile_for_h100(_prefill_kernel, prefill, shape.num_warps, shape.num_stages, **types)
    assert "wgmma.mma_async" in ptx
    assert "cp.async" in ptx, "keys and values are loaded ahead"


@pytest.mark.parametrize("num_tokens", [1, 64, 256, 2048])
@pytest.mark.parametrize(
    ("dtype", "sums", "operands"), [("fp8e4nv", "fp32", "e4m3.e4m3"), ("i8", "i32", "s8.s8")]
)
def test_scaled_linear_uses_the_matrix_unit(num_tokens, dtype, sums, operands):
    ptx = scaled_linear_ptx(scaled_launch(num_tokens, 6144, 4096), dtype, dtype, sums)
    assert re.search(rf"wgmma\.mma_async\S*\.{operands}", ptx)


@pytest.mark.parametrize(
    ("num_tokens", "instruction"), [(16, "mma.sync"), (64, "wgmma"), (128, "wgmma"), (2048, "wgmma")]
)
@pytest.mark.parametrize("out_features", [4096, 28672])
@pytest.mark.parametrize("dtype", ["fp8e4nv", "i8", "u8"])
def test_eight_bit_linear_uses_the_matrix_unit(num_tokens, instruction, out_features, dtype):
    ptx = scaled_linear_ptx(eight_bit_launch(num_tokens, out_features, 2), "bf16", dtype, "fp32")
    assert instruction in ptx


def scaled_linear_ptx(launch, dtype, weight_dtype, sums):
    constants = {
        "HAS_BIAS": True,
        "EVEN_K": True,
        "WEIGHT_LEFT": launch.weight_left,
        "NUM_SPLITS": launch.num_splits,
        "BLOCK_M": launch.block_m,
        "BLOCK_N": launch.block_n,
        "BLOCK_K": launch.block_k,
    }
    types = {"x_ptr": dtype, "weight_ptr": weight_dtype, "partial_ptr": sums}
    scales = {"x_scale_ptr": "fp32", "weight_scale_ptr": "fp32"}
    ptx = compile_for_h100(
        _scaled_linear_kernel, constants, launch.num_warps, launch.num_stages, **types, **scales
    )
    assert "cp.async" in ptx, "weights are loaded ahead"
    return ptx


@pytest.mark.parametrize("num_tokens", [1, 16, 64, 256])
@pytest.mark.parametrize("scale_rows", [128, 8])
def test_block_linear_uses_the_matrix_unit(num_tokens, scale_rows):
    launch = block_launch(num_tokens, 6144, 4096)
    constants = {
        "SCALE_ROWS": scale_rows,
        "X_KIND": "floats" if launch.quantizes else "values",
        "HAS_BIAS": True,
        "EVEN_K": True,
        "NUM_SPLITS": launch.num_splits,
        "BLOCK_M": launch.block_m,
        "BLOCK_N": launch.block_n,
    }
    types = {"weight_ptr": "fp8e4nv", "x_scale_ptr": "fp32", "scale_ptr": "fp32"}
    if not launch.quantizes:
        types["x_ptr"] = "fp8e4nv"
    ptx = compile_for_h100(_block_linear_kernel, constants, launch.num_warps, launch.num_stages, **types)
    assert re.search(r"wgmma\.mma_async\S*\.e4m3.e4m3", ptx)
    assert "cp.async" in ptx, "weights are loaded ahead"


@pytest.mark.parametrize("num_tokens", [1, 256])
def test_block_linear_of_bits_of_fp8(num_tokens):
    launch = block_launch(num_tokens, 6144, 4096)
    constants = {
        "SCALE_ROWS": 128,
        "X_KIND": "wide",
        "HAS_BIAS": False,
        "EVEN_K": False,
        "NUM_SPLITS": launch.num_splits,
        "BLOCK_M": launch.block_m,
        "BLOCK_N": launch.block_n,
    }
    types = {"weight_ptr": "u8", "x_scale_ptr": "fp32", "scale_ptr": "fp32"}
    ptx = compile_for_h100(_block_linear_kernel, constants, launch.num_warps, launch.num_stages, **types)
    assert re.search(r"wgmma\.mma_async\S*\.bf16.bf16", ptx)


FOUR_BITS = {"GROUP_SIZE": 128, "HAS_ZEROS": False, "IS_FLOAT": False, "USE_PTX": True}
FOUR_BIT_TYPES = {"values_ptr": "u8", "zeros_ptr": "u8", "scales_ptr": "fp16", "partial_ptr": "fp32"}


@pytest.mark.parametrize(
    ("num_tokens", "instruction"), [(1, "mma.sync"), (16, "mma.sync"), (64, "wgmma"), (256, "wgmma")]
)
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ({}, "bf16"),
        ({"HAS_ZEROS": True}, "fp16"),
        ({"GROUP_SIZE": 64, "HAS_ZEROS": True}, "bf16"),
        ({"GROUP_SIZE": 32, "IS_FLOAT": True}, "bf16"),
        ({"GROUP_SIZE": 32, "IS_FLOAT": True}, "fp16"),
    ],
)
def test_four_bit_linear_unpacks_in_registers(num_tokens, instruction, kind, dtype):
    launch = four_bit_launch(num_tokens, 6144, 4096, 2)
    constants = FOUR_BITS | {
        "HAS_BIAS": True,
        "SCALE_SUMS": launch.scale_sums,
        "EVEN_K": True,
        "NUM_SPLITS": launch.num_splits,
        "BLOCK_M": launch.block_m,
        "BLOCK_N": launch.block_n,
    }
    types = FOUR_BIT_TYPES | dict.fromkeys(("x_ptr", "bias_ptr", "out_ptr"), dtype)
    ptx = compile_for_h100(
        _four_bit_linear_kernel, constants | kind, launch.num_warps, launch.num_stages, **types
    )
    assert instruction in ptx
    assert "prmt" in ptx
    waits = re.findall(r"wgmma.wait_group.sync.aligned (\d+)", ptx)
    assert set(waits) <= {"0"}, "no product is left to read registers that the next tile overwrites"
    assert "cp.async" in ptx, "weights are loaded ahead"


@pytest.mark.parametrize(("block_m", "instruction"), [(16, "mma.sync"), (32, "wgmma"), (64, "wgmma")])
def test_four_bit_grouped_unpacks_in_registers(block_m, instruction):
    tile = four_bit_tile(block_m, 2)
    constants = FOUR_BITS | {
        "GROUP_SIZE": 32,
        "IS_FLOAT": True,
        "SORTED": True,
        "HAS_BIAS": True,
        "ACTIVATION": "swiglu_clamped",
        "WEIGHT_LEFT": tile.weight_left,
        "EVEN_K": True,
        "BLOCK_M": block_m,
        "BLOCK_N": tile.block_n,
    }
    scalars = {"alpha": "fp32", "limit": "fp32"}
    ptx = compile_for_h100(
        _four_bit_grouped_kernel, constants, tile.num_warps, tile.num_stages, **FOUR_BIT_TYPES, **scalars
    )
    assert instruction in ptx
    assert "cp.async" in ptx, "weights are loaded ahead"


def test_four_bit_weights_are_dequantized():
    for kind in ({}, {"GROUP_SIZE": 32, "HAS_ZEROS": True}, {"IS_FLOAT": True}):
        ptx = compile_for_h100(_dequantize_kernel, FOUR_BITS | kind, **FOUR_BIT_TYPES)
        assert "st.global" in ptx


@pytest.mark.parametrize(("block_m", "instruction"), [(16, "mma.sync"), (64, "wgmma"), (128, "wgmma")])
@pytest.mark.parametrize("activation", ["", "silu", "swiglu_clamped"])
@pytest.mark.parametrize("blocks", [False, True])
def test_grouped_linear_uses_the_matrix_unit(block_m, instruction, activation, blocks):
    tile = grouped_tile(block_m, 2, gated=bool(activation))
    constants = {
        "SORTED": True,
        "HAS_SCALE": False,
        "SCALE_ROWS": 128 if blocks else 0,
        "HAS_BIAS": True,
        "ACTIVATION": activation,
        "EVEN_K": True,
        "BLOCK_M": block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
    }
    ptx = compile_for_h100(
        _grouped_linear_kernel,
        constants,
        tile.num_warps,
        tile.num_stages,
        scale_ptr="fp32",
        weight_ptr="fp8e4nv" if blocks else "bf16",
    )
    assert instruction in ptx
    assert "cp.async" in ptx, "weights are loaded ahead"


MATVEC_SUM = {
    "TOP_K": 8,
    "HAS_SCALE": False,
    "HAS_BIAS": True,
    "HAS_SHARED": True,
    "HAS_GATE": True,
    "BLOCK_N": 8,
    "BLOCK_K": 1024,
    "STAGES": 3,
}
ROUTER = {"HAS_LOGIT_BIAS": True, "BLOCK_K": 2048}


def route_constants(num_groups: int) -> dict[str, Any]:
    return {
        "TOP_K": 8,
        "SIGMOID": num_groups > 1,
        "NORMALIZE": True,
        "HAS_BIAS": num_groups > 1,
        "NUM_GROUPS": num_groups,
        "TOP_GROUPS": num_groups // 2,
        "CHOICES": 8,
        "BLOCK": 256,
    }


@pytest.mark.parametrize("rest", [0, 48])
@pytest.mark.parametrize("norm", ["none", "rms", "layer"])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("kind", ["float", *QUANTIZED])
def test_rope_kv_write(rest, norm, interleaved, kind):
    half = 64 if rest == 0 else 16
    constants = {
        "HEAD_DIM": 2 * half + rest,
        "HALF": half,
        "HALF_BLOCK": half,
        "REST_BLOCK": 64 if rest else 0,
        "DIM_BLOCK": 128,
        "HEADS": 4,
        "NORM": norm != "none",
        "LAYER_NORM": norm == "layer",
        "INTERLEAVED": interleaved,
        "SCALE_Q": rest == 0,
        "KV_KIND": "float",
        "STORED": 2 * half + rest,
        "NUM_SCALES": 0,
    }
    types = {}
    if kind != "float":
        of_kind, types = quantized(kind)
        constants |= of_kind
    assert "st.global" in compile_for_h100(_rope_kv_write_kernel, constants, num_warps=2, **types)


MATVEC = {
    "LIMIT": 448,
    "HAS_SCALE": False,
    "HAS_BIAS": True,
    "EVEN_K": True,
    "BLOCK_N": 8,
    "BLOCK_K": 512,
    "BLOCK_ROW": 4096,
    "STAGES": 3,
}
SCALES = {"x_scale_ptr": "fp32", "weight_scale_ptr": "fp32"}
QUANTIZE = {"GROUP_SIZE": 4096, "HAS_SCALE": False, "LIMIT": 448, "GROUPS": 1, "BLOCK": 4096}
EIGHT_BITS = {"values_ptr": "fp8e4nv", "scales_ptr": "fp32", "scale_ptr": "fp32"}
RMS_NORM = {"ADD": True, "MULTIPLIER": 1.0, "NORM_X": False, "NORM": True, "BLOCK": 4096}


@pytest.mark.parametrize(
    ("kernel", "constants", "num_warps", "types"),
    [
        (_rms_norm_kernel, RMS_NORM, 8, {}),
        (_rms_norm_kernel, RMS_NORM | {"MULTIPLIER": 0.22, "NORM_X": True}, 8, {}),
        (_rms_norm_kernel, RMS_NORM | {"NORM_X": True}, 8, {"weight_ptr": "fp32", "x_weight_ptr": "fp32"}),
        (_rms_norm_kernel, RMS_NORM | {"NORM_X": True, "NORM": False}, 8, {"x_weight_ptr": "fp32"}),
        (_quantize_kernel, QUANTIZE, 8, EIGHT_BITS),
        (
            _quantize_kernel,
            QUANTIZE | {"HAS_SCALE": True, "LIMIT": 127},
            8,
            EIGHT_BITS | {"values_ptr": "i8"},
        ),
        (_quantize_kernel, QUANTIZE | {"GROUP_SIZE": 128, "GROUPS": 32, "BLOCK": 128}, 8, EIGHT_BITS),
        (_dequantize_rows_kernel, {"BLOCK": 4096}, 4, {"weight_ptr": "fp8e4nv", "scale_ptr": "fp32"}),
        (_matvec_kernel, MATVEC, 2, SCALES | {"weight_ptr": "fp8e4nv"}),
        (_matvec_kernel, MATVEC | {"LIMIT": 127, "EVEN_K": False}, 2, SCALES | {"weight_ptr": "i8"}),
        (_matvec_kernel, MATVEC | {"LIMIT": 0}, 2, SCALES | {"weight_ptr": "u8"}),
        (_layer_norm_kernel, {"ADD": True, "MULTIPLIER": 0.5, "BIAS": True, "BLOCK": 4096}, 8, {}),
        (_act_mul_kernel, {"ACTIVATION": "gelu", "BLOCK": 1024}, 4, {}),
        (_act_mul_kernel, {"ACTIVATION": "gelu_tanh", "BLOCK": 1024}, 4, {}),
        (_scaled_logits_kernel, {"SOFTCAP": True, "BLOCK": 2048}, 4, {"out_ptr": "fp32"}),
        (_uniform_kernel, {"BLOCK": 128}, 4, {"out_ptr": "fp32"}),
        (_apply_penalties_kernel, {"BLOCK": 2048}, 4, {}),
        (_sample_kernel, {"BLOCK": 4096}, 16, {}),
        (_apply_token_mask_kernel, {"BLOCK": 4096}, 4, {}),
        (_decode_inputs_kernel, {"NUM_GROUPS": 2, "PAGE_SIZE": 16, "BLOCK": 1024}, 1, {}),
        (_step_inputs_kernel, {"NUM_GROUPS": 2, "PAGE_SIZE": 16, "BLOCK": 1024}, 4, {}),
        (_route_kernel, route_constants(1), 1, {"bias_ptr": "fp32"}),
        (_route_kernel, route_constants(8), 1, {"bias_ptr": "fp32"}),
        (_router_kernel, ROUTER | route_constants(8), 1, {"bias_ptr": "fp32"}),
        (_matvec_sum_kernel, MATVEC_SUM, 4, {"scale_ptr": "fp32", "gate_ptr": "fp32"}),
        (_group_kernel, {"TILE_ROWS": 16, "EXPERTS": 128, "BLOCK": 8192}, 8, {}),
        (_expert_sum_kernel, {"TOP_K": 8, "HAS_SHARED": True, "HAS_GATE": True, "BLOCK": 1024}, 4, {}),
        (_top_logprobs_kernel, {"N": 20, "BLOCK": 4096}, 16, {}),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_kernel(kernel, constants, num_warps, types):
    assert "st.global" in compile_for_h100(kernel, constants, num_warps, **types)
