"""Makes a tokenizer bundle in a process of its own: `python -m stepahead.worker.model.bundle_process MODEL FD`.

`transformers` leaves some 90 MiB in the process that imports it, and a worker needs it for this once. The bundle,
or why there is none, comes through the pipe that FD is. It ends with the worker, however that ends.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import threading
from contextlib import closing

from stepahead.worker.errors import ModelError
from stepahead.worker.model.checkpoint import Checkpoint, open_checkpoint

_REFUSED = 3
_UNWANTED = 1


def make_bundle(checkpoint: Checkpoint) -> bytes:
    """Returns the tokenizer bundle of an open checkpoint, empty where the model has no tokenizer.

    Raises:
        ModelError: the tokenizer cannot be loaded, or the process failed; its stderr is this one's.
    """
    if not checkpoint.has_tokenizer:
        return b""
    read_fd, write_fd = os.pipe()
    with open(read_fd, "rb") as answer:
        argv = [sys.executable, "-m", "stepahead.worker.model.bundle_process", str(checkpoint.path), str(write_fd)]
        try:
            process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, pass_fds=(write_fd,))
        finally:
            os.close(write_fd)  # the child's copy alone keeps the pipe open
        told, return_code = answer.read(), process.wait()
    if return_code == _REFUSED:
        raise ModelError(told.decode())
    if return_code:
        raise ModelError(f"the process that reads the tokenizer of {checkpoint.path} ended with {return_code}")
    return told


def main(model: str, fd: int) -> int:
    """Writes the bundle of a model, or why there is none; returns the exit code."""
    threading.Thread(target=_end_with_reader, args=(fd,), name="stepahead-lifeline", daemon=True).start()
    with open(fd, "wb") as answer:
        try:
            with closing(open_checkpoint(model)) as checkpoint:
                answer.write(checkpoint.tokenizer_bundle())
        except ModelError as error:
            answer.write(str(error).encode())
            return _REFUSED
    return 0


def _end_with_reader(fd: int) -> None:
    """Ends this process at once when nobody reads the pipe any more. A thread of its own waits."""
    reader = select.poll()
    reader.register(fd, 0)  # errors are always told, and a pipe without a reader is one
    if reader.poll():
        os._exit(_UNWANTED)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
