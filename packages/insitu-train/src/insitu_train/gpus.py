"""Use and memory of this machine's NVIDIA GPUs, by the package nvidia-ml-py where it is installed."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Mapping
from typing import Any

log = logging.getLogger(__name__)

Reader = Callable[[], Mapping[str, int]]


def gpu_reader() -> Reader:
    """Return a function that reads `gpuN_use` (percent) and `gpuN_memory_bytes` of each GPU.

    It reads nothing without the package, without a driver, and after the first failure.
    """
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        return dict
    try:
        nvml.nvmlInit()
        handles = [nvml.nvmlDeviceGetHandleByIndex(n) for n in range(nvml.nvmlDeviceGetCount())]
    except nvml.NVMLError as error:
        log.info("no gauges of GPUs error=%s", error)
        return dict

    def read() -> Mapping[str, int]:
        found: dict[str, int] = {}
        try:
            for number, handle in enumerate(handles):
                found[f"gpu{number}_use"] = int(nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
                found[f"gpu{number}_memory_bytes"] = int(nvml.nvmlDeviceGetMemoryInfo(handle).used)
        except nvml.NVMLError as error:
            log.warning("no more gauges of GPUs error=%s", error)
            handles.clear()
        return found

    return read
