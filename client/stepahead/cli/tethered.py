"""Runs a command that ends with its parent: tethered.py PARENT_PID COMMAND [ARGUMENT...].

A parent that is killed cannot stop its children, and they live in sessions of their own. Linux sends them SIGTERM
then, if they have asked for it; the request outlives exec. Elsewhere the command simply runs. This file is started
as a script, without site packages, and so imports nothing of ours.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main() -> None:
    """Becomes the command."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
        if os.getppid() != parent:  # it ended before we asked
            sys.exit(1)
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
