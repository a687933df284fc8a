# SPDX-License-Identifier: Apache-2.0
"""The communication resource: shared, built by agreement, torn down in order."""

from __future__ import annotations

import gc
import glob
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from support.mega_moe import Rank, batch, spec
from support.ranks import run_ranks, values
from xmoe.comm import resource_core
from xmoe.comm.hccl import HcclCommunicator
from xmoe.comm.resource import MegaMoeCommResource
from xmoe.errors import AclError, CommError, ConfigError, XmoeError
from xmoe.kernels.acl.loader import load
from xmoe.kernels.acl.toolkit import find_toolkit
from xmoe.kernels.device import HostDevice
from xmoe.types import FenceMode

pytestmark = [pytest.mark.ep, pytest.mark.timeout(120)]


def _device(rank: int) -> HostDevice:
    return HostDevice(load(find_toolkit("soft")), rank)


def _shared(rank, group):
    with _device(rank) as device:
        first = MegaMoeCommResource.acquire(group, device, spec(8, 2, 8))
        second = MegaMoeCommResource.acquire(group, device, spec(8, 2, 8))
        draft = MegaMoeCommResource.acquire(group, device, spec(8, 2, 8, role="draft"))
        assert first.handle is second.handle and first.shares == 2
        assert draft.handle.group_name != first.handle.group_name
        try:
            MegaMoeCommResource.acquire(group, device, spec(8, 2, 8, fence=FenceMode.HOST))
        except ConfigError as error:
            assert "one spec per" in str(error)
        handle = first.handle
        assert (handle.ep_rank, handle.ep_size, tuple(handle.context.shape)) == (rank, 2, (4100,))
        assert handle.ccl_buffer_bytes == 2 * 14 * 2**20
        first.close()
        first.close()
        assert second.handle is handle and second.shares == 1
        second.close()
        draft.close()
        # A new one after the last share was closed.
        again = MegaMoeCommResource.acquire(group, device, spec(8, 2, 8))
        assert again.handle is not handle
        again.close()
    return True


def test_shares():
    assert values(run_ranks(_shared, 2)) == [True, True]


def _too_small(rank, group):
    with _device(rank) as device:
        try:
            MegaMoeCommResource.acquire(group, device, spec(8, 2, 4096))
        except XmoeError as error:
            text = type(error).__name__, str(error)
        fine = MegaMoeCommResource.acquire(group, device, spec(8, 2, 4096, ccl_buffer_mb=60))
        fine.require_rows(4096)
        with pytest.raises(XmoeError, match="4097 rows|cannot hold"):
            fine.require_rows(4097)
        fine.close()
    return text


def test_window_too_small_is_the_same_everywhere_and_not_remembered():
    outs = values(run_ranks(_too_small, 4))
    assert len(set(outs)) == 1
    name, text = outs[0]
    assert name == "WindowTooSmall" and "HCCL_BUFFSIZE=" in text and "rank 0,1,2,3" in text


def _fails_once(rank, group, where):
    """Rank 1 fails in one step of the first build."""
    calls = []

    def broken(*_args, **_kw):
        calls.append(where)
        raise AclError(where, 7, "HCCL_E_UNAVAIL", "injected")

    with _device(rank) as device:
        home, name = {
            "HcclGetRootInfo": (resource_core, "make_root_info"),
            "HcclGetCommName": (HcclCommunicator, "name"),
            "HcclCreateOpResCtx": (HcclCommunicator, "create_context"),
            "HcclGetRemoteIpcHcclBuf": (HcclCommunicator, "spans"),
        }[where]
        kept = getattr(home, name)
        if rank == (0 if where == "HcclGetRootInfo" else 1):
            setattr(home, name, broken)
        try:
            MegaMoeCommResource.acquire(group, device, spec(8, 2, 8))
            text = "no error"
        except AclError as error:
            text = f"{error.code} {error}"
        setattr(home, name, kept)
        MegaMoeCommResource.acquire(group, device, spec(8, 2, 8)).close()
    return text


@pytest.mark.parametrize(
    "where",
    ["HcclGetRootInfo", "HcclGetCommName", "HcclCreateOpResCtx", "HcclGetRemoteIpcHcclBuf"],
)
def test_one_ranks_failure_is_everybodys_error(where):
    outs = values(run_ranks(_fails_once, 4, where))
    assert len(set(outs)) == 1 and where in outs[0] and "injected" in outs[0]
    assert "failed on rank" in outs[0]


def _unequal(rank, group):
    with _device(rank) as device:
        MegaMoeCommResource.acquire(group, device, spec(8, 2, 8 + rank))


def test_specs_must_agree():
    outs = run_ranks(_unequal, 2, check=False)
    assert {out.error for out in outs} == {"RankDisagreement"}
    assert outs[0].message == outs[1].message


def _closed(rank, group):
    me = Rank(rank, group)
    me.run(batch(1, 8, 2, seed=0))
    queue = me.executor.stream
    core = me.resource._core
    core._closing = True
    with pytest.raises(CommError, match="closing"):
        me.resource.launch(queue, lambda stream: None)
    core._closing = False
    core.failed = AclError("kernel", 507035, "X", "broken")
    with pytest.raises(CommError, match="failed before.*broken"):
        me.resource.launch(queue, lambda stream: None)
    core.failed = None
    me.close()


def test_launches_are_refused_while_closing_and_after_a_failure():
    run_ranks(_closed, 2)


def _many(rank, group):
    """Groups closed normally leave nothing: no communicator, no memory, no mapping."""

    def maps() -> int:
        with open("/proc/self/maps", encoding="ascii") as file:
            return sum("xmoetest" in line or "xsd" in line for line in file)

    with _device(rank) as device:
        before = None
        for _ in range(5):
            MegaMoeCommResource.acquire(group, device, spec(8, 2, 8)).close()
            gc.collect()
            before = maps() if before is None else before
        assert maps() == before
    assert not glob.glob(f"/dev/shm/*{os.environ['XSD_SHM_PREFIX']}*")
    return True


def test_no_leak_over_many_resources():
    assert values(run_ranks(_many, 2)) == [True, True]


def _forgotten(rank, group):
    """Interpreter exit closes what nobody closed, with a warning, without hanging."""
    me = Rank(rank, group)
    me.run(batch(1, 8, 2, seed=0))
    from xmoe.comm.resource import _close_leftovers

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _close_leftovers()
        _close_leftovers()
    return [str(w.message) for w in caught if "was not closed" in str(w.message)]


def test_exit_handler():
    for said in values(run_ranks(_forgotten, 2)):
        assert len(said) == 1 and "mega_moe:main:8" in said[0]


_SCRIPT = """
import datetime, os, sys
import torch.distributed as dist
from support.mega_moe import Rank, batch
rank = int(sys.argv[1])
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[2], 2), rank=rank, world_size=2,
                        timeout=datetime.timedelta(seconds=20))
me = Rank(rank, dist.group.WORLD)
me.submit(batch(2, 8, 2, seed=rank))
"""


def test_the_interpreter_ends_without_close(tmp_path):
    """A program that forgets everything still ends, soon and with status 0."""
    tests = Path(__file__).resolve().parent.parent
    env = {
        **os.environ,
        "PYTHONPATH": f"{tests}:{tests.parent}",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-W", "always::ResourceWarning", "-P", "-c", _SCRIPT]
    running = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "store")],
            env=env,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for process in running:
        try:
            said = process.communicate(timeout=60)[1]
        finally:
            process.kill()
        assert process.returncode == 0, said
        assert "communication resource mega_moe:main:8 was not closed" in said
