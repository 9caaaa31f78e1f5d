"""``python -m fsdp_ext.patch``: runs a script whose imports of PyTorch's FSDP give fsdp_ext's.

The script runs in the module ``__main__`` of this process, which keeps the spec of
``fsdp_ext.patch``. Processes that the script starts with "spawn" or "forkserver" import the main
module anew, by this spec's name. So they come here, too, and are patched before they run the
script.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fsdp_ext.patching.api import patch

USAGE = "usage: python -m fsdp_ext.patch script.py [argument ...]"
_SCRIPT = "FSDP_EXT_PATCHED_SCRIPT"  # for the processes that this one starts
_KEPT = ("__builtins__", "__name__", "__spec__")


def run_command(namespace: dict[str, Any]) -> None:
    """Run the script that the command line names, with ``namespace`` as its globals.

    The namespace is emptied before, except for names that every module has.
    """
    script = _script_of(sys.argv[1:])
    del sys.argv[0]
    if not getattr(sys.flags, "safe_path", False):  # Python 3.10 has no such flag
        sys.path[0] = str(script.resolve().parent)  # -m has put the current directory there
    os.environ[_SCRIPT] = str(script)
    patch()
    _run(script, namespace)


def run_again(namespace: dict[str, Any]) -> None:
    """Run the script of :func:`run_command` in a process that multiprocessing has started."""
    patch()
    sys.argv[0] = os.environ[_SCRIPT]  # it is this file's, and runpy restores it afterwards
    _run(Path(sys.argv[0]), namespace)


def _script_of(arguments: Sequence[str]) -> Path:
    if arguments[:1] in (["-h"], ["--help"]):
        print(USAGE)
        raise SystemExit(0)
    if not arguments or arguments[0].startswith("-"):
        got = f"got {arguments[0]}" if arguments else "got no script"
        raise SystemExit(_fail(f"{got}. Pass a file"))
    if not Path(arguments[0]).is_file():
        raise SystemExit(_fail(f"there is no file {arguments[0]}"))
    return Path(arguments[0]).absolute()


def _fail(reason: str) -> int:
    print(f"{USAGE}\npython -m fsdp_ext.patch: {reason}.", file=sys.stderr)
    return 2


def _run(script: Path, namespace: dict[str, Any]) -> None:
    # Without a package, relative imports fail as in a script, and do not go by __spec__.
    code = compile(script.read_bytes(), script, "exec", dont_inherit=True)
    for name in [name for name in namespace if name not in _KEPT]:
        del namespace[name]
    namespace.update(__file__=str(script), __doc__=None, __package__="", __cached__=None)
    exec(code, namespace)
