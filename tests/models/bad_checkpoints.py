"""Checkpoint folders that cannot be served: how each is made of a good one, and what the error says."""

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Break = Callable[[Path], None]

WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
UP = "model.layers.0.mlp.up_proj.weight"


def config(**changes: Any) -> Break:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return change


def config_text(text: str) -> Break:
    return lambda folder: (folder / "config.json").write_text(text) and None


def config_without(key: str) -> Break:
    def change(folder: Path) -> None:
        values = json.loads((folder / "config.json").read_text())
        del values[key]
        (folder / "config.json").write_text(json.dumps(values))

    return change


def weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Break:
    def rewrite(folder: Path) -> None:
        tensors = load_file(folder / WHOLE)
        change(tensors)
        save_file(tensors, folder / WHOLE)

    return rewrite


def header(change: Callable[[dict[str, Any]], object]) -> Break:
    def rewrite(folder: Path) -> None:
        content = (folder / WHOLE).read_bytes()
        (length,) = struct.unpack_from("<Q", content)
        entries = json.loads(content[8 : 8 + length])
        change(entries)
        text = json.dumps(entries).encode()
        (folder / WHOLE).write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])

    return rewrite


def content(change: Callable[[bytes], bytes]) -> Break:
    return lambda folder: (folder / WHOLE).write_bytes(change((folder / WHOLE).read_bytes())) and None


def saved(**options: Any) -> Break:
    return lambda folder: torch.save({"weight": torch.ones(2)}, folder / WHOLE, **options)


def renamed(name: str) -> Break:
    return lambda folder: (folder / WHOLE).rename(folder / name) and None


def index(change: Callable[[dict[str, str]], object]) -> Break:
    """An index of two shards, changed."""

    def write(folder: Path) -> None:
        tensors = load_file(folder / WHOLE)
        (folder / WHOLE).unlink()
        names = {name: f"shard{number % 2}.safetensors" for number, name in enumerate(sorted(tensors))}
        for file in set(names.values()):
            save_file({name: tensors[name] for name in tensors if names[name] == file}, folder / file)
        change(names)
        (folder / INDEX).write_text(json.dumps({"weight_map": names}))

    return write


def linked_out(folder: Path) -> None:
    index(lambda names: None)(folder)
    outside = folder.parent / f"{folder.name}-outside.safetensors"
    (folder / "shard1.safetensors").rename(outside)
    (folder / "shard1.safetensors").symlink_to(outside)


def duplicated(folder: Path) -> None:
    index(lambda names: None)(folder)
    tensors = load_file(folder / "shard0.safetensors") | load_file(folder / "shard1.safetensors")
    save_file(tensors, folder / "shard1.safetensors")


def only(*names: str) -> Break:
    """Empty files of these names, and nothing else."""

    def replace(folder: Path) -> None:
        for path in folder.iterdir():
            path.unlink()
        for name in names:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text("{}")

    return replace


def overlapping(entries: dict[str, Any]) -> None:
    entries["model.layers.1.mlp.up_proj.weight"]["data_offsets"] = entries[UP]["data_offsets"]


def mlx(tensors: dict[str, torch.Tensor]) -> None:
    tensors[UP] = torch.zeros(96, 8, dtype=torch.uint32)


BAD: dict[str, tuple[Break, str]] = {
    "unknown architecture": (
        config(architectures=["LlamaForCausalLN"]),
        r"architecture LlamaForCausalLN is not supported; nearest: LlamaForCausalLM.*; `monoloop models`",
    ),
    "no architecture": (
        config(architectures=None, model_type="wish"),
        r"architecture \(none named\) is not supported",
    ),
    "an architecture of two": (
        config(architectures=[], model_type="gemma3"),
        "model_type 'gemma3' is that of Gemma3ForCausalLM and Gemma3ForConditionalGeneration: name one",
    ),
    "own code": (
        config(architectures=["OwnForCausalLM"], auto_map={"AutoModelForCausalLM": "own.OwnForCausalLM"}),
        r"OwnForCausalLM is not supported; .*code that comes with a model \(auto_map\) is not run",
    ),
    "rotary type": (
        config(rope_parameters={"rope_type": "spiral", "rope_theta": 1e4}),
        "RoPE scaling of type 'spiral' is not supported; supported: default, linear, .*llama3",
    ),
    "two rotary types": (
        config(rope_parameters={"rope_type": "default"}, rope_scaling={"type": "linear", "factor": 2.0}),
        "rope_scaling and rope_parameters contradict each other: type is 'linear' and 'default'; remove one",
    ),
    "unknown rotary type beside a known one": (
        config(rope_parameters={"rope_type": "default"}, rope_scaling={"rope_type": "spiral"}),
        "contradict each other: rope_type is 'spiral' and 'default'",
    ),
    "text beside rotary parameters": (
        config(rope_parameters={"rope_type": "default"}, rope_scaling="linear"),
        "rope_scaling is 'linear', which is not a JSON object",
    ),
    "activation": (config(hidden_act="wish"), "activation 'wish' is not supported; supported: silu, gelu, "),
    "activation without a gate": (
        config(hidden_act="relu"),
        "activation 'relu' is not supported in a gated MLP; supported: silu, .*gelu_pytorch_tanh$",
    ),
    "config is no JSON": (config_text("{"), r"config\.json cannot be read: Expecting"),
    "config is a list": (config_text("[]"), r"config\.json is not a JSON object"),
    "config is deep": (config_text("[" * 100_000), r"config\.json cannot be read"),
    "config is of bytes": (
        lambda folder: (folder / "config.json").write_bytes(b"\xff{}") and None,
        r"config\.json cannot be read",
    ),
    "no config": (
        lambda folder: (folder / "config.json").unlink(),
        r"has no config\.json$",
    ),
    "missing key": (config_without("hidden_size"), "the configuration lacks 'hidden_size'"),
    "text for a number": (
        config(hidden_size="64"),
        "hidden_size is '64', which is not a whole number",
    ),
    "negative": (config(num_hidden_layers=-2), "num_hidden_layers is -2, which is not between 1 and 1024"),
    "no layers": (config(num_hidden_layers=0), "num_hidden_layers is 0, which is not between 1 and 1024"),
    "no layers of the text model": (
        config(text_config={"num_hidden_layers": 0}),
        "num_hidden_layers is 0, which is not between 1 and 1024",
    ),
    "dense layers": (config(first_k_dense_replace=-1), "first_k_dense_replace is -1, which is not between 0"),
    "sparse layers": (config(decoder_sparse_step=0), "decoder_sparse_step is 0, which is not between 1"),
    "half an expert": (config(num_experts=2.5), r"num_experts is 2\.5, which is not a whole number"),
    "zero": (config(vocab_size=0), "vocab_size is 0, which is not between 1 and"),
    "no heads": (config(num_attention_heads=0), "num_attention_heads is 0, which is not between 1 and 65536"),
    "huge": (config(num_hidden_layers=10**12), "num_hidden_layers is 1000000000000, which is not between"),
    "NaN": (config(hidden_size=float("nan")), "hidden_size is nan, which is not a whole number"),
    "infinite": (config(vocab_size=float("inf")), "vocab_size is inf, which is not a whole number"),
    "NaN of a norm": (config(rms_norm_eps=float("nan")), "rms_norm_eps is nan, which is not a number"),
    "beyond float64": (config(rms_norm_eps=10**400), "rms_norm_eps is 10{90,}.*, which is not a number"),
    "text for an eps": (config(rms_norm_eps="1e-6"), "rms_norm_eps is '1e-6', which is not a number"),
    "text for a flag": (
        config(tie_word_embeddings="false"),
        "tie_word_embeddings is 'false', which is neither true nor false",
    ),
    "text for a token": (config(eos_token_id="x"), "eos_token_id is 'x', which is not a whole number"),
    "half a token": (config(eos_token_id=[2, 2.5]), r"eos_token_id is 2\.5, which is not a whole number"),
    "null": (config(vocab_size=None), "the configuration lacks 'vocab_size'"),
    "no size of a head": (config(head_dim=0), "head_dim is 0, which is not between 1 and"),
    "no key/value heads": (config(num_key_value_heads=0), "num_key_value_heads is 0, which is not between 1"),
    "a list of activations": (config(hidden_act=["silu"]), r"activation \['silu'\] is not supported"),
    "one type for all layers": (
        config(layer_types="full_attention"),
        "layer_types is 'full_attention', which is not a list of names",
    ),
    "types as numbers": (
        config(layer_types=[1, 2]),
        r"layer_types is \[1, 2\], which is not a list of names",
    ),
    "nested types": (config(layer_types=[["full_attention"]]), "which is not a list of names"),
    "text model as text": (config(text_config="llama"), "text_config is 'llama', which is not a JSON object"),
    "theta of 0": (
        config(rope_parameters=None, rope_theta=0),
        "rope_theta is 0, which is not a number above",
    ),
    "theta below 0": (
        config(rope_parameters={"rope_type": "default", "rope_theta": -1.0}),
        r"rope_theta is -1\.0, which is not a number of at least 0",
    ),
    "long context": (config(max_position_embeddings=10**9), "max_position_embeddings is 1000000000, which"),
    "missing tensors": (
        weights(lambda tensors: [tensors.pop(name) for name in [*tensors] if "proj" in name]),
        r"the checkpoint lacks model\.layers\.0\.self_attn\.q_proj\.weight, .* and 9 more tensors$",
    ),
    "surplus tensors": (
        weights(lambda tensors: tensors.update({f"extra.{number}": torch.ones(1) for number in range(7)})),
        r"the configuration has no place for extra\.0, extra\.1, .*extra\.4 and 2 more tensors$",
    ),
    "shape": (
        config(intermediate_size=97),
        r"down_proj\.weight has the shape \[64, 96\]; the configuration says \[64, 97\] \(5 more differ",
    ),
    "untied, without an output": (
        lambda folder: (
            config(tie_word_embeddings=False)(folder),
            weights(lambda tensors: tensors.pop("lm_head.weight"))(folder),
            None,
        )[-1],
        r"lacks lm_head\.weight; tie_word_embeddings is false",
    ),
    "integers": (
        weights(lambda tensors: tensors.update({UP: tensors[UP].long()})),
        rf"{UP} holds int64, and weights are floats",
    ),
    "booleans": (
        weights(lambda tensors: tensors.update({UP: tensors[UP].bool()})),
        rf"{UP} holds bool, and weights are floats",
    ),
    "quantized": (
        weights(lambda tensors: tensors.update({UP: tensors[UP].to(torch.float8_e4m3fn)})),
        rf"{UP} is quantized \(float8_e4m3fn\), and config\.json has no quantization_config",
    ),
    "quantized, without a configuration": (
        weights(lambda tensors: tensors.update({UP.replace("weight", "qweight"): tensors.pop(UP).int()})),
        rf"lacks {UP}; .* no place for .*qweight; the weights look quantized, and config\.json has no ",
    ),
    "quantization_config, a list": (config(quantization_config=[]), "the quantization_config is not a JSON"),
    "quantization_config, a text": (config(quantization_config=""), "the quantization_config is not a JSON"),
    "names that are none": (
        config(quantization_config={"quant_method": "awq", "bits": 4, "modules_to_not_convert": [1]}),
        r"'modules_to_not_convert' is \[1\], and not a list of names",
    ),
    "format of MLX": (
        config(quantization={"group_size": 64, "bits": 4}),
        r"quantization 'mlx' \(MLX, .*\) is not supported; use an AWQ or GPTQ version",
    ),
    "MLX without a note": (weights(mlx), "holds uint32, and weights are floats"),
    "truncated": (
        content(lambda whole: whole[:-1000]),
        r"model\.safetensors cannot be read: it is truncated",
    ),
    "cut in the header": (content(lambda whole: whole[:100]), "it is truncated: it has 100 bytes"),
    "empty file": (content(lambda whole: b""), "it is truncated: it has 0 bytes"),
    "longer": (content(lambda whole: whole + b"more"), "it has 4 bytes after its last tensor"),
    "header is no JSON": (content(lambda whole: whole[:8] + b"!" + whole[9:]), "its header is not JSON"),
    "huge header": (
        content(lambda whole: struct.pack("<Q", 10**12) + whole[8:]),
        "it says that its header has 1000000000000 bytes",
    ),
    "overlap": (header(overlapping), "overlaps with"),
    "unknown dtype": (header(lambda entries: entries[UP].update(dtype="F7")), f"{UP} has the dtype 'F7'"),
    "pointer of Git LFS": (
        content(lambda whole: b"version https://git-lfs.github.com/spec/v1\n"),
        "fetch them with `git lfs pull`",
    ),
    "index: ..": (index(lambda names: names.update({UP: "../x.safetensors"})), "points outside its folder"),
    "index: absolute": (index(lambda names: names.update({UP: "/etc/passwd"})), "points outside its folder"),
    "index: link": (linked_out, r"points outside its folder: 'shard1\.safetensors'"),
    "index: missing file": (
        index(lambda names: names.update({UP: "gone.safetensors"})),
        r"lacks gone\.safetensors, which its index names",
    ),
    "index: other file": (
        index(lambda names: names.update({UP: "shard0.safetensors", "lm_head.weight": "shard1.safetensors"})),
        r"index\.json says that .* is in shard[01]\.safetensors; it is in shard[01]\.safetensors",
    ),
    "index: no such tensor": (
        index(lambda names: names.update({"model.extra": "shard0.safetensors"})),
        r"says that model\.extra is in shard0\.safetensors; no file has it",
    ),
    "index: no JSON": (
        lambda folder: (folder / INDEX).write_text("{") and None,
        r"index\.json cannot be read",
    ),
    "in two shards": (duplicated, r"is in two files, shard0\.safetensors and shard1\.safetensors"),
    "pickle": (renamed("pytorch_model.bin"), r"pytorch_model\.bin is a pickle, .* safetensors"),
    "pickle of another name": (saved(), r"model\.safetensors cannot be read: it is a pickle, and reading"),
    "old pickle of another name": (
        saved(_use_new_zipfile_serialization=False),
        r"model\.safetensors cannot be read: it is a pickle, and reading",
    ),
    "index: pickle": (
        lambda folder: (
            torch.save({}, folder / "pytorch_model.bin"),
            index(lambda names: names.update({UP: "pytorch_model.bin"}))(folder),
            None,
        )[-1],
        r"pytorch_model\.bin cannot be read: it is a pickle",
    ),
    "pickle of Meta": (renamed("consolidated.00.pth"), r"consolidated\.00\.pth is a pickle"),
    "pickle .pt": (renamed("model.pt"), r"model\.pt is a pickle"),
    "pickle .pth": (renamed("model.pth"), r"model\.pth is a pickle"),
    "pickle .ckpt": (renamed("model.ckpt"), r"model\.ckpt is a pickle"),
    "adapter": (
        only("adapter_config.json", "adapter_model.safetensors", "tokenizer.json"),
        r"has no config\.json; it is an adapter",
    ),
    "adapter with a config": (
        lambda folder: (
            renamed("adapter_model.safetensors")(folder),
            (folder / "adapter_config.json").write_text("{}"),
            None,
        )[-1],
        r"holds no \.safetensors file; it is an adapter",
    ),
    "format of Mistral": (
        only("params.json", "consolidated.safetensors", "tekken.json"),
        r"has no config\.json; consolidated\.safetensors is in Mistral's own format",
    ),
    "format of Mistral with a config": (
        renamed("consolidated.safetensors"),
        r"holds no \.safetensors file; consolidated\.safetensors is in Mistral's own format",
    ),
    "GGUF with a config": (
        renamed("some.gguf"),
        r"holds no \.safetensors file; to serve the GGUF file in it, name the file: some\.gguf",
    ),
    "two GGUF models": (
        only("a.gguf", "b.gguf"),
        r"has no config\.json and 2 GGUF models; name one: a\.gguf",
    ),
    "folder of checkpoints": (
        only("b/config.json", "a/config.json"),
        r"has no config\.json; it is a folder of models: name one of a, b$",
    ),
    "control characters": (
        config(architectures=["X\x1b[31m\nmonoloop: \u202e" * 99]),
        r"architecture X\\x1b\[31m\\nmonoloop: \\u202eX.* is not supported",
    ),
    "long names": (
        config(layer_types=["x" * 10**6]),
        r"layers of type x{500,1000}…x{500,1000} are not supported$",
    ),
    "no GGUF": (only("a.gguf"), r"a\.gguf is not a complete GGUF file"),
    "ONNX": (only("model.onnx"), "it is in the format of ONNX: take the model as safetensors"),
    "ONNX in a folder": (only("onnx/model.onnx"), "it is in the format of ONNX"),
    "weights of MLX": (renamed("weights.npz"), "it is in the format of MLX"),
    "empty folder": (only(), r"has no config\.json; it is empty"),
    "no weights": (lambda folder: (folder / WHOLE).unlink(), r"holds no \.safetensors file$"),
    "no tokenizer": (
        lambda folder: (folder / "tokenizer.json").unlink(),
        r"has no tokenizer \(tokenizer\.json",
    ),
}


def link_as_the_hub_does(folder: Path, cache: Path) -> Path:
    """Return a snapshot in a cache of the hub: links to files in its folder `blobs`."""
    snapshot, blobs = (
        cache / "models--some--model" / "snapshots" / "1a2b",
        cache / "models--some--model" / "blobs",
    )
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(folder.iterdir()):
        (blobs / str(number)).write_bytes(path.read_bytes())
        (snapshot / path.name).symlink_to(os.path.join("..", "..", "blobs", str(number)))
    return snapshot
