"""Programs that run over the emulated GPU (tests/emulated_gpu) in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys


def run_program(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run Python code that begins with `import torch`, with these environment variables, too."""
    return subprocess.run(
        [sys.executable, "-P", "-c", f"import torch\n{code}"],
        env={**os.environ, **variables},
        check=False,
        capture_output=True,
        text=True,
        timeout=100,
    )
