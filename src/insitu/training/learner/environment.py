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


ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"


def computing(environment: Mapping[str, str], *, shares_tensors: bool = False) -> dict[str, str]:
    """`environment` without what would lead torch, and unless it says otherwise with

    - threads that sleep between parallel regions instead of spinning: on a busy machine, where agents share
      the cores, spinning costs many times the work itself;
    - GPU memory in segments that grow: passes differ in length, and what is cut for one would not fit the
      next. Not where another process maps tensors (`shares_tensors`), which such segments hinder."""
    kept = {name: value for name, value in environment.items() if name not in DROPPED}
    growing = {} if shares_tensors else {ALLOCATOR: "expandable_segments:True"}
    return {"OMP_WAIT_POLICY": "PASSIVE", **growing, **kept}
