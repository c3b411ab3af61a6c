"""What this process and its GPUs use, sampled cheaply. NVML is asked when it is there."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any

import psutil

from strata.rpc import coordinator_pb2 as pb

SAMPLE_EVERY_S = 1.0


class ResourceSampler:
    """Samples at most once a second, however often it is asked."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._process.cpu_percent(None)  # The first reading has nothing to compare with.
        self._sampled_mono_s = 0.0
        self._sample = pb.ResourceUsage()
        self._gpus = _nvml_handles()

    def sample(self) -> pb.ResourceUsage:
        now_s = time.monotonic()
        if now_s - self._sampled_mono_s >= SAMPLE_EVERY_S:
            self._sampled_mono_s = now_s
            self._sample = self._read()
        return self._sample

    def _read(self) -> pb.ResourceUsage:
        process = self._process
        usage = pb.ResourceUsage()
        try:
            with process.oneshot():
                usage.cpu_percent = process.cpu_percent(None)
                usage.memory_used_bytes = process.memory_info().rss
            disk = process.io_counters()
            usage.disk_read_bytes, usage.disk_write_bytes = disk.read_bytes, disk.write_bytes
        except (psutil.Error, AttributeError, OSError):
            pass  # Some systems keep these from us; the rest is still worth having.
        network = psutil.net_io_counters()
        if network is not None:
            usage.network_rx_bytes, usage.network_tx_bytes = network.bytes_recv, network.bytes_sent
        for index, handle in enumerate(self._gpus):
            _read_gpu(usage, index, handle)
        return usage


def gpu_count() -> int:
    return len(_nvml_handles())


def _nvml_handles() -> list[Any]:
    try:
        import pynvml

        pynvml.nvmlInit()
        return [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
    except Exception:  # No package, no driver, no device: all mean that there is nothing to sample.
        return []


def _read_gpu(usage: pb.ResourceUsage, index: int, handle: Any) -> None:
    import pynvml

    try:
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        utilization = float(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu)
    except pynvml.NVMLError:
        return
    power_watts = temperature_celsius = 0.0
    with suppress(pynvml.NVMLError):  # Not every device measures these.
        power_watts = pynvml.nvmlDeviceGetPowerUsage(handle) / 1000
        temperature_celsius = float(pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU))
    usage.gpu_usage.add(
        index=index,
        utilization_percent=utilization,
        memory_used_bytes=int(memory.used),
        memory_total_bytes=int(memory.total),
        power_watts=power_watts,
        temperature_celsius=temperature_celsius,
    )
