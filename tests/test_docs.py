"""Checks the pages for people: links, anchors and files exist, lines are short, tree.md is up to date."""

import re
import runpy
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])
MAX_LINE = 120


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives a page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in re.findall(r"\]\((?!http)([^)#]*)#?([^)]*)\)", page.read_text(encoding="utf-8")):
        path = page.parent / target if target else page
        assert path.exists(), f"{page.name} links to {target}, which does not exist"
        if anchor:
            assert anchor in anchors(path), f"{page.name} links to #{anchor}, a heading that does not exist"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_are_named_exist(page: Path) -> None:
    """Check paths in backticks and scripts of benchmarks/; paths with an `x` are for test_architecture.py."""
    folders = "server|engine|models|kernels|configs|benchmarks|tests|docs"
    paths = re.findall(rf"`((?:{folders})/[\w./-]*)`", page.read_text(encoding="utf-8"))
    paths += [f"benchmarks/{name}.py" for name in re.findall(r"benchmarks\.(\w+)", page.read_text("utf-8"))]
    gone = [path for path in paths if "/x" not in path and not (ROOT / path).exists()]
    assert not gone, f"{page.name} names {gone}"


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.name != "tree.md"], ids=lambda page: page.name
)
def test_lines_are_short(page: Path) -> None:
    """Rows of tables cannot be wrapped."""
    lines = page.read_text(encoding="utf-8").splitlines()
    long = [line for line in lines if len(line) > MAX_LINE and not line.lstrip().startswith("|")]
    assert not long, f"{page.name}: wrap at {MAX_LINE} characters: {long}"


@pytest.mark.skipif(
    f"transformers=={version('transformers')}" not in (ROOT / "constraints.txt").read_text("utf-8").split(),
    reason="the page has default configurations of the pinned transformers",
)
def test_the_list_of_models_is_up_to_date() -> None:
    page = runpy.run_path(str(ROOT / "docs" / "models_page.py"))["page"]
    stored = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    assert stored == page(stored), "an architecture, its spec or its tiny models have changed: run make docs"


def test_the_list_of_files_is_up_to_date() -> None:
    tree = runpy.run_path(str(ROOT / "docs" / "tree.py"))["tree"]
    stored = (ROOT / "docs" / "tree.md").read_text(encoding="utf-8")
    assert stored == tree(), "a file or its first docstring line has changed: run make docs"


def test_the_example_of_a_family_is_the_family() -> None:
    page = (ROOT / "docs" / "add-a-model.md").read_text(encoding="utf-8")
    assert (ROOT / "models" / "families" / "olmo2.py").read_text(encoding="utf-8") in page
