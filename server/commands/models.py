"""`monoloop models`: lists the architectures, or checks if a model runs on this machine."""

import argparse
import json
import sys
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

import engine
from engine.config import EngineConfig
from engine.errors import ModelError
from server.flags import add_flags, flag, given_flags, parse_arguments
from server.parsing.detect import Formats
from server.settings import POSITIONAL_MODEL, add_config_flag, config_file, load
from server.terminal import fail

FILE_WIDTH = 120
DOES_NOT_RUN = 1


def main(arguments: list[str]) -> int:
    """Print the architectures, or what a model needs; return 1 if it does not run. Raises SettingsError."""
    parser = argparse.ArgumentParser(
        prog="monoloop models",
        description="Without a model, list the architectures and weight formats that can be loaded, with "
        "what the default configuration of each architecture has beyond Llama's layers. With a model, print "
        "what it takes on this machine, or why it does not run; the exit code is 0 if it runs, else 1. "
        "Nothing is loaded or fetched.",
        allow_abbrev=False,
    )
    parser.add_argument(POSITIONAL_MODEL, nargs="?", help="the model to check, as in serve")
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_config_flag(parser)
    add_flags(parser, EngineConfig, "engine, as in serve")
    given = parse_arguments(parser, arguments)
    flags = given_flags(given, EngineConfig)
    if (name := getattr(given, POSITIONAL_MODEL)) is not None:
        flags["model"] = name
    if "model" not in flags:
        return _list(as_json=given.json)
    settings = load(flags, config_file(given.config), {key: flag(key) for key in flags})
    return _check(settings.engine, as_json=given.json)


def _list(*, as_json: bool) -> int:
    supported = engine.supported_models()
    if as_json:
        return _print_json(asdict(supported))
    table = Table(box=None, pad_edge=False)
    table.add_column("architecture", no_wrap=True)
    table.add_column("GGUF", no_wrap=True)
    table.add_column("scores")
    table.add_column("beyond Llama's layers")
    for entry in supported.architectures:
        scores = "yes" if entry.has_scores else ""
        table.add_row(entry.name, ", ".join(entry.gguf_names), scores, entry.description)
    console = Console(width=None if sys.stdout.isatty() else FILE_WIDTH, highlight=False)
    console.print(table)
    console.print()
    console.print("weights in safetensors:", ", ".join(("16 and 32 bits", *supported.stored_formats)))
    console.print("weights in GGUF files:", ", ".join(supported.gguf_types))
    console.print("conversions (--quantization):", ", ".join(supported.conversions))
    return 0


def _check(config: EngineConfig, *, as_json: bool) -> int:
    try:
        found = engine.check_model(config)
    except (ModelError, ValueError) as error:
        if as_json:
            _print_json({"model": config.model, "runs": False, "reason": str(error)})
            return DOES_NOT_RUN
        reason, name = str(error), str(config.model)
        is_named = reason.startswith(name) or f"'{name}'" in reason
        return fail(reason if is_named else f"{name} does not run: {reason}", DOES_NOT_RUN)
    formats = Formats.of(found.tokenizer, "auto", "auto")
    if as_json:
        values = {name: value for name, value in vars(found).items() if name != "tokenizer"}
        return _print_json(
            {
                "model": config.model,
                "runs": True,
                **values,
                "chat_template": found.tokenizer.chat_template is not None,
                "tool_format": formats.tools,
                "reasoning_format": formats.reasoning,
            }
        )
    lines = {
        "runs on": found.device,
        "architecture": found.architecture,
        "features": found.description or "those of Llama",
        "parameters": f"{found.num_parameters:,}",
        "weights": f"{found.weight_bytes / 1e9:.2f} GB, {found.dtype}",
        "KV pool": f"{found.kv_tokens:,} tokens of {found.kv_token_bytes:,} bytes",
        "context window": f"{found.context_window:,} tokens; served: {found.max_model_len:,}",
        "chat template": "yes" if found.tokenizer.chat_template is not None else "no",
        "tool calls": formats.tools or "-",
        "reasoning": formats.reasoning or "-",
    }
    if found.kv_dtype != "auto":
        lines["KV pool"] += f" in {found.kv_dtype}"
    if found.quantization is not None:
        lines["weights"] += f", quantized: {found.quantization}"
    sys.stdout.write(f"{found.name} ({found.path})\n")
    for name, text in lines.items():
        sys.stdout.write(f"  {name:<16}{text}\n")
    return 0


def _print_json(value: Any) -> int:
    sys.stdout.write(json.dumps(value, indent=2) + "\n")
    return 0
