"""How many cores there are to use, and how many workers that makes."""

import contextlib
import os
from pathlib import Path

MOST_WORKERS = 4


def default_num_workers(local_processes: int) -> int:
    """Data workers for each of the processes on this machine: a few, and never more than there are cores."""
    return min(MOST_WORKERS, int(usable_cores()) // local_processes)


def usable_cores() -> float:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min([cores, *_cgroup_quotas()])


def _cgroup_quotas(cgroups: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> list[float]:
    """The cores that a container or a job scheduler grants, at every level that sets a limit."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return []  # not Linux
    quotas = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # version 2
            root, files = cgroups, ["cpu.max"]
        elif "cpu" in controllers.split(","):  # version 1
            root, files = cgroups / controllers, ["cpu.cfs_quota_us", "cpu.cfs_period_us"]
        else:
            continue
        group = root / path.lstrip("/")
        # A container may see its own group at the root, under whatever path the host knows it.
        for level in {group, *group.parents, root}:
            with contextlib.suppress(OSError, ValueError):
                quota, period = " ".join((level / file).read_text() for file in files).split()
                if int(quota) > 0:
                    quotas.append(int(quota) / int(period))
    return quotas
