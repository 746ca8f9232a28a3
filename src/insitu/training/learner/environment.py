"""The environment of processes that compute with torch, so that their bits follow the configuration.

`torch.set_num_threads` sets OpenMP, and MKL only for the calling thread. Inside a parallel kernel (the
backward pass of attention) OpenMP's own threads call MKL too; they use OpenMP's number unless a variable
overrides it. Ranks inherit the learner's environment.
"""

from __future__ import annotations

from collections.abc import Mapping

DROPPED = frozenset(
    (
        # number of threads: another split, other rounding
        *("OMP_NUM_THREADS", "OMP_THREAD_LIMIT", "OMP_DYNAMIC", "OMP_NESTED", "OMP_MAX_ACTIVE_LEVELS"),
        *("OMP_SCHEDULE", "MKL_NUM_THREADS", "MKL_DOMAIN_NUM_THREADS", "MKL_DYNAMIC", "MKL_NUM_STRIPES"),
        *("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "BLIS_NUM_THREADS"),
        # choice of kernels: other instructions, order of sums or dtype
        *("ATEN_CPU_CAPABILITY", "MKL_CBWR", "MKL_DEBUG_CPU_TYPE", "MKL_DISABLE_FAST_MM"),
        *("MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "OPENBLAS_CORETYPE"),
        *("ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE", "BLIS_ARCH_TYPE"),
        *("TORCH_LINEAR_FLATTEN_3D", "TORCH_MKLDNN_MATMUL_MIN_DIM", "TORCH_MKLDNN_MATMUL_MIN_SIZE"),
    )
)
"""Variables that change a run's bits but are not in its configuration: a resumed or replayed run would
differ. Variables that only place or wake threads stay."""


ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"


def computing(environment: Mapping[str, str], *, shares_tensors: bool = False) -> dict[str, str]:
    """Return `environment` without `DROPPED`, and with defaults for torch.

    Threads sleep between parallel regions: on a busy machine spinning costs many times the work. GPU memory
    is in expandable segments, since passes differ in length; not where another process maps tensors
    (`shares_tensors`), which such segments prevent.
    """
    kept = {name: value for name, value in environment.items() if name not in DROPPED}
    growing = {} if shares_tensors else {ALLOCATOR: "expandable_segments:True"}
    return {"OMP_WAIT_POLICY": "PASSIVE", **growing, **kept}
