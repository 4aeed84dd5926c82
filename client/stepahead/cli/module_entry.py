"""What `stepahead scheduler` and its like turn into: `python -m stepahead.cli.module_entry MODULE [ARGUMENT...]`.

As `python -m MODULE [ARGUMENT...]`, except that it ends as the `stepahead` script does where the output cannot be
written, or Ctrl-C comes while modules load.
"""

import runpy
import sys

from stepahead.cli.entry import run_quietly


def main() -> None:
    """Runs the module."""
    module = sys.argv.pop(1)
    run_quietly(lambda: runpy.run_module(module, run_name="__main__", alter_sys=True))


if __name__ == "__main__":
    main()
