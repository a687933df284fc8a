# SPDX-License-Identifier: Apache-2.0
"""Two resources never share a communicator: a window and its fence belong together."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from xmoe.comm import resource_core


class _Communicator:
    def __init__(self, *arguments: Any) -> None:
        self.kind = "own"

    @classmethod
    def named(cls, *arguments: Any) -> _Communicator:
        made = cls()
        made.kind = "borrowed"
        return made

    def verify(self) -> None:
        return None

    def name(self) -> str:
        return self.kind


@pytest.mark.parametrize(("borrow", "kind"), [(True, "borrowed"), (False, "own")])
def test_only_a_borrowing_resource_takes_the_groups_communicator(
    monkeypatch: pytest.MonkeyPatch, borrow: bool, kind: str
) -> None:
    monkeypatch.setattr(resource_core, "HcclCommunicator", _Communicator)
    monkeypatch.setattr(resource_core, "hccl_name", lambda group, rank: "group_name_0")
    core: Any = resource_core.ResourceCore.__new__(resource_core.ResourceCore)
    core._size, core._rank, core._borrow = 2, 0, borrow
    core.spec = SimpleNamespace(ccl_buffer_mb=None)
    made: Any = SimpleNamespace(runtime=None, comm=None, name="")
    core._join(made, None, b"")
    assert made.name == kind
