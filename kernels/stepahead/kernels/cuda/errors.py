"""What can go wrong between a caller and a kernel.

KernelError
    KernelUnavailable    no compiler, no driver or no device here; the message says what is missing
    KernelBuildError     a source does not compile; the message is the compiler's log
    KernelArgumentError  an argument's dtype, shape, layout or device is not what the kernel reads
    KernelFault          a kernel broke a rule while it ran (bounds, races, divergent barriers)
"""

from __future__ import annotations


class KernelError(Exception):
    """Base of everything below."""


class KernelUnavailable(KernelError):
    """Kernels cannot be compiled or run here."""


class KernelBuildError(KernelError):
    """A source does not compile."""


class KernelArgumentError(KernelError):
    """An argument is not what the kernel reads; raw pointers would read something else."""


class KernelFault(KernelError):
    """A kernel broke a rule while it ran."""
