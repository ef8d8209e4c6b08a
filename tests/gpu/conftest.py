"""The device that the tests of this folder run on, and the report of what they have found (`record_property`)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from zero1_cuda import ops


@pytest.fixture(scope="session")
def device(pytestconfig: pytest.Config) -> str:
    """ "cuda"; or "cpu", where the same code must agree with itself."""
    kind = str(pytestconfig.getoption("--gpu-device"))
    if kind == "cuda":
        if not torch.cuda.is_available():
            pytest.skip("there is no GPU: torch sees no CUDA device")
        assert ops.cuda_error() is None, f"there is a GPU, but no kernels for it: {ops.cuda_error()}"
    return kind


@pytest.fixture(autouse=True)
def _one_thread(device: str) -> Iterator[None]:
    """On the CPU, which is quicker where others work, too; the results do not depend on it."""
    threads = torch.get_num_threads()
    if device == "cpu":
        torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    if device == "cuda":
        torch.cuda.synchronize()  # a fault belongs to the test that made it


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """A line for each test that has ended, before the next one may take the process with it."""
    outcome = yield
    report = outcome.get_result()
    path = item.config.getoption("--gpu-report")
    if path and (report.when == "call" or not report.passed):
        line = {
            "test": item.name,
            "status": {"passed": "pass", "failed": "fail", "skipped": "skip"}[report.outcome],
            "seconds": round(call.duration, 1),
            "details": dict(item.user_properties),
        }
        if report.skipped:
            line["reason"] = report.longrepr[2].removeprefix("Skipped: ")
        elif report.failed:
            line["reason"] = "\n".join(report.longreprtext.splitlines()[-12:])
        with Path(path).open("a") as file:
            file.write(json.dumps(line) + "\n")
