"""Programs for tests of the emulated GPU, which some faults end."""

from __future__ import annotations

import os
import subprocess
import sys


def run_program(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run Python code in a process of its own, which has imported torch."""
    return subprocess.run(
        [sys.executable, "-P", "-c", f"import torch\n{code}"],
        env={**os.environ, **variables},
        check=False,
        capture_output=True,
        text=True,
        timeout=100,
    )
