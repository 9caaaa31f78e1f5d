"""What `import torch` calls in the rehearsal's environment: from then on the emulated GPU computes.

It starts no CUDA, so processes may fork after the import.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from pathlib import Path


def load() -> None:
    """Load the emulated operators and kernels, if this process has the emulated runtime."""
    redirection = os.environ.get("LD_AUDIT", "")
    if not redirection.endswith("libredirect_libraries.so"):
        return
    import torch

    torch.backends.cudnn.enabled = False
    # Attention is made of other operators.
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)
    directory = Path(redirection).parent
    operators = ctypes.CDLL(str(directory / "libemulated_operators.so"))
    with _without_stderr():  # torch warns of the first operator that is overridden
        operators.emulated_gpu_install_operators()
    ctypes.CDLL(str(directory / "libemulated_kernels.so"))


@contextlib.contextmanager
def _without_stderr() -> Iterator[None]:
    stderr, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    try:
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(null)
