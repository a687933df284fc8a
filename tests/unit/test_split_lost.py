# SPDX-License-Identifier: Apache-2.0
"""The split path: what a failure of device work is called when a peer is gone."""

from __future__ import annotations

import pytest
import torch

from xmoe.comm import agree, transport
from xmoe.config import XmoeConfig
from xmoe.errors import AclError, ConfigError, FenceTimeout, PeerLost
from xmoe.runner import MoeRunner
from xmoe.types import ExpertWeights, MoeShape

SHAPE = MoeShape(hidden=8, intermediate=4, num_experts=2, topk=1)
FAILURES = (
    FenceTimeout("not finished"),
    AclError("aclrtSynchronizeEventWithTimeout", 507035, "X", ""),
    RuntimeError("torch_npu's own"),
)


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("lost", [(1,), ()])
def test_a_layer_call_names_the_lost_peer(
    monkeypatch: pytest.MonkeyPatch, failure: Exception, lost: tuple[int, ...]
) -> None:
    def dispatch(*_: object) -> None:
        raise failure

    monkeypatch.setattr(transport.CollectiveTransport, "dispatch", dispatch)
    monkeypatch.setattr(agree, "_LINGER_S", 0.0)
    config = XmoeConfig.from_mapping({"mode": "off"})
    weights = ExpertWeights(torch.zeros(2, 8, 8), torch.zeros(2, 4, 8))
    with MoeRunner.create(SHAPE, config) as runner:
        layer = runner.layer(weights, 0)
        for module in (agree, transport):
            monkeypatch.setattr(module, "lost_ranks", lambda group: lost)
        ids = torch.zeros(1, 1, dtype=torch.int64)
        with pytest.raises(PeerLost if lost else type(failure)) as caught:
            layer(torch.zeros(1, 8), ids, torch.ones(1, 1))
        assert ("peer 1 lost" in str(caught.value)) == bool(lost)
        assert str(failure) in str(caught.value)


def test_what_the_caller_did_wrong_stays_his(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "lost_ranks", lambda group: (1,))
    error = ConfigError("a wrong batch")
    assert transport.CollectiveTransport(None, 2).translate(error) is error
