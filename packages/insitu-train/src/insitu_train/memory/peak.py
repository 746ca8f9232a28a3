"""Peak memory of a function: CUDA's own account, or every allocation of torch's CPU allocator."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile


def peak_bytes(run: Callable[[], object], device: torch.device) -> int:
    """Most bytes that `run` held beside what was there before."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        torch.cuda.synchronize(device)
        return int(torch.cuda.max_memory_allocated(device)) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        run()
    inner = found.profiler
    if inner is None or inner.kineto_results is None:
        raise RuntimeError("torch's profiler found nothing")
    events, changes = list(inner.kineto_results.experimental_event_tree()), []
    while events:
        event = events.pop()
        events.extend(event.children)
        if event.tag == torch._C._profiler._EventType.Allocation:
            changes.append((event.start_time_ns, event.extra_fields.alloc_size))
    changes.sort(key=lambda change: change[0])
    most: int = max(itertools.accumulate((size for _, size in changes), initial=0))
    return most
