"""``python -m fsdp_ext``: describes the build and the machine.

``python -m fsdp_ext measure-link`` measures the transport in use (comm/measure_link.py).
``python -m fsdp_ext plan`` shows the memory and the time of a training (planner/cli.py).
Other commands look into checkpoints and convert them (checkpoint/cli.py).
"""

from __future__ import annotations

import os
import platform
import sys
from ctypes.util import find_library

import torch

from fsdp_ext import _C, _build_info
from fsdp_ext.checkpoint import cli as of_checkpoints
from fsdp_ext.comm import measure_link
from fsdp_ext.comm.lanes import nccl_libraries
from fsdp_ext.comm.nccl_settings import OF_ALL, OF_LANES, describe_lane, nccl_settings
from fsdp_ext.comm.transports import VARIABLE, resolve_transport, why_no_shared_memory
from fsdp_ext.planner import cli

USAGE = (
    "usage: python -m fsdp_ext [measure-link | plan | inspect | convert | export | import] [--help]"
)
_OF_CHECKPOINTS = "\n".join(f"  {n:<14}{text}" for n, text in of_checkpoints.COMMANDS.items())
HELP = f"""{USAGE}

Without a command: show what was built and which transport ranks will use.
  measure-link  measure the transport between ranks
  plan          show the memory of each rank and the time of a step, before training
{_OF_CHECKPOINTS}

example: a transformer of 3.2 B parameters on 64 ranks
  {cli.EXAMPLE}"""


def describe() -> dict[str, str]:
    """Return the facts about the build and the machine, by name."""
    lines = {
        "fsdp_ext": _build_info.VERSION,
        "build": f"{_build_info.BUILD_KIND} ({_build_info.COMPILER})",
        "built against": f"torch {_build_info.TORCH_VERSION}",
        "running with": f"torch {torch.__version__}, Python {platform.python_version()}",
        "transports": ", ".join(_build_info.TRANSPORTS),
    }
    if _build_info.BUILD_KIND == "CUDA" and torch.cuda.is_available():
        lines["transport of GPUs"] = _describe_transport("cuda")
    lines["transport on the host"] = _describe_transport("cpu")
    if _build_info.BUILD_KIND == "CUDA":
        lines |= _describe_cuda()
    elif torch.version.cuda is not None:
        lines["missing"] = (
            f"CUDA, which torch has ({torch.version.cuda}): install again with FORCE_CUDA=1 and "
            "CUDA_HOME set to a toolkit of the same major version, 12.5 or newer"
        )
    elif find_library("cuda") is not None:
        lines["missing"] = (
            "CUDA in torch, although this machine has NVIDIA's driver: install a torch with CUDA, "
            "and then fsdp_ext again"
        )
    return lines


def _describe_transport(device_type: str) -> str:
    """Return the transport that ranks on these devices would use, and why."""
    try:
        asked = resolve_transport(None, device_type)
    except ValueError as error:
        return f"none: {error}"
    if device_type == "cuda":
        return f"nccl ({VARIABLE})" if asked is not None else "nccl"
    reason = why_no_shared_memory()
    if asked == "process_group":
        return f"process_group ({VARIABLE})"
    if asked is not None:
        return f"none: {reason}" if reason else f"{asked} ({VARIABLE})"
    if reason:
        return f"process_group: {reason}"
    return (
        "shared_memory between ranks of one host; process_group between hosts, with shared memory "
        "within each"
    )


def _describe_gpu() -> str:
    name = torch.cuda.get_device_name()
    try:  # a packer loads all kernels
        _C.Packer(gpu=torch.cuda.current_device())
    except RuntimeError as error:
        return f"{name}. {error}"
    return name


def _describe_cuda() -> dict[str, str]:
    lines = {
        "CUDA": f"{_build_info.CUDA_VERSION}, for {', '.join(_build_info.CUDA_ARCHITECTURES)}",
        "GPU": _describe_gpu() if torch.cuda.is_available() else "torch sees none",
    }
    try:
        version, path, registration, between_nodes = _C.describe_nccl(nccl_libraries())
    except RuntimeError as error:
        return {**lines, "NCCL": str(error)}
    how = {"window": "ncclCommWindowRegister", "register": "ncclCommRegister"}
    lines["NCCL"] = f"{version}, {path}"
    try:
        settings = nccl_settings()
    except ValueError as error:
        return {**lines, "NCCL settings": str(error)}
    buffers = how[registration]
    if not settings.registers_buffers:
        buffers = "off (FSDP_EXT_NCCL_REGISTER=0)"
    elif not between_nodes:
        buffers += ", on one node"
    for lane, of_lane in (("gather", settings.gather), ("reduce", settings.reduce)):
        if of_lane:
            lines[f"{lane} lane"] = f"{describe_lane(of_lane)} ({OF_LANES[lane]})"
    if policy := os.environ.get(OF_ALL):
        lines["all lanes"] = f"cta_policy {policy} ({OF_ALL})"
    return {**lines, "registered buffers": buffers}


def main() -> int:
    """Print the description or run a command; return the exit code."""
    match sys.argv[1:]:
        case []:
            pass
        case ["measure-link", *arguments]:
            return measure_link.run(arguments)
        case ["plan", *arguments]:
            return cli.run(arguments)
        case [command, *arguments] if command in of_checkpoints.COMMANDS:
            return of_checkpoints.run(command, arguments)
        case ["-h" | "--help"]:
            print(HELP)
            return 0
        case _:
            print(
                f"{USAGE}\nunknown command: {' '.join(sys.argv[1:])}",
                file=sys.stderr,
            )
            return 2
    lines = describe()
    width = max(map(len, lines))
    for name, value in lines.items():
        print(f"{name:<{width}}  {value}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
