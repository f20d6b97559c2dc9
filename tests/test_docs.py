"""The documentation agrees with the code, and with itself."""

import inspect
import re
import shlex
from pathlib import Path

import pytest

import fa4
from fa4 import cli

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "perf").rglob("*.md")])


def page_name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def anchors(page: Path) -> set[str]:
    """The anchors that a page's headings get: lower case, punctuation dropped, spaces to dashes."""
    headings = re.findall(r"^#+ +(.*)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_support_table_is_the_generated_one() -> None:
    written = (ROOT / "docs" / "support.md").read_text(encoding="utf-8")
    assert written == cli.support_table(), (
        "docs/support.md is out of date: python -m fa4 info --support-table > docs/support.md"
    )


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), f"{page_name(page)} links to {target}"
        if anchor:
            assert anchor in anchors(linked), f"{page_name(page)} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_commands_in_the_documentation_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for command in re.findall(r"(?<![\w/])python -m fa4 ([^`\n>#<]+)", text):
        cli.make_parser().parse_args(shlex.split(command))
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))
    for target in re.findall(r"(?:^|`)make ([a-z]+)", text, re.M):
        assert target in targets, f"{page_name(page)} says make {target}"


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    for page in (ROOT / "docs").glob("*.md"):
        assert page.name == "index.md" or f"]({page.name})" in index


def test_every_public_name_is_documented() -> None:
    documented = set(
        re.findall(r"^## fa4\.(\w+)$", (ROOT / "docs" / "api.md").read_text("utf-8"), re.M)
    )
    assert documented == set(fa4.__all__)


@pytest.mark.parametrize("name", ["flash_attn_func", "flash_attn_varlen_func"])
def test_documented_signatures_are_those_of_the_code(name: str) -> None:
    # C92, C94: the public surface is written down; options are keyword-only.
    signature = inspect.signature(getattr(fa4, name))
    bare = signature.replace(
        parameters=[
            parameter.replace(annotation=inspect.Parameter.empty)
            for parameter in signature.parameters.values()
        ],
        return_annotation=inspect.Signature.empty,
    )
    assert f"{name}{bare}\n" in (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    after_tensors = list(signature.parameters.values())[3:]
    positional = [p.name for p in after_tensors if p.kind is not inspect.Parameter.KEYWORD_ONLY]
    lengths = ["cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"]
    assert positional == ([] if name == "flash_attn_func" else lengths)


def test_readme_promises_are_makefile_targets_that_set_up_by_themselves() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in ("demo", "test", "lint"):
        assert re.search(rf"^{target}: setup", makefile, re.M)
    assert re.search(r"^make test$", (ROOT / ".ci" / "run").read_text(encoding="utf-8"), re.M)
