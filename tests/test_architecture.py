"""Checks docs/architecture.md against the code: its paths exist, and the registries are complete.

Also checks that every module with logic of its own has a test.
"""

import ast
import re
import tomllib
from collections import Counter
from pathlib import Path

import pytest

from engine.constraints.kinds import KINDS
from engine.device.readouts import RECIPES
from models import families, formats
from models.formats.compressed_tensors import SCHEMES
from models.gguf.architectures import registered_gguf_names
from server.parsing.formats import REASONING_FORMATS, TOOL_FORMATS
from server.routes.table import ENDPOINTS

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
CONTRACT = PAGE.split("## What a change touches")[1]
FLOORS = ("server", "engine", "models", "kernels")
TESTS = sorted((ROOT / "tests").rglob("test_*.py"))


def modules(folder: str, *but: str) -> set[str]:
    """Return the names of a folder's modules, without those in `but`."""
    return {path.stem for path in (ROOT / folder).glob("*.py")} - {"__init__", *but}


def names(modules: object) -> set[str]:
    """Return the last parts of module names, each with an optional `:name` after it."""
    assert isinstance(modules, (list, tuple, set, frozenset))
    return {str(module).partition(":")[0].rpartition(".")[2] for module in modules}


def defined(path: Path) -> set[str]:
    """Return the functions that a file defines at its top."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))}


def covered(test: Path) -> set[str]:
    """Return the paths in a sentence `Covers a/b.py, c/d.py and e/*.py.` of a test file's docstring."""
    docstring = ast.get_docstring(ast.parse(test.read_text(encoding="utf-8"))) or ""
    sentences = re.findall(r"^Covers (.+?\.py)\.$", docstring, re.MULTILINE | re.DOTALL)
    patterns = [pattern for sentence in sentences for pattern in re.findall(r"[\w/*]+\.py", sentence)]
    found = {
        pattern: {path.relative_to(ROOT).as_posix() for path in ROOT.glob(pattern)} for pattern in patterns
    }
    return set().union(*(paths or {pattern} for pattern, paths in found.items()))


def imported(test: Path) -> set[str]:
    """Return the paths of the modules that a test file may import: `from a import b` may be a/b.py."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(test.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return {f"{name.replace('.', '/')}.py" for name in found}


def has_logic(path: Path) -> bool:
    """Return True if a file defines a function or a method: without one, a module is only data."""
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return any(isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) for node in nodes)


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`([\w./]+[/.]\w*)`", CONTRACT))))
def test_paths_of_the_contract_exist(path: str) -> None:
    """Check the folder of a path with `x`, the name of a new file or folder."""
    known = Path(re.sub(r"\bx(_\w+|/x)?\.py$", "", path))
    assert (ROOT / known).exists(), f"docs/architecture.md names {path}"


def test_every_family_is_registered() -> None:
    found = modules("models/families", "llama_like", "moe_like")
    assert names({*families._BY_ARCHITECTURE.values()}) == found
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    architectures = {*families.registered_names(), *registered_gguf_names()}
    assert not {name for name in architectures if f"`{name}`" not in readme}, "README lists what loads"


def test_every_weight_format_is_registered() -> None:
    registered = {*formats.CONVERSIONS.values(), *formats.STORED.values(), *SCHEMES.values()}
    assert names(registered) == modules(
        "models/formats",
        "base",
        "fp8_blocks",
        "scaled_rows",
        "stored_int",
        "stored_parts",
        "stored_scaled_rows",
    )
    for registry in (formats.CONVERSIONS, formats.STORED):
        assert len(names([*registry.values()])) == len(registry), "a weight format is one file"


def test_every_tool_and_reasoning_format_is_registered() -> None:
    """Except for the response template: the tokenizer brings it, not a chat template."""
    registered = [*TOOL_FORMATS, *REASONING_FORMATS]
    assert names(registered) == modules("server/parsing/formats", "response_template")
    assert len(names(registered)) == len(registered), "a format is one file"


def test_every_kind_of_constraint_is_listed() -> None:
    folder = ROOT / "engine" / "constraints"
    kinds = {path.stem for path in folder.glob("*.py") if {"applies", "make"} <= defined(path)}
    assert kinds == names([kind.__name__ for kind in KINDS])  # type: ignore[attr-defined]


def test_every_route_is_listed_once() -> None:
    routes = Counter((endpoint.method, path) for endpoint in ENDPOINTS for path in endpoint.paths)
    assert not [route for route, count in routes.items() if count > 1]


def test_every_readout_is_computed_on_the_device() -> None:
    """A readout is a frozen value of engine/readouts.py with positions(); RECIPES computes it."""
    path = ROOT / "engine" / "readouts.py"
    classes = [
        node for node in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(node, ast.ClassDef)
    ]
    kinds = {
        node.name
        for node in classes
        if node.decorator_list and "positions" in {getattr(item, "name", "") for item in node.body}
    }
    assert kinds == {kind.__name__ for kind in RECIPES}


def test_every_package_is_installed() -> None:
    """An application with its packages by name: a new folder needs its line in pyproject.toml."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    packages = {
        ".".join(path.parent.relative_to(ROOT).parts)
        for floor in (*FLOORS, "configs")
        for path in (ROOT / floor).rglob("__init__.py")
    }
    assert set(settings["tool"]["setuptools"]["packages"]) == packages


def test_every_module_with_logic_has_a_test() -> None:
    tested = set().union(*map(covered, TESTS), *map(imported, TESTS))
    own = {(path.relative_to(ROOT / "tests").parts[0], path.name) for path in TESTS}
    untested = [
        module
        for floor in FLOORS
        for path in sorted((ROOT / floor).rglob("*.py"))
        if path.name not in ("__init__.py", "__main__.py", "version.py") and has_logic(path)
        if (module := path.relative_to(ROOT).as_posix()) not in tested
        if (floor, f"test_{path.name}") not in own
    ]
    assert not untested, (
        f"without a test: {', '.join(untested)}. Write tests/<floor>/.../test_<module>.py, or name the "
        "module in the docstring of the test file that exercises it: `Covers engine/schedule/allocator.py.`"
    )


@pytest.mark.parametrize("test", [test for test in TESTS if covered(test)], ids=lambda test: test.stem)
def test_modules_named_as_covered_exist(test: Path) -> None:
    gone = [path for path in sorted(covered(test)) if not (ROOT / path).is_file()]
    assert not gone, f"{test.relative_to(ROOT)} covers {', '.join(gone)}, which does not exist"
