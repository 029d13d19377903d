"""Starting the processes that were asked for."""

import os
import sys


def honour_requested_processes() -> None:
    """Become the number of processes that `accelerate launch --cpu --num_processes N` was asked for.

    accelerate starts one process there, whatever N is, unless MPI starts the others; the run would silently have
    another batch. torchrun starts them all.
    """
    if os.environ.get("ACCELERATE_USE_CPU") != "True" or "LOCAL_RANK" in os.environ or _under_mpi():
        return
    processes = _number_in_command(_parent_command())
    if processes > 1:
        print(f"accelerate launch --cpu starts one process; torchrun starts the {processes} asked for", file=sys.stderr)
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
        os.execv(sys.executable, [sys.executable, *launcher, *sys.argv])


def _under_mpi() -> bool:
    return any(name.startswith(("OMPI_COMM_WORLD", "PMI_", "MV2_COMM_WORLD")) for name in os.environ)


def _parent_command() -> list[str]:
    import psutil

    try:
        return psutil.Process().parent().cmdline()
    except (psutil.Error, AttributeError):
        return []


def _number_in_command(command: list[str]) -> int:
    """The value of accelerate's --num_processes, which comes before the script and its own flags."""
    script = command.index(sys.argv[0]) if sys.argv[0] in command else len(command)
    for position, argument in enumerate(command[:script]):
        flag, separator, value = argument.partition("=")
        if flag.replace("-", "_") == "__num_processes":
            value = value if separator else command[position + 1]
            return int(value) if value.isdigit() else 1
    return 1
