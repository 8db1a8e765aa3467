"""What Horovod was built with; scripts choose by it. Here every answer is no."""

from __future__ import annotations

__all__ = ["ccl_built", "cuda_built", "ddl_built", "gloo_built", "gloo_enabled", "mpi_built"]
__all__ += ["mpi_enabled", "mpi_threads_supported", "nccl_built", "rocm_built"]


def mpi_built(verbose: bool = False) -> bool:  # noqa: ARG001 (Horovod's)
    """Return False: no tensor is reduced by MPI, Gloo, NCCL or another part of Horovod here."""
    return False


mpi_enabled = mpi_threads_supported = mpi_built
gloo_built = gloo_enabled = mpi_built
nccl_built = ddl_built = ccl_built = cuda_built = rocm_built = mpi_built
