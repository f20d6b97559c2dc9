"""What all tests share: where GPU tests run, and how many threads a test worker takes.

Compiled kernels are shared through the user's own cache folder (FA4_CACHE_DIR or its default), so
that a kernel is compiled once for all workers and all runs. A test that needs an empty cache sets
FA4_CACHE_DIR itself.
"""

import os
from collections import Counter

import pytest
import torch

NO_GPU = "no CUDA device of compute capability 9.0"


def pytest_configure(config: pytest.Config) -> None:
    # Each xdist worker would otherwise start as many threads as there are cores.
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // workers))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0):
        return
    skip = pytest.mark.skip(reason=NO_GPU)
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(skip)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """One line for each reason why tests were skipped: hundreds may share one."""
    reasons: Counter[str] = Counter()
    for report in terminalreporter.stats.get("skipped", []):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        reasons[reason.removeprefix("Skipped: ")] += 1
    if reasons:
        terminalreporter.section("skipped tests")
        for reason, count in reasons.most_common():
            terminalreporter.line(f"{count:5}  {reason}")
