"""A running cluster takes the work of those that have not started."""

import functools
from typing import Any

import numpy as np
import pytest
import torch

from fa4 import dsl_runtime
from fa4.emulator import DeviceModel, run
from fa4.emulator.errors import Deadlock
from tests.emulator.ptx_kernels import run_body

SCHEDULES = ["round_robin", "random", "adversarial"]


@functools.cache
def take_work() -> Any:
    dsl_runtime.import_dsl("sm_100a")
    from tests.emulator.cluster_work_kernel import compile_take_work

    return compile_take_work()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_first_cta_does_all_the_work_once(schedule: str) -> None:
    owner = torch.zeros(7, dtype=torch.int32)
    (report,) = run(take_work(), owner, device=DeviceModel("sm_100a"), schedule=schedule)
    assert report.launch.grid == (7, 1, 1)
    assert owner.tolist() == [1] * 7


# Two answers in each CTA of a cluster of two, whose rank 0 asks for both CTAs; (x, y, z, valid) of
# each go to out[CTA][answer].
BODY = """
    mov.u32 %r1, %cluster_ctarank;
    setp.eq.u32 %p1, %r60, 0;
    setp.eq.u32 %p2, %r1, 0;
    and.pred %p2, %p2, %p1;
    @%p1 mbarrier.init.shared.b64 [dynamic], 1;
    barrier.cluster.arrive.release.aligned;
    barrier.cluster.wait.acquire.aligned;
    mov.u32 %r2, 0;
again:
    @%p1 mbarrier.arrive.expect_tx.shared.b64 %rd30, [dynamic], 16;
    barrier.cluster.arrive.release.aligned;
    barrier.cluster.wait.acquire.aligned;
    @%p2 clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes{}.b128 \
        [dynamic+16], [dynamic];
waiting:
    mbarrier.try_wait.parity.shared::cta.b64 %p3, [dynamic], %r2;
    @!%p3 bra waiting;
    {{
    .reg .b128 answer;
    ld.shared.b128 answer, [dynamic+16];
    clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 %p4, answer;
    clusterlaunchcontrol.query_cancel.get_first_ctaid.v4.b32.b128 {{%r10, %r11, %r12, _}}, answer;
    }}
    selp.b32 %r13, 1, 0, %p4;
    mov.u32 %r3, %ctaid.x;
    mad.lo.u32 %r3, %r3, 2, %r2;
    mad.wide.u32 %rd50, %r3, 16, %rd0;
    @%p1 st.global.v4.b32 [%rd50], {{%r10, %r11, %r12, %r13}};
    add.u32 %r2, %r2, 1;
    setp.lt.u32 %p5, %r2, 2;
    @%p5 bra again;
    barrier.cluster.arrive.release.aligned;
    barrier.cluster.wait.acquire.aligned;
"""


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_an_answer_for_all_names_the_first_cta_of_the_cluster_that_was_taken(schedule: str) -> None:
    out = np.zeros((4, 2, 4), np.uint32)
    body = BODY.format(".multicast::cluster::all")
    run_body(body, [out], grid=4, cluster=2, schedule=schedule)
    assert out[:2, 0].tolist() == [[2, 0, 0, 1]] * 2  # CTAs 2 and 3 never run
    assert not out[:2, 1].any()
    assert not out[2:].any()


def test_an_answer_for_one_cta_leaves_the_other_waiting() -> None:
    with pytest.raises(Deadlock, match="16 bytes pending"):
        run_body(BODY.format(""), [np.zeros((4, 2, 4), np.uint32)], grid=4, cluster=2)
