"""setuptools' build backend, which builds against the installed version of torch.

pip builds in an isolated environment, where a requirement of `torch>=2.11` would install the newest
torch. An extension built against it does not load into an older torch, so this backend requires
the version that is installed, if there is one.
"""

from __future__ import annotations

import re
import sysconfig
from importlib.metadata import distributions
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403  (the hooks that are not replaced below)

OLDEST_TORCH = (2, 11)


def torch_requirement() -> str:
    """Return the requirement for the torch of the environment that pip installs into."""
    # In pip's isolated environment these are still the paths of the environment outside.
    places = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    for torch in distributions(name="torch", path=places):
        version = torch.version.split("+")[0]
        major, minor = re.findall(r"\d+", version)[:2]
        if (int(major), int(minor)) >= OLDEST_TORCH:
            return f"torch=={version}"
    return "torch>=" + ".".join(map(str, OLDEST_TORCH))


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    """Return what building a wheel needs besides pyproject.toml's list."""
    return [*build_meta.get_requires_for_build_wheel(config_settings), torch_requirement()]


def get_requires_for_build_editable(config_settings: Any = None) -> list[str]:
    """Return what an editable install needs besides pyproject.toml's list."""
    return [*build_meta.get_requires_for_build_editable(config_settings), torch_requirement()]
