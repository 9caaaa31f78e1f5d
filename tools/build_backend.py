"""setuptools' build backend, which builds against the installed torch.

pip builds in an isolated environment. A requirement of torch would install PyPI's build there,
while the user may have a build for another CUDA version. An extension built against the wrong torch
does not load, or lacks CUDA. So the build imports the torch of the environment that pip installs
into, if that torch is new enough. Builders that make an environment of their own, such as uv and
`python -m build`, do not see it: they need --no-build-isolation.
"""

from __future__ import annotations

import re
import site
import sys
import sysconfig
from importlib.metadata import distributions
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403  (the hooks that are not replaced below)

OLDEST_TORCH = (2, 11)


def installed_torch() -> str | None:
    """Return the directory that has the torch of the environment outside; None without one."""
    # In pip's isolated environment these are still the paths of the environment outside.
    places = [sysconfig.get_path(name) for name in ("purelib", "platlib")]
    places += [site.getusersitepackages()]
    for torch in distributions(name="torch", path=places):
        major, minor = re.findall(r"\d+", torch.version)[:2]
        if (int(major), int(minor)) >= OLDEST_TORCH:
            return str(torch.locate_file(""))
    return None


def torch_requirements() -> list[str]:
    """Return what the isolated environment needs so that the build can import torch."""
    oldest = ".".join(map(str, OLDEST_TORCH))
    return [] if installed_torch() is not None else [f"torch>={oldest}"]


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
    place = installed_torch()
    if place is not None and place not in sys.path:
        sys.path.append(place)
