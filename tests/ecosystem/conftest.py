"""Tests of this directory need libraries that `make test-ecosystem` installs."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for `import ecosystem.families`

# Where the libraries are, if not in this environment. It comes last, so its torch is not used.
if packages := os.environ.get("FSDP_EXT_TEST_PACKAGES"):
    sys.path.append(packages)

# The environment of `make test` lacks these packages, so it does not collect these files.
collect_ignore_glob = [] if importlib.util.find_spec("transformers") else ["test_*.py"]
