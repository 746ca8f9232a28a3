"""Gauges of GPUs, with a stand-in of NVIDIA's library: nothing here has met a GPU."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest

from insitu.storage.metrics import Metrics
from insitu.storage.store import Store
from insitu.storage.timeline import TIMELINE, Timeline
from insitu_train.gauges import write_gauges
from insitu_train.gpus import gpu_reader


class NVMLError(Exception):
    """As pynvml raises it."""


@dataclass
class Nvml:
    """The functions of pynvml that are called, for two GPUs."""

    lost: bool = False
    driver: bool = True
    NVMLError: type[Exception] = field(default=NVMLError)

    def nvmlInit(self) -> None:
        if not self.driver:
            raise NVMLError("Driver Not Loaded")

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, number: int) -> int:
        return number

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> SimpleNamespace:
        if self.lost:
            raise NVMLError("GPU is lost")
        return SimpleNamespace(gpu=40 + handle, memory=3)

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(used=(handle + 1) << 30, total=80 << 30, free=1)


def test_use_and_memory_of_each_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    read = gpu_reader()
    assert read() == {
        "gpu0_use": 40,
        "gpu0_memory_bytes": 1 << 30,
        "gpu1_use": 41,
        "gpu1_memory_bytes": 2 << 30,
    }
    nvml.lost = True
    assert read() == {}
    nvml.lost = False
    assert read() == {}


def test_without_the_package_or_a_driver_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert gpu_reader()() == {}
    monkeypatch.setitem(sys.modules, "pynvml", Nvml(driver=False))
    assert gpu_reader()() == {}


class Noted(Timeline):
    """A timeline that keeps the first gauges."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.gauges: asyncio.Future[Metrics] = asyncio.get_running_loop().create_future()

    def write(self, event: str, values: Metrics) -> None:
        if event == "gauges" and not self.gauges.done():
            self.gauges.set_result(values)


async def test_the_timeline_of_a_run_has_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Nvml())
    timeline = Noted(tmp_path / TIMELINE)
    with Store(tmp_path / "run.sqlite") as store:
        async with asyncio.timeout(30), write_gauges(timeline, store, tuple, interval_s=0.001):
            found = await timeline.gauges
    assert (found["gpu1_use"], found["rollouts_running"]) == (41, 0)
