"""Prints docs/tree.md: every module with the first line of its docstring. `make docs` writes the file."""

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDERS = ("server", "engine", "models", "kernels", "benchmarks")
HEAD = """# Files

Every module with the first line of its docstring. `make docs` generates this page from the docstrings.
"""


def first_line(path: Path) -> str:
    """Return the first line of a module's docstring, "" if it has none."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return docstring.partition("\n")[0]


def section(folder: Path) -> str:
    """Return one folder's heading, the docstring of its package, and the list of its modules."""
    package = folder / "__init__.py"
    summary = first_line(package) if package.exists() else ""
    modules = sorted(path for path in folder.glob("*.py") if path != package)
    blocks = [
        f"## {folder.relative_to(ROOT).as_posix()}/",
        summary,
        "\n".join(f"- `{path.name}`: {first_line(path)}" for path in modules),
    ]
    return "".join(f"\n{block}\n" for block in blocks if block)


def tree() -> str:
    """Return the whole page."""
    packages = {path.parent for name in FOLDERS for path in (ROOT / name).rglob("*.py")}
    return HEAD + "".join(section(folder) for folder in sorted(packages))


if __name__ == "__main__":
    sys.stdout.write(tree())
