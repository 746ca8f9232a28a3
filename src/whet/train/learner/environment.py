"""The environment of processes that compute with torch on the CPU: their bits follow the configuration.

`torch.set_num_threads` tells OpenMP, and of MKL the thread that calls it. Inside a parallel kernel (the
backward pass of attention) OpenMP's own threads call MKL too. They take OpenMP's number, which is the one
configured, unless a variable names another. Called by process.py and the demo's warm start; a learner's peers
inherit its own.
"""

from __future__ import annotations

from collections.abc import Mapping

DROPPED = frozenset(
    (
        # how many threads share a product or a sum: other parts, other rounding
        *("OMP_NUM_THREADS", "OMP_THREAD_LIMIT", "OMP_DYNAMIC", "OMP_NESTED", "OMP_MAX_ACTIVE_LEVELS"),
        *("OMP_SCHEDULE", "MKL_NUM_THREADS", "MKL_DOMAIN_NUM_THREADS", "MKL_DYNAMIC", "MKL_NUM_STRIPES"),
        *("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "BLIS_NUM_THREADS"),
        # which kernels run: other instructions, another order of sums, or a narrower type inside
        *("ATEN_CPU_CAPABILITY", "MKL_CBWR", "MKL_DEBUG_CPU_TYPE", "MKL_DISABLE_FAST_MM"),
        *("MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "OPENBLAS_CORETYPE"),
        *("ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE", "BLIS_ARCH_TYPE"),
        *("TORCH_LINEAR_FLATTEN_3D", "TORCH_MKLDNN_MATMUL_MIN_DIM", "TORCH_MKLDNN_MATMUL_MIN_SIZE"),
    )
)
"""Variables that change the bits of a run and of which its configuration says nothing: a run resumed or
replayed from another shell would be another one. Those that only place or wake threads stay."""


def computing(environment: Mapping[str, str]) -> dict[str, str]:
    """`environment` without what would lead torch, and with threads that sleep between parallel regions
    instead of spinning, unless it says otherwise: on a busy machine, where agents share the cores, spinning
    costs many times the work itself."""
    kept = {name: value for name, value in environment.items() if name not in DROPPED}
    return {"OMP_WAIT_POLICY": "PASSIVE", **kept}
