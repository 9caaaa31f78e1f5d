"""Refuses sources without a build, and a torch that the build does not fit.

That happens before the extension is loaded. An extension built against another minor version of
torch may fail to load, or crash later.
"""

from __future__ import annotations

from pathlib import Path

import torch

try:
    from fsdp_ext import _build_info
except ImportError as error:
    # A clone after `pip install .`, which builds elsewhere: Python's own message speaks of a
    # circular import.
    raise ImportError(
        f"The fsdp_ext in {Path(__file__).parents[1]} is source code that is not built there. If "
        "fsdp_ext is not installed yet, run pip install -v --no-build-isolation . in that folder. "
        "Then start Python outside of that folder, with scripts that lie outside of it."
    ) from error


def why_unfit(
    kind: str, built: str, installed: str, cuda: str | None, *, built_cuda: str = ""
) -> str | None:
    """Return why a torch does not fit a build, or None if it does.

    Args:
        kind: of the build, "CPU" or "CUDA".
        built: the version of torch that it was built against.
        installed: the version of torch that is installed.
        cuda: the CUDA version of the installed torch; None if it has no CUDA.
        built_cuda: the CUDA version of a CUDA build.
    """
    minor, installed_minor = (".".join(version.split(".")[:2]) for version in (built, installed))
    if minor != installed_minor:
        return (
            f"fsdp_ext was built against torch {minor}, and torch {installed} is installed. "
            f"Install a wheel of fsdp_ext for torch {installed_minor}, or build it again: pip "
            "install --no-build-isolation --no-deps --force-reinstall . in a clone."
        )
    if kind != "CUDA":
        return None
    if cuda is None:
        return (
            f"This is fsdp_ext's CUDA build, and torch {installed} has no CUDA. Install a torch "
            "with CUDA, or fsdp_ext's CPU build."
        )
    major = built_cuda.split(".")[0]
    if major != cuda.split(".")[0]:
        return (
            f"fsdp_ext was built for CUDA {major}, and torch {installed} has CUDA {cuda}. Install "
            f"a torch with CUDA {major}, or build fsdp_ext again with an nvcc {cuda}."
        )
    return None


_reason = why_unfit(
    _build_info.BUILD_KIND,
    _build_info.TORCH_VERSION,
    torch.__version__,
    torch.version.cuda,
    built_cuda=_build_info.CUDA_VERSION,
)
if _reason is not None:
    raise ImportError(_reason)
