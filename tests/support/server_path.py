"""Gives the server of launcher.py the tests' `sys.path`, before it imports anything of them.

A server would look into the current directory first, where another build of fsdp_ext than the
tests' may lie.
"""

from __future__ import annotations

import os
import sys

# The server's PYTHONPATH is the tests' `sys.path`. This variable has the PYTHONPATH of ranks.
OF_RANKS = "FSDP_EXT_TEST_PYTHONPATH"

if OF_RANKS in os.environ:
    sys.path[:] = os.environ["PYTHONPATH"].split(os.pathsep)
    os.environ["PYTHONPATH"] = os.environ.pop(OF_RANKS)
