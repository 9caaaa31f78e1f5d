"""Make an environment that sees another one's packages, and whose torch has the emulated GPU.

python make_environment.py OTHER_PYTHON DIRECTORY
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

METADATA = "Metadata-Version: 2.1\nName: emulated-gpu\nVersion: 0\n"
# torch calls this when it is imported. PYTHONPATH has to have the directory `tests`.
ENTRY_POINTS = "[torch.backends]\nemulated_gpu = emulated_gpu.loading:load\n"


def _site_packages(python: str) -> Path:
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    result = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True)
    return Path(result.stdout.strip())


def make(other_python: str, directory: str) -> None:
    """Make the environment anew; no package is copied.

    Raises:
        SystemExit: if the directory is a link. venv would empty what it points to, and then fail.
    """
    if Path(directory).is_symlink():
        raise SystemExit(f"{directory} is a link to an environment; remove the link first")
    subprocess.run([other_python, "-m", "venv", "--clear", "--without-pip", directory], check=True)
    own = _site_packages(f"{directory}/bin/python")
    others = _site_packages(other_python)
    (own / "of_cuda.pth").write_text(f"import site; site.addsitedir({str(others)!r})\n")
    info = own / "emulated_gpu-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(METADATA)
    (info / "entry_points.txt").write_text(ENTRY_POINTS)


if __name__ == "__main__":
    make(*sys.argv[1:])
