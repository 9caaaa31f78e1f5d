"""Two hosts on one machine: namespaces that a virtual cable with a limited rate connects.

Each host has its own network, host name, boot id, process ids, mounts and IPC. Its cable is a veth
pair, and a token bucket (tc-tbf(8)) limits the sending rate of each end. This needs Linux, root,
and the commands `unshare` and `nsenter` (util-linux) and `ip` and `tc` (iproute2).

Note [hosts]: nothing outside this process keeps a host alive, so nothing can be left behind. The
first process of a host is `cat`, which reads from a pipe of this process. However this process
ends, the pipe closes and `cat` ends. Then the kernel kills all other processes of that PID
namespace. The other namespaces end with their last process, and the cable with its namespace. No
namespace has a name or a file.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import signal
import subprocess
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

INTERFACE = "eth0"  # the end of the cable in each host
UNLIMITED = "unlimited"
RATES = ("1gbit", "4gbit", "10gbit", UNLIMITED)
# The token bucket holds as much as the cable carries in this time, and at least one large packet.
BURST_S = 4e-3
LEAST_BURST = 1 << 16
# The longest time that a packet waits for tokens. Packets that would wait longer are dropped.
QUEUE_MS = 50
COUNT = 2
UP_S = 10.0  # the longest time until a new cable carries packets
_NEEDED_OF_KERNEL = "the token bucket tbf (CONFIG_NET_SCH_TBF)"
NEEDED = ("unshare", "nsenter", "ip", "tc")
_PR_SET_PDEATHSIG = 1
_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_RATE = re.compile(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)")
_NAMESPACES = ("net", "uts", "ipc", "mnt", "pid")  # in the order in which `enter` joins them
_SEPARATE = ["--net", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc"]
_BOOT_ID = "/proc/sys/kernel/random/boot_id"
# The script of a host: $1 is its name, and $2 its boot id or empty. Then it waits for the pipe's
# end.
_FIRST_PROCESS = f"""
set -e
echo "$1" > /proc/sys/kernel/hostname
if [ "$2" ]; then
  mount -t tmpfs tmpfs /mnt
  echo "$2" > /mnt/boot_id
  mount --bind /mnt/boot_id {_BOOT_ID}
  umount --lazy /mnt
fi
echo ready
exec cat > /dev/null
"""


class HostsError(Exception):
    """Hosts cannot be made here. The message says why, and what is needed."""


def bytes_per_second(rate: str) -> float | None:
    """Return the bytes a second of a rate such as "4gbit"; None for "unlimited".

    Raises:
        ValueError: if it is no rate.
    """
    if rate == UNLIMITED:
        return None
    found = _RATE.fullmatch(rate)
    if not found or not float(found[1]):
        raise ValueError(f"a rate is {UNLIMITED!r} or a number with kbit, mbit or gbit, not {rate}")
    return float(found[1]) * _UNITS[found[2]] / 8


def why_not() -> str:
    """Return why hosts cannot be made here, and what is needed; empty if they can."""
    if missing := [name for name in NEEDED if shutil.which(name) is None]:
        return (
            f"several hosts on one machine need the commands {', '.join(missing)}, which are "
            "missing; install util-linux and iproute2 on Linux"
        )
    try:
        with Hosts() as pair:
            pair.run(0, _command_to_add(_bucket(RATES[0])))
            return ""
    except HostsError as error:
        return str(error)


class Hosts:
    """Two hosts and the cable between them. Use it as a context manager.

    Args:
        one_machine: whether both have this machine's boot id, as two of its containers have.
    """

    def __init__(self, one_machine: bool = False) -> None:
        self._one_machine = one_machine
        self.pids: list[int] = []  # of each host's first process, as this process sees it
        self._holders: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Hosts:
        try:
            for host in range(COUNT):
                self._start(host)
            self._connect()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End both hosts, with all processes in them."""
        for holder in self._holders:
            assert holder.stdin is not None
            assert holder.stdout is not None
            holder.stdin.close()
            holder.wait()
            holder.stdout.close()
        self._holders.clear()
        self.pids.clear()

    def _start(self, host: int) -> None:
        boot = "" if self._one_machine else str(uuid.uuid4())
        command = ["unshare", *_SEPARATE, "sh", "-c", _FIRST_PROCESS, "sh", name_of(host), boot]
        holder = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # Ctrl-C is for this process alone
        )
        self._holders.append(holder)
        assert holder.stdout is not None
        answer = holder.stdout.readline().strip()
        if answer != "ready":
            raise HostsError(
                "several hosts on one machine need namespaces, for which this process needs root "
                f"(CAP_SYS_ADMIN and CAP_NET_ADMIN): {answer or 'unshare ended'}"
            )
        self.pids.append(children_of(holder.pid)[0])

    def _connect(self) -> None:
        cable = ["ip", "link", "add", INTERFACE, "type", "veth", "peer", "name", INTERFACE]
        self.run(0, [*cable, "netns", str(self.pids[1])])
        for host in range(COUNT):
            # Without an IPv6 address, both ends are ready at once.
            self.run(host, ["ip", "link", "set", INTERFACE, "addrgenmode", "none"])
            self.run(host, ["ip", "address", "add", f"{address_of(host)}/24", "dev", INTERFACE])
            for interface in ("lo", INTERFACE):
                self.run(host, ["ip", "link", "set", interface, "up"])
        for host in range(COUNT):
            self._wait_until_up(host)

    def _wait_until_up(self, host: int) -> None:
        deadline = time.monotonic() + UP_S
        while "state UP" not in self.run(host, ["ip", "link", "show", INTERFACE]):
            if time.monotonic() > deadline:
                raise HostsError(f"the cable between two hosts did not come up in {UP_S:g} s")

    def run(self, host: int, command: Sequence[str]) -> str:
        """Run a command in a host's network; return its output.

        Raises:
            HostsError: if it fails.
        """
        inside = ["nsenter", "--target", str(self.pids[host]), "--net", *command]
        done = subprocess.run(inside, capture_output=True, text=True, check=False)
        if done.returncode:
            raise HostsError(
                f"the cable between two hosts could not be made: {' '.join(command)}: "
                f"{done.stderr.strip() or 'failed'}; this process needs CAP_NET_ADMIN, and the "
                f"kernel veth and {_NEEDED_OF_KERNEL}"
            )
        return done.stdout

    def command(self, host: int) -> list[str]:
        """Return the beginning of a command that runs on a host, in this directory."""
        target = ["nsenter", "--target", str(self.pids[host])]
        # nsenter would start in the directory of the host's first process.
        return [*target, "--net", "--uts", "--ipc", "--pid", "--mount", f"--wd={os.getcwd()}"]


def name_of(host: int) -> str:
    """Return a host's name."""
    return f"host{host}"


def address_of(host: int) -> str:
    """Return a host's address on the cable. It exists only in the two hosts."""
    return f"10.0.0.{host + 1}"


def children_of(pid: int) -> list[int]:
    """Return the children of a process."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            if int(fields[1]) == pid:
                found.append(int(entry.name))
    return found


# - What runs inside a host


def enter(pid: int) -> None:
    """Move this process, which has one thread, into the host of the first process `pid`.

    A process cannot change its own PID namespace. So this returns in a child, and the process that
    called it ends as the child ends.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    namespaces = [os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY) for name in _NAMESPACES]
    directory = os.getcwd()
    for namespace in namespaces:
        if libc.setns(namespace, 0):
            error = ctypes.get_errno()
            raise HostsError(f"cannot enter the host of process {pid}: {os.strerror(error)}")
        os.close(namespace)
    os.chdir(directory)
    child = os.fork()
    if child:
        _end_like(child)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # end with the process that called


def _end_like(child: int) -> NoReturn:
    signal.signal(signal.SIGUSR1, lambda number, frame: os.kill(child, number))
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status >= 0:
        os._exit(status)
    if -status != signal.SIGKILL:
        signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
    os._exit(1)


def set_rate(rate: str) -> None:
    """Limit the sending rate of this host.

    Raises:
        HostsError: if the kernel has no token bucket.
        ValueError: if it is no rate.
    """
    _shape([] if bytes_per_second(rate) is None else _bucket(rate))


def _bucket(rate: str) -> list[str]:
    burst = max(LEAST_BURST, round((bytes_per_second(rate) or 0) * BURST_S))
    return ["tbf", "rate", rate, "burst", str(burst), "latency", f"{QUEUE_MS}ms"]


def cut_cable() -> None:
    """Take this host's end of the cable down: packets are lost in both directions."""
    subprocess.run(["ip", "link", "set", INTERFACE, "down"], check=True)


def stall_cable() -> None:
    """Drop all packets of this host, with the cable up."""
    # No packet has as few bytes as this bucket.
    _shape(["tbf", "rate", "8bit", "burst", "1", "limit", "1"])


def sent_bytes() -> int:
    """Return how many bytes this host has sent through the cable, by the interface's counter."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == INTERFACE:
            return int(counters.split()[8])
    raise HostsError(f"this process has no interface {INTERFACE}; it is on none of the hosts")


def _shape(discipline: Sequence[str]) -> None:
    """Send this host's packets through a queueing discipline, in place of the previous one."""
    delete = ["tc", "qdisc", "del", "dev", INTERFACE, "root"]
    subprocess.run(delete, capture_output=True, check=False)  # there may be none
    if not discipline:
        return
    command = _command_to_add(discipline)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise HostsError(
            f"the cable's rate could not be set: {' '.join(command)}: {done.stderr.strip()}; the "
            f"kernel needs {_NEEDED_OF_KERNEL}"
        )


def _command_to_add(discipline: Sequence[str]) -> list[str]:
    return ["tc", "qdisc", "add", "dev", INTERFACE, "root", *discipline]
