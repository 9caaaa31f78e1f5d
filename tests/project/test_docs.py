"""What the documents say about files, functions, notes and code is true."""

from __future__ import annotations

import contextlib
import io
import os
import re
import socket
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from support.launcher import run_ranks

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
TASKS = ROOT / "docs" / "tasks.md"
CHECKPOINTS = ROOT / "docs" / "checkpoints.md"
DOCUMENTS = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "CHANGELOG.md", README]
TOLD = ROOT / "docs" / "how-fsdp-works.md"
DESIGN = ROOT / "docs" / "design.md"
FIGURES = ROOT / "docs" / "figures"

# A link's text may contain one pair of brackets: [Note [lanes]](../csrc/core/lanes.h).
LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\[\]]*\])+)\]\(([^()\s]+)\)")
PICTURE = re.compile(r"!\[[^\]]*\]\(([^()\s]+)\)")
NOTE = re.compile(r"Note \[[^\]]+\]")
PLACED_NOTE = re.compile(r"(Note \[[^\]]+\]) in\s+[`\[]*((?:\w+/)+\w+\.(?:h|py|cu))")
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
IDENTIFIER = re.compile(r"`([A-Za-z_]\w*(?:(?:::|\.)\w+)*)(?:\(\))?`")
# `core/memory/layout.h` is in csrc, `sharding/root/unit.py` in fsdp_ext; `core/memory/layout` is
# its two files.
PATH = re.compile(r"`(\w+(?:/[\w.-]+)+/?)`")
# Blocks that run one after the other, and blocks that each run in a process of their own.
RUNNABLE = "python run"
ALONE = "python run alone"


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
    written = set(re.findall(r"(?://|#|^ *) ?(Note \[[^\]]+\])", text, re.MULTILINE))
    cited = {note for document in DOCUMENTS for note in NOTE.findall(prose_of(document))}
    assert cited - written - {"Note [name]"} == set()  # README's, for any of them


def test_notes_are_in_the_files_that_are_named_for_them() -> None:
    sources = [*(ROOT / "csrc").rglob("*.*"), *(ROOT / "fsdp_ext").rglob("*.py"), *DOCUMENTS]
    folders = (ROOT, ROOT / "csrc", ROOT / "fsdp_ext")
    checked, wrong = 0, []
    for source in sources:
        text = re.sub(r"\n\s*(?://|#)? ?", " ", source.read_text(encoding="utf-8"))
        for note, path in PLACED_NOTE.findall(text):
            texts = [(f / path).read_text(encoding="utf-8") for f in folders if (f / path).exists()]
            heading = re.compile(rf"^ *(?://|#)? ?{re.escape(note)}$", re.MULTILINE)
            checked += 1
            if not any(map(heading.search, texts)):
                wrong.append((source.name, note, path))
    assert wrong == []
    assert checked > 100


def test_files_that_documents_name_exist() -> None:
    folders = (ROOT, ROOT / "csrc", ROOT / "fsdp_ext")

    def exists(path: Path) -> bool:
        return path.exists() or any(path.parent.glob(f"{path.name}.*"))

    named = {path for document in DOCUMENTS for path in PATH.findall(prose_of(document))}
    assert len(named) > 50
    missing = {path for path in named if not any(exists(folder / path) for folder in folders)}
    assert missing == set()


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


# - How documents look


def test_lines_are_at_most_100_characters() -> None:
    too_long = []
    for document in DOCUMENTS:
        prose = FENCE.sub("", document.read_text(encoding="utf-8"))
        for line in prose.splitlines():
            words = line.lstrip("-* ").split()
            # A table's row cannot be broken, and neither can a link.
            if len(line) > 100 and not line.lstrip().startswith("|") and len(words) > 1:
                too_long.append((document.name, line))
    assert not too_long


def test_each_page_of_the_design_is_in_its_table() -> None:
    linked = {link.file for link in relative_links() if link.document == DESIGN}
    assert set((ROOT / "docs" / "design").glob("*.md")) <= linked


# - Code in documents


def blocks_of(document: Path, kind: str = RUNNABLE) -> list[tuple[str, str]]:
    """Return the blocks of a kind, each with the output that follows it."""
    fences = FENCE.findall(document.read_text(encoding="utf-8"))
    followed = zip(fences, [*fences[1:], ("", "")], strict=True)
    return [
        (code, output if after == "text" else "")
        for (info, code), (after, output) in followed
        if info == kind
    ]


def _run(document: Path, codes: list[str]) -> list[str]:
    """Run blocks one after the other, as a reader would; return what each printed."""
    warnings.simplefilter("ignore")
    namespace: dict[str, Any] = {}
    printed = []
    for number, code in enumerate(codes, 1):
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            exec(compile(code, f"{document.name}, block {number}", "exec"), namespace)
        printed.append(output.getvalue())
    namespace.clear()  # classes and functions outlive this, and keep the models through it
    return printed


def _run_without_group(document: Path, codes: list[str]) -> list[str]:
    dist.destroy_process_group()  # a reader has none; the simulated transport makes its own
    printed = _run(document, codes)
    dist.barrier()  # the launcher's end destroys the group that is there
    return printed


def _run_as_torchrun(document: Path, codes: list[str], directory: str) -> list[str]:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    ports: list[Any] = [None]
    if rank == 0:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            ports = [free.getsockname()[1]]
    dist.broadcast_object_list(ports)
    dist.destroy_process_group()  # the reader's script makes its own
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(ports[0])}
    os.chdir(directory)
    return _run(document, codes)


def test_code_blocks_print_what_the_document_says() -> None:
    blocks = blocks_of(TOLD)
    assert len(blocks) >= 7
    [printed] = run_ranks(_run_without_group, 1, TOLD, [code for code, _ in blocks])
    assert printed == [output for _, output in blocks]


def test_the_readmes_script_and_the_blocks_that_continue_it_run(tmp_path: Path) -> None:
    (script, _), *continued = blocks_of(README)
    for document in (TASKS, CHECKPOINTS):
        continued += blocks_of(document)
    script, last_line, _ = re.split(r"(dist\.destroy_process_group\(\).*\n)$", script)
    assert last_line  # the launcher does that, after the other blocks
    codes = [script, *(code for code, _ in continued)]
    first, _ = run_ranks(_run_as_torchrun, 2, README, codes, str(tmp_path), fresh=True)
    printed = "".join(first)
    losses = re.findall(r"loss (\S+) to (\S+)", printed)
    assert [float(before) > float(after) for before, after in losses] == [True]
    for said in ("units in", "exposed", "simulated step over", "chosen"):
        assert said in printed  # by describe_buckets, profile, plan and tune
    written = {"rank0.json", "rank1.json", "checkpoint", "checkpoints", "exported"}
    assert {path.name for path in tmp_path.iterdir()} == written


def test_the_blocks_that_stand_alone_run() -> None:
    blocks = blocks_of(TASKS, ALONE)
    assert blocks
    for code, _ in blocks:
        run_ranks(_run_without_group, 1, TASKS, [code])


def test_every_python_block_of_the_readme_and_the_pages_that_continue_it_runs() -> None:
    for document, runs in (
        (README, {RUNNABLE}),
        (TASKS, {RUNNABLE, ALONE}),
        (CHECKPOINTS, {RUNNABLE}),
    ):
        kinds = [kind for kind, _ in FENCE.findall(document.read_text(encoding="utf-8"))]
        assert {kind for kind in kinds if kind.startswith("py")} == runs
