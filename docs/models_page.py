"""Prints the generated parts of docs/models.md; `--write` puts them into the page (`make docs`)."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import wrap

from models.features import Supported, supported
from tests.models.families import FAMILIES

_LINE = 120  # characters
PAGE = Path(__file__).with_name("models.md")


def architectures(found: Supported) -> Iterator[str]:
    """Yield the lines of the table of architectures."""
    yield "| architecture | beyond Llama's layers | scores | GGUF | tested as |"
    yield "|---|---|---|---|---|"
    for entry in found.architectures:
        scores = "yes" if entry.has_scores else ""
        gguf = ", ".join(f"`{name}`" for name in entry.gguf_names)
        tested = ", ".join(name for name, family in FAMILIES.items() if family.architecture == entry.name)
        yield f"| `{entry.name}` | {entry.description} | {scores} | {gguf} | {tested} |"


def formats(found: Supported) -> Iterator[str]:
    """Yield the lines of the list of weight formats."""
    stored = ", ".join(("16 and 32 bits", *(f"`{name}`" for name in found.stored_formats)))
    yield "- safetensors, in one or several files:"
    yield from wrap(stored, _LINE, initial_indent="  ", subsequent_indent="  ")
    yield "- GGUF, in one or several parts, dequantized while loading:"
    yield f"  {', '.join(found.gguf_types)}"
    yield "- conversions while loading (`--quantization`):"
    yield f"  {', '.join(f'`{name}`' for name in found.conversions)}"


def page(stored: str) -> str:
    """Return the page with its generated parts as they should be."""
    found = supported()
    for name, lines in (("architectures", architectures(found)), ("formats", formats(found))):
        begin = f"<!-- generated: {name} -->\n"
        part = begin + "".join(f"{line}\n" for line in lines) + "<!-- end -->"
        stored = re.sub(f"{begin}.*?<!-- end -->", lambda _, part=part: part, stored, flags=re.DOTALL)
    return stored


if __name__ == "__main__":
    made = page(PAGE.read_text(encoding="utf-8"))
    if "--write" in sys.argv[1:]:
        PAGE.write_text(made, encoding="utf-8")
    else:
        sys.stdout.write(made)
