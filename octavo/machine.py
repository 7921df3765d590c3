"""What this machine, or the container on it, still has for this process: cores and memory."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import time
from pathlib import Path

SIOCGIFADDR = 0x8915  # Linux: an interface's IPv4 address


def available_cores() -> int:
    """Cores this process may use: its affinity mask, limited by the cgroup's quota (v2 or v1)."""
    cores = len(os.sched_getaffinity(0))
    quota = _cgroup_quota()
    return max(1, min(cores, int(quota + 0.5) or 1)) if quota else cores


def _cgroup_quota() -> float | None:
    try:
        limit, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return None if limit == "max" else int(limit) / int(period)
    except (OSError, ValueError):
        pass
    try:
        base = Path("/sys/fs/cgroup/cpu")
        limit_us = int((base / "cpu.cfs_quota_us").read_text())
        period_us = int((base / "cpu.cfs_period_us").read_text())
        return limit_us / period_us if limit_us > 0 else None
    except (OSError, ValueError):
        return None


def available_memory() -> int:
    """Bytes that can still be taken: MemAvailable, limited by the cgroup's memory limit."""
    info = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(info["MemAvailable"].split()[0]) * 1024
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        if limit != "max":
            used = int(Path("/sys/fs/cgroup/memory.current").read_text())
            free = min(free, max(0, int(limit) - used))
    except (OSError, ValueError):
        pass
    return free


def interface_to(address: str) -> str | None:
    """The network interface by which ``address`` is reached from here, or that has it. None where
    that cannot be told (it has no route, or is no IPv4 address)."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))  # sends nothing
            own = probe.getsockname()[0]
            for _, name in socket.if_nameindex():
                if _address_of(probe, name) == own:
                    return name
    except OSError:
        pass
    return None


def _address_of(probe: socket.socket, interface: str) -> str | None:
    """IPv4, or None where the interface has none."""
    request = struct.pack("256s", interface.encode()[:15])
    try:
        found = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, request)
    except OSError:
        return None
    return socket.inet_ntoa(found[20:24])


def process_age() -> float:
    """Seconds since this process was started: interpreter start and imports included."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    started = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started
