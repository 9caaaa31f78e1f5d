"""setuptools' build backend, which builds against the installed torch.

pip builds in an isolated environment. A requirement of torch would install PyPI's build there,
while the user may have a build for another CUDA version. An extension built against the wrong torch
does not load, or lacks CUDA. So the build imports the torch of the environment that pip installs
into, if that torch is new enough. If not, pip gets the newest torch and also installs it there.
Builders that make an environment of their own, such as uv and `python -m build`, hide the installed
torch, so the build stops.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.metadata import distributions
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403  (the hooks that are not replaced below)

OLDEST_TORCH = (2, 11)


def path_outside() -> list[str]:
    """Return where the environment outside of pip's isolated one finds its packages."""
    # pip isolates by variables, which -E ignores. sys.path has what .pth files add, too.
    command = [sys.executable, "-E", "-c", "import json, sys; print(json.dumps(sys.path))"]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    return [place for place in json.loads(found.stdout) if place]


def has_torch() -> bool:
    """Return whether the build can import a torch that is new enough."""
    for torch in distributions(name="torch", path=[*sys.path, *path_outside()]):
        major, minor = re.findall(r"\d+", torch.version)[:2]
        if (int(major), int(minor)) >= OLDEST_TORCH:
            return True
    return False


def torch_requirements() -> list[str]:
    """Return what the isolated environment needs so that the build can import torch.

    Raises:
        SystemExit: if there is no such torch, and the builder is not pip.
    """
    oldest = ".".join(map(str, OLDEST_TORCH))
    if has_torch():
        return []
    if "PIP_BUILD_TRACKER" in os.environ:  # pip sets it
        return [f"torch>={oldest}.0.dev0"]  # as pyproject.toml has it
    raise SystemExit(
        f"The build of fsdp_ext sees no torch {oldest} or newer in {sys.prefix}. Builders other "
        "than pip make that environment themselves, without torch. Install torch, setuptools, "
        "cmake and ninja where fsdp_ext is to run, and build there with `pip install "
        "--no-build-isolation .`, `uv pip install --no-build-isolation .` or `python -m build "
        "--wheel --no-isolation`."
    )


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    """Return what building a wheel needs besides pyproject.toml's list."""
    return [*build_meta.get_requires_for_build_wheel(config_settings), *torch_requirements()]


def get_requires_for_build_editable(config_settings: Any = None) -> list[str]:
    """Return what an editable install needs besides pyproject.toml's list."""
    return [*build_meta.get_requires_for_build_editable(config_settings), *torch_requirements()]


def build_wheel(directory: str, settings: Any = None, metadata: str | None = None) -> str:
    """Build a wheel against the installed torch."""
    _find_installed_torch()
    return build_meta.build_wheel(directory, settings, metadata)


def build_editable(directory: str, settings: Any = None, metadata: str | None = None) -> str:
    """Build an editable wheel against the installed torch."""
    _find_installed_torch()
    return build_meta.build_editable(directory, settings, metadata)


def _find_installed_torch() -> None:
    # At the end, so that the isolated environment's own packages come first.
    sys.path.extend(place for place in path_outside() if place not in sys.path)
