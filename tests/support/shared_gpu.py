"""The environment in which several ranks share one GPU.

It imports nothing, so that tools/gpu_environment.py can try it without fsdp_ext.
"""

from __future__ import annotations


def variables(rank: int, nccl: tuple[int, ...], interface: str, log: str) -> dict[str, str]:
    """Return the variables with which NCCL lets a rank share its GPU. Set them before NCCL is used.

    NCCL refuses two ranks on a GPU of one host, so each rank names a host of its own, and they talk
    over sockets. From 2.30.3 on it can be told to allow it. This serves functional tests alone: it
    says nothing about speed.

    Args:
        rank: this process's rank among the ranks that share the GPU.
        nccl: the version of NCCL.
        interface: the network interface that ranks communicate over, usually "lo".
        log: a file for NCCL's log, from which tests assert the transport.
    """
    if nccl >= (2, 30, 3):
        return {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "2"}
    return {
        "NCCL_HOSTID": f"rank{rank}",
        "NCCL_NET": "Socket",
        "NCCL_IB_DISABLE": "1",
        "NCCL_SOCKET_IFNAME": interface,
        "NCCL_MNNVL_ENABLE": "0",
        "NCCL_NVLS_ENABLE": "0",
        "NCCL_MAX_CTAS": "2",
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_SUBSYS": "INIT,GRAPH,NET",
        "NCCL_DEBUG_FILE": log,
    }
