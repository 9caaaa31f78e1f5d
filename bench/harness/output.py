"""The output of a run: tables, JSON with the environment of the run, and pictures.

A file is written whole or not at all. Targets are checked before anything is measured.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import platform
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fsdp_ext._util.files import write_whole
from fsdp_ext._util.tables import columns

ROOT = Path(__file__).resolve().parents[2]
PICTURES = (".png", ".pdf", ".svg")


def environment(device: str) -> dict[str, str]:
    """Return the machine and the versions, on which all figures depend.

    Args:
        device: "cpu" or "cuda": where the run computes.
    """
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "machine": platform.machine(),
        "cpu": cpu_model(),
        "cores": str(len(os.sched_getaffinity(0))),
        "threads": str(torch.get_num_threads()),
        "commit": commit(),
    }


def describe(device: str) -> str:
    """Return the environment as one line, which is printed before the tables."""
    known = environment(device)
    threads = "1 thread" if known["threads"] == "1" else f"{known['threads']} threads"
    return (
        f"torch {known['torch']}, Python {known['python']}, device {known['device']}, "
        f"{known['cpu']} ({known['machine']}), {known['cores']} cores, {threads}, "
        f"commit {known['commit']}"
    )


def cpu_model() -> str:
    """Return the name of the CPU."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown CPU"


def commit() -> str:
    """Return the commit, marked as dirty if files differ from it; "unknown" without git."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        found = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=10
        )
        return found.stdout.strip()
    return os.environ.get("COMMIT", "unknown")


def print_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], words_last: bool = False
) -> None:
    """Print rows under a header. The first column is aligned to the left, others to the right.

    Args:
        header: the columns' names.
        rows: each has a cell for each column.
        words_last: whether the last column has words, which are aligned to the left, too.
    """
    left = (0, len(header) - 1) if words_last else (0,)
    print(*columns(header, rows, left), sep="\n")


def drop_stdout() -> None:
    """Discard text that could not be printed. Python would try again at exit, and complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def fault_of_target(path: str) -> str | None:
    """Return why `path` cannot be written, or None if it can."""
    target = Path(path)
    if target.is_dir():
        return f"needs a file and got the directory {path}; name a file in it"
    directory = target.absolute().parent
    if not directory.is_dir():
        return f"needs an existing directory and there is no {directory}; make it first"
    # A file is replaced, which needs write access to its directory. Devices and pipes are not.
    needed = target if _is_special(target) else directory
    if not os.access(needed, os.W_OK):
        return f"has no permission to write to {needed}; name another place"
    return None


def fault_of_picture(path: str) -> str | None:
    """Return why no picture can be drawn into `path`, or None; imports matplotlib."""
    if Path(path).suffix not in PICTURES:
        return f"needs a name that ends in one of {', '.join(PICTURES)} and got {path!r}"
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        return f"needs matplotlib, which cannot be imported ({error}); pip install matplotlib"
    return fault_of_target(path)


def _is_special(target: Path) -> bool:
    return target.exists() and not target.is_file()


def write_json(
    path: str, name: str, rows: Sequence[Mapping[str, Any]], device: str, **more: object
) -> None:
    """Write a benchmark's rows with its environment, whole or not at all.

    Args:
        path: the file.
        name: the benchmark's name in the document.
        rows: dicts that JSON can express.
        device: "cpu" or "cuda": where it computed.
        more: further fields of the document.

    Raises:
        OSError: if the file cannot be written.
    """
    document = {"benchmark": name, "environment": environment(device), **more, "rows": list(rows)}
    write_whole(path, (json.dumps(document, indent=2) + "\n").encode())


@contextlib.contextmanager
def picture(path: str, title: str, columns: int = 1, height: float = 4.8) -> Iterator[Any]:
    """Yield matplotlib's axes (an array of them if there are several), then write the picture.

    Args:
        path: the file; its suffix, one of `PICTURES`, is the format.
        title: the title of the whole picture.
        columns: the number of axes, side by side.
        height: the picture's height in inches; a column is 6.4 wide.

    Raises:
        OSError: if the file cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")  # draws without a display
    from matplotlib import pyplot

    size = (6.4 * columns, height)
    figure, axes = pyplot.subplots(1, columns, figsize=size, layout="constrained")
    try:
        figure.suptitle(title)
        yield axes
        content = io.BytesIO()
        kind = Path(path).suffix[1:]
        # In an SVG, text stays text, and the same rows give the same file.
        metadata = {"Date": None} if kind == "svg" else None
        with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "fsdp_ext"}):
            figure.savefig(content, format=kind, dpi=150, metadata=metadata)
    finally:
        pyplot.close(figure)
    write_whole(path, content.getvalue())


def bars(
    axes: Any,
    labels: Sequence[str],
    values: Sequence[float],
    unit: str,
    groups: Sequence[str] | None = None,
) -> None:
    """Draw horizontal bars with their values, the first one on top.

    Args:
        axes: matplotlib's.
        labels: one for each bar.
        values: one for each bar, in `unit`.
        unit: the label of the axis.
        groups: one for each bar. Bars of a group have the same colour; by default all differ.
    """
    order = list(dict.fromkeys(labels if groups is None else groups))
    colours = [f"C{order.index(group)}" for group in (labels if groups is None else groups)]
    drawn = axes.barh(labels, values, color=colours)
    axes.bar_label(drawn, fmt="%.3g", padding=3)
    axes.set_xlabel(unit)
    axes.set_xlim(right=max(values) * 1.15)
    axes.invert_yaxis()
