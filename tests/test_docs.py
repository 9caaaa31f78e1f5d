"""What the documents say about files, functions, notes and code is true."""

from __future__ import annotations

import contextlib
import io
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from support.launcher import run_ranks

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md"]
TOLD = ROOT / "docs" / "how-fsdp-works.md"
FIGURES = ROOT / "docs" / "figures"

# A link's text may contain one pair of brackets: [Note [lanes]](../csrc/core/lanes.h).
LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\[\]]*\])+)\]\(([^()\s]+)\)")
PICTURE = re.compile(r"!\[[^\]]*\]\(([^()\s]+)\)")
NOTE = re.compile(r"Note \[[^\]]+\]")
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
IDENTIFIER = re.compile(r"`([A-Za-z_]\w*(?:(?:::|\.)\w+)*)(?:\(\))?`")
RUNNABLE = "python run"


@dataclass(frozen=True)
class Link:
    document: Path
    text: str
    target: str

    @property
    def is_relative(self) -> bool:
        return not re.match(r"[a-z]+:", self.target)

    @property
    def file(self) -> Path:
        path = self.target.partition("#")[0]
        return (self.document.parent / path).resolve() if path else self.document


def prose_of(document: Path) -> str:
    """Return a document without its code blocks, on one line."""
    return " ".join(FENCE.sub("", document.read_text(encoding="utf-8")).split())


def relative_links() -> Iterator[Link]:
    for document in DOCUMENTS:
        for text, target in LINK.findall(prose_of(document)):
            link = Link(document, text, target)
            if link.is_relative:
                yield link


def defines(source: str, name: str, is_python: bool) -> bool:
    """Return whether `source` defines `name`: a function, a class, or a class's method.

    Args:
        source: of a C++ or a Python file.
        name: "f", "A", "A.f" in Python or "A::f" in C++.
    """
    owner, _, last = name.replace("::", ".").rpartition(".")
    if is_python:
        # The part before a dot may be an instance, as in prof.report().
        is_class = re.search(rf"^class {owner}\b", source, re.MULTILINE) if owner else None
        if owner and owner[0].isupper() and not is_class:
            return False
        return re.search(rf"^\s*(def|class) {last}\b", source, re.MULTILINE) is not None
    if owner:
        return re.search(rf"\b{owner}::{last}\(", source) is not None
    if re.search(rf"\b(class|struct) {last}\b[^;]*\{{", source):
        return True
    return re.search(rf"^[\w:<>&*, ]+\b(\w+::)?{last}\([^;]*\{{", source, re.MULTILINE) is not None


def headings_of(document: Path) -> set[str]:
    """Return the anchors that GitHub makes of a document's headings."""
    text = FENCE.sub("", document.read_text(encoding="utf-8"))
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_relative_links_lead_to_files_and_headings_that_exist() -> None:
    links = list(relative_links())
    assert len(links) > 50
    missing = [link for link in links if not link.file.exists()]
    assert not missing
    anchored = [link for link in links if "#" in link.target and link.file.suffix == ".md"]
    lost = [link for link in anchored if link.target.split("#")[1] not in headings_of(link.file)]
    assert not lost


def test_links_name_functions_and_notes_that_their_files_have() -> None:
    checked, wrong = 0, []
    for link in relative_links():
        if not link.file.is_file() or link.file.suffix == ".md":
            continue
        source = link.file.read_text(encoding="utf-8")
        for name in IDENTIFIER.findall(link.text):
            checked += 1
            if not defines(source, name, is_python=link.file.suffix == ".py"):
                wrong.append(link)
        for note in NOTE.findall(link.text):
            checked += 1
            if not re.search(rf"(//|#) {re.escape(note)}", source):
                wrong.append(link)
    assert checked > 40
    assert not wrong


@pytest.mark.parametrize(
    ("source", "name", "is_python", "expected"),
    [
        ("class A:\n    def f(self): ...", "A.f", True, True),
        ("class A:\n    def f(self): ...", "B.f", True, False),
        ("class A:\n    def f(self): ...", "g", True, False),
        ("void A::f(int x) {\n}", "A::f", False, True),
        ("void A::f(int x) {\n}", "f", False, True),
        ("void A::f(int x) {\n  g(1);\n}", "g", False, False),
        ("struct A;", "A", False, False),
    ],
)
def test_a_name_counts_only_where_it_is_defined(
    source: str, name: str, is_python: bool, expected: bool
) -> None:
    assert defines(source, name, is_python) is expected


def test_notes_that_documents_cite_exist() -> None:
    sources = [*(ROOT / "csrc").rglob("*.*"), *(ROOT / "fsdp_ext").rglob("*.py")]
    text = "\n".join(path.read_text(encoding="utf-8") for path in sources)
    written = set(re.findall(r"(?://|#|^ +) ?(Note \[[^\]]+\])", text, re.MULTILINE))
    cited = {note for document in DOCUMENTS for note in NOTE.findall(prose_of(document))}
    assert cited - written - {"Note [name]"} == set()  # README's, for any of them


def test_each_figure_is_shown_and_says_what_its_wire_was() -> None:
    shown = {
        (document.parent / target).resolve()
        for document in DOCUMENTS
        for target in PICTURE.findall(document.read_text(encoding="utf-8"))
    }
    assert shown == set(FIGURES.iterdir())
    for figure in shown:
        text = figure.read_text(encoding="utf-8")
        if figure.name.startswith("bench-"):
            has_a_link = figure.stem in ("bench-overlap", "bench-scaling")
            assert ("simulated" in text) == has_a_link
        else:
            assert "simulated wire" in text or "over shared memory" in text


def blocks_of(document: Path) -> list[tuple[str, str]]:
    """Return the runnable blocks, each with the output that follows it."""
    fences = FENCE.findall(document.read_text(encoding="utf-8"))
    followed = zip(fences, [*fences[1:], ("", "")], strict=True)
    return [
        (code, output if kind == "text" else "")
        for (info, code), (kind, output) in followed
        if info == RUNNABLE
    ]


def _run_blocks() -> list[str]:
    """Run the blocks one after the other, as a reader would. Return what each printed."""
    dist.destroy_process_group()  # a reader has none, and the simulated transport makes its own
    warnings.simplefilter("ignore")
    namespace: dict[str, Any] = {}
    printed = []
    for number, (code, _) in enumerate(blocks_of(TOLD), 1):
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            exec(compile(code, f"{TOLD.name}, block {number}", "exec"), namespace)
        printed.append(output.getvalue())
    dist.barrier()  # the launcher will destroy the group that is there
    return printed


def test_code_blocks_print_what_the_document_says() -> None:
    [printed] = run_ranks(_run_blocks, 1)
    expected = [output for _, output in blocks_of(TOLD)]
    assert len(expected) >= 7
    assert printed == expected
