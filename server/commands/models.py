"""`monoloop models`: lists the architectures and weight formats that can be loaded."""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from rich.console import Console
from rich.table import Table

import engine
from server.flags import parse_arguments

FILE_WIDTH = 120


def main(arguments: list[str]) -> int:
    """Print the architectures; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="monoloop models",
        description="List the architectures and weight formats that can be loaded, with what the default "
        "configuration of each architecture has beyond Llama's layers.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    given = parse_arguments(parser, arguments)
    supported = engine.supported_models()
    if given.json:
        sys.stdout.write(json.dumps(asdict(supported), indent=2) + "\n")
        return 0
    table = Table(box=None, pad_edge=False)
    table.add_column("architecture", no_wrap=True)
    table.add_column("GGUF", no_wrap=True)
    table.add_column("scores")
    table.add_column("beyond Llama's layers")
    for entry in supported.architectures:
        scores = "yes" if entry.has_scores else ""
        table.add_row(entry.name, ", ".join(entry.gguf_names), scores, in_words(entry.features or {}))
    console = Console(width=None if sys.stdout.isatty() else FILE_WIDTH, highlight=False)
    console.print(table)
    console.print()
    console.print("weights in safetensors:", ", ".join(("16 and 32 bits", *supported.stored_formats)))
    console.print("weights in GGUF files:", ", ".join(supported.gguf_types))
    console.print("conversions (--quantization):", ", ".join(supported.conversions))
    return 0


def in_words(features: Mapping[str, Sequence[str]]) -> str:
    """Return the features of each part of an architecture in a line of text."""
    return "; ".join(f"{part}: {', '.join(texts)}" for part, texts in features.items())
