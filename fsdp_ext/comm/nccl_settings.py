"""The variables of the environment that say how NCCL and GPUs are used: docs/design/cuda.md.

They are read when ranks connect, in the first forward. All ranks of a group set the same, except
for ``FSDP_EXT_PACK_MULTIPROCESSORS``.
"""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass, field, replace

from fsdp_ext.comm.rendezvous import machine

REGISTER = "FSDP_EXT_NCCL_REGISTER"
OF_LANES = {"gather": "FSDP_EXT_NCCL_GATHER", "reduce": "FSDP_EXT_NCCL_REDUCE"}
OF_ALL = "NCCL_CTA_POLICY"  # csrc/comm/nccl/nccl_paths.cpp reads it
PACK_MULTIPROCESSORS = "FSDP_EXT_PACK_MULTIPROCESSORS"

# The least and the most of each number. NCCL has at most 64 channels.
_RANGES = {"min_ctas": (1, 64), "max_ctas": (1, 64), "cluster_size": (0, 8)}
# NCCL_CTA_POLICY_*; csrc/comm/nccl/nccl_paths.cpp chooses what "auto" stands for.
POLICIES = {"default": 0, "efficiency": 1, "zero": 2, "auto": -1}


@dataclass(frozen=True)
class NcclSettings:
    """The settings in the variables."""

    registers_buffers: bool = True  # whether long-lived buffers are registered, where NCCL can
    # Fields of ncclConfig_t for the gather lane, by the names that csrc/comm/nccl/nccl.h has. NCCL
    # chooses fields that are not set.
    gather: dict[str, int] = field(default_factory=dict)
    reduce: dict[str, int] = field(default_factory=dict)  # such fields for the reduce lane

    def between_replicas(self) -> NcclSettings:
        """Return the settings of lanes that sum gradients of replicas.

        NCCL has policies for gathers and reduce-scatters alone, and may not have one between nodes.
        """
        gather = {name: value for name, value in self.gather.items() if name != "cta_policy"}
        return replace(self, gather=gather)

    def __str__(self) -> str:
        """Return the settings as text, which is the same on ranks that agree."""
        of_all = os.environ.get(OF_ALL)
        return ", ".join(
            [
                f"{REGISTER}={int(self.registers_buffers)}",
                f"{OF_LANES['gather']}={describe_lane(self.gather)}",
                f"{OF_LANES['reduce']}={describe_lane(self.reduce)}",
                *([f"{OF_ALL}={of_all}"] if of_all else []),
            ]
        )


def describe_lane(settings: dict[str, int]) -> str:
    """Return a lane's settings as its variable would have them."""
    names = {number: name for name, number in POLICIES.items()}
    return ",".join(
        f"{name}={names[value] if name == 'cta_policy' else value}"
        for name, value in sorted(settings.items())
    )


def nccl_settings() -> NcclSettings:
    """Return the settings of the environment."""
    text = os.environ.get(REGISTER) or "1"
    if text not in ("0", "1"):
        raise ValueError(f"{REGISTER} is {text!r}. Pass 1 or 0, or unset it to register buffers.")
    registers = text == "1"
    gather, reduce = (_settings_of_lane(variable) for variable in OF_LANES.values())
    if reduce.get("cta_policy") == POLICIES["zero"]:
        raise ValueError(
            f"{OF_LANES['reduce']} has cta_policy=zero, but copy engines cannot add. Set it in "
            f"{OF_LANES['gather']} only."
        )
    if gather.get("cta_policy") == POLICIES["zero"] and not registers:
        raise ValueError(
            f"{OF_LANES['gather']} has cta_policy=zero, and copy engines need registered buffers, "
            f"but {REGISTER}=0 turns these off. Unset one of the two."
        )
    return NcclSettings(registers, gather, reduce)


def nccl_host() -> str:
    """Return NCCL's identifier of this node (src/misc/utils.cc).

    Containers with host names of their own are nodes of their own.
    """
    return os.environ.get("NCCL_HOSTID") or f"{platform.node()}/{machine()}"


def pack_multiprocessors() -> int:
    """Return the most multiprocessors of a GPU that packing kernels use; 0 stands for all.

    Ranks may have different values.
    """
    text = os.environ.get(PACK_MULTIPROCESSORS, "")
    if not text:
        return 0
    if not (text.isascii() and text.isdigit() and 0 < int(text) < 1 << 31):
        raise ValueError(
            f"{PACK_MULTIPROCESSORS} is {text!r}. Pass a number of multiprocessors, 1 or more, or "
            "unset it to use all."
        )
    return int(text)


def _settings_of_lane(variable: str) -> dict[str, int]:
    text = os.environ.get(variable, "")
    found: dict[str, int] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = (part.strip() for part in item.partition("="))
        number = POLICIES.get(value) if name == "cta_policy" else _number(name, value)
        if number is None or name in found:
            raise ValueError(
                f"{variable} is {text!r}. Pass each of these at most once, such as "
                "'max_ctas=8,cta_policy=efficiency': min_ctas and max_ctas from 1 to 64, "
                "cluster_size from 0 to 8, and cta_policy default, efficiency, zero or auto."
            )
        found[name] = number
    if found.get("min_ctas", 0) > found.get("max_ctas", 64):
        raise ValueError(
            f"{variable} is {text!r}, with a larger min_ctas than max_ctas. Lower min_ctas."
        )
    return found


def _number(name: str, value: str) -> int | None:
    """Return the value; None if there is no such setting or it is out of range."""
    if name not in _RANGES or not (value.isascii() and value.isdigit()):
        return None
    least, most = _RANGES[name]
    return int(value) if least <= int(value) <= most else None
