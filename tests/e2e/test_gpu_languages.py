"""Which programs see the machine's GPUs. On machines without one, another device takes its place."""

from __future__ import annotations

import glob
import os
from pathlib import Path

import pytest

from toolyard.errors import ToolchainMissingError
from toolyard.sandbox import local
from toolyard.sandbox.host.jail import gpu_devices
from toolyard.sandbox.local import LocalSandbox
from toolyard.sandbox.protocol import Limits, Program

HAS_GPU = bool(glob.glob("/dev/nvidia[0-9]*"))
LOOK = """
import errno, os
try:
    os.close(os.open("/dev/tty", os.O_RDWR))
except OSError as error:
    print(errno.errorcode[error.errno])
"""
KERNEL = r"""
#include <cstdio>
__global__ void add(int *a, int b) { *a += b; }
int main() {
    int a = 20, *on_device;
    if (cudaMalloc(&on_device, sizeof a) != cudaSuccess) return 1;
    cudaMemcpy(on_device, &a, sizeof a, cudaMemcpyHostToDevice);
    add<<<1, 1>>>(on_device, 22);
    cudaMemcpy(&a, on_device, sizeof a, cudaMemcpyDeviceToHost);
    std::printf("%d\n", a);
    return cudaGetLastError() != cudaSuccess;
}
"""


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed driver, or what passes for one. /dev/tty is no GPU: opening it fails, but not for want of it."""
    if not HAS_GPU:
        (tmp_path / "nvidia-smi").write_text("#!/bin/sh\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
        monkeypatch.setenv("PATH", f"{os.environ['PATH']}:{tmp_path}")
    monkeypatch.setattr(local, "gpu_devices", lambda: [*gpu_devices(), "/dev/tty"])


@pytest.mark.usefixtures("driver")
async def test_without_gpu_programs_for_one_are_refused_with_the_way_to_allow_them() -> None:
    async with LocalSandbox(workers=1) as sandbox:
        with pytest.raises(ToolchainMissingError, match=r"does not give programs a GPU.*gpu=True.*--gpu"):
            await sandbox.run(Program(LOOK, "python_gpu"))


@pytest.mark.kernel("full")
@pytest.mark.usefixtures("driver")
async def test_devices_are_shown_to_programs_for_a_gpu_and_to_no_others() -> None:
    async with LocalSandbox(workers=1, gpu=True) as sandbox:
        assert (await sandbox.run(Program(LOOK, "python"))).stdout == "ENOENT\n"
        assert (await sandbox.run(Program(LOOK, "python_gpu"))).stdout == "ENXIO\n"
        assert (await sandbox.run(Program("[ -e /dev/tty ]", "bash"))).exit_code == 1
        each = [one.stdout async for one in sandbox.run_each(Program(LOOK, "python_gpu"), ["", ""])]
        assert each == ["ENXIO\n", "ENXIO\n"]


NAME_A_THREAD = """
with open("/proc/thread-self/comm", "w") as file:
    file.write("cuda")
print(open("/proc/self/comm").read(), end="")
"""
WRITE_ELSEWHERE = """
for path in ("/proc/1/comm", "/proc/sys/kernel/hostname", "/proc/sysrq-trigger"):
    try:
        open(path, "w")
        print("opened", path)
    except OSError:
        pass
"""


@pytest.mark.kernel("full")
@pytest.mark.usefixtures("driver")
async def test_programs_for_a_gpu_may_name_their_threads_and_change_nothing_else_in_proc() -> None:
    """CUDA does, with a file in /proc, and takes a refusal for a broken system."""
    async with LocalSandbox(workers=1, gpu=True) as sandbox:
        assert (await sandbox.run(Program(NAME_A_THREAD, "python_gpu"))).stdout == "cuda\n"
        assert "PermissionError" in (await sandbox.run(Program(NAME_A_THREAD, "python"))).stderr
        assert (await sandbox.run(Program(WRITE_ELSEWHERE, "python_gpu"))).stdout == ""


@pytest.mark.usefixtures("driver")
async def test_a_gpu_is_refused_at_level_confined_and_the_rest_runs() -> None:
    async with LocalSandbox(workers=1, gpu=True, isolation="confined") as sandbox:
        with pytest.raises(ToolchainMissingError, match="programs cannot use a GPU at isolation level 'confined'"):
            await sandbox.run(Program(LOOK, "python_gpu"))
        assert (await sandbox.run(Program("print(1)"))).stdout == "1\n"


@pytest.mark.skipif(not HAS_GPU, reason="needs a GPU")
async def test_python_reaches_the_gpu() -> None:
    code = """
import ctypes
driver, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
print(driver.cuInit(0), driver.cuDeviceGetCount(ctypes.byref(count)), count.value > 0)
"""
    async with LocalSandbox(workers=1, gpu=True) as sandbox:
        execution = await sandbox.run(Program(code, "python_gpu"), Limits(run_seconds=60))
    assert execution.stdout == "0 0 True\n", execution


@pytest.mark.skipif(not HAS_GPU, reason="needs a GPU")
@pytest.mark.toolchain("cuda")
async def test_a_kernel_runs_on_the_gpu() -> None:
    async with LocalSandbox(workers=1, gpu=True) as sandbox:
        execution = await sandbox.run(Program(KERNEL, "cuda"), Limits(compile_seconds=60, run_seconds=60))
    assert (execution.stdout, execution.exit_code) == ("42\n", 0), execution
