"""Helpers for tests of the emulated GPU (tests/emulated_gpu)."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading

LATE_CYCLES = 20_000_000  # of torch.cuda._sleep: 20 ms


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


def runtime() -> ctypes.CDLL:
    """Return CUDA's runtime, some of whose functions torch lacks."""
    return ctypes.CDLL("libcudart.so.13")


def error_of(result: int) -> str:
    """Return the name of a result of the runtime, and clear the error."""
    library = runtime()
    library.cudaGetErrorName.restype = ctypes.c_char_p
    library.cudaGetLastError()
    name: bytes = library.cudaGetErrorName(result)
    return name.decode()


HOST_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def launch_on_host(stream: int, function: object) -> None:
    """Run a HOST_FUNCTION in the order of the stream. The caller keeps the function until then."""
    assert runtime().cudaLaunchHostFunc(ctypes.c_void_p(stream), function, None) == 0


class Gate:
    """A function of the host on a stream, behind which work waits until the gate is open.

    At the end of its `with` block, the gate opens, and the host waits for the current device.
    """

    def __init__(self, stream: int) -> None:
        self._is_open = threading.Event()
        self._was_opened = False
        self._function = HOST_FUNCTION(lambda _: self._wait())
        launch_on_host(stream, self._function)

    def __enter__(self) -> Gate:
        return self

    def __exit__(self, *_: object) -> None:
        self.open()
        assert runtime().cudaDeviceSynchronize() == 0
        assert self._was_opened, "the gate was not opened within a minute"

    def open(self) -> None:
        """Let the stream go on."""
        self._is_open.set()

    def _wait(self) -> None:
        self._was_opened = self._is_open.wait(60)
