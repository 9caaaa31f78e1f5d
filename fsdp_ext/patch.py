"""``python -m fsdp_ext.patch script.py``: runs a script after ``fsdp_ext.patch()``.

This file exists for the command. ``fsdp_ext.patch`` is the function, and importing the module gives
the function, too, so that no import can put a module in the function's place.
"""

import sys
from types import ModuleType
from typing import cast

from fsdp_ext.patching.api import patch
from fsdp_ext.patching.command import run_again, run_command

if __name__ == "__main__":
    run_command(globals())
elif __name__ == "__mp_main__":  # in a process that multiprocessing has started
    run_again(globals())
else:
    sys.modules[__name__] = cast(ModuleType, patch)
