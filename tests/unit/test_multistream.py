# SPDX-License-Identifier: Apache-2.0
"""The multistream settings: strict, single-stream by default, refused with every reason."""

from __future__ import annotations

import dataclasses
import json

import pytest

from xmoe.errors import ConfigError
from xmoe.multistream import (
    LEGACY_KEYS,
    HostFence,
    MultistreamConfig,
    PipelineShape,
    RecvGate,
    StreamMode,
    refuse_legacy,
)
from xmoe.pipeline.adapters import camp2p

P2P = camp2p.capabilities(peer_abort=True)
ASYNC = dataclasses.replace(
    P2P,
    connector="CAMAsync",
    recv_send_same_channel_exclusive=False,
    recv_blocks_cores=True,
    host_metadata=True,
    ready_probe=True,
)
TWO = PipelineShape(2, 1, 4, stages=2, channels=("a", "b"), vector_cores=48)
ONE = PipelineShape(3, 1, 4, attention_groups=3, slot_bytes=1000, vector_cores=48)
GATED = {"mode": "overlap", "recv_gate": "ready_probe", "memory_budget_bytes": 2000}


def test_the_default_is_a_single_stream():
    config = MultistreamConfig.from_mapping(None)
    assert config == MultistreamConfig() == MultistreamConfig.from_mapping({})
    assert config.mode is StreamMode.OFF and config.max_inflight == 1
    assert config.fence is HostFence.STEP and config.roles == {"ffn"} and not config.trace
    for capabilities, shape in ((P2P, TWO), (ASYNC, ONE)):
        config.validate(capabilities, shape)
        MultistreamConfig(mode=StreamMode.SERIAL).validate(capabilities, shape)


@pytest.mark.parametrize("key", LEGACY_KEYS)
def test_switches_of_earlier_connectors_name_the_new_one(key):
    for read in (MultistreamConfig.from_mapping, refuse_legacy):
        with pytest.raises(ConfigError, match=f"{key}.*earlier connectors.*mode"):
            read({key: True})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"max_inflght": 2}, "nearest: max_inflight"),
        ({"mode": "on"}, "off, serial, overlap"),
        ({"mode": True}, "multistream.mode=True"),
        ({"max_inflight": 5}, "1 to 4"),
        ({"max_inflight": True}, "whole number"),
        ({"trace": "yes"}, "true, false"),
        ({"roles": []}, "ffn, attention"),
        ({"roles": ["attn"]}, "ffn, attention"),
        ({"shutdown_timeout_s": 0}, "above 0"),
        (
            {"mode": "overlap", "event_ring": 8},
            "'event_ring' does not exist any more.*next: remove it",
        ),
        ({"fence": "device"}, "none, step, item"),
        (["overlap"], "an object"),
        ("overlap", "an object"),
    ],
)
def test_wrong_settings_are_refused(given, said):
    with pytest.raises(ConfigError, match=said):
        MultistreamConfig.from_mapping(given)


def test_settings_survive_json_and_have_a_digest():
    given = {**GATED, "roles": ["attention", "ffn"], "max_inflight": 2, "wait_timeout_s": "7.5"}
    config = MultistreamConfig.from_mapping(given)
    again = MultistreamConfig.from_mapping(json.loads(json.dumps(config.to_mapping())))
    assert again == config and again.digest(ONE) == config.digest(ONE)
    assert config.digest(TWO) != config.digest(ONE)
    other = dataclasses.replace(config, max_inflight=3)
    assert other.digest(ONE) != config.digest(ONE)
    assert hash(config) == hash(again)


def test_slots_count_in_overlap_mode_only():
    assert MultistreamConfig(mode=StreamMode.SERIAL, max_inflight=4).max_inflight == 1
    config = MultistreamConfig(mode=StreamMode.OVERLAP)
    assert config.max_inflight == 2
    assert config.mode_of("ffn") is StreamMode.OVERLAP
    assert config.mode_of("attention") is StreamMode.SERIAL


def settings(**kw):
    return MultistreamConfig.from_mapping({"mode": "overlap", **kw})


@pytest.mark.parametrize(
    ("config", "capabilities", "shape", "reason"),
    [
        (settings(), P2P, dataclasses.replace(TWO, stages=1), "overlap with one stage"),
        (settings(), P2P, dataclasses.replace(TWO, stages=3), "stages=3"),
        (settings(), P2P, dataclasses.replace(TWO, channels=("a", "a")), "distinct groups"),
        (settings(), P2P, dataclasses.replace(TWO, channels=("a", "")), "distinct groups"),
        (settings(recv_cores=8, send_cores=4), P2P, TWO, "must be equal"),
        (settings(recv_gate="ready_probe"), P2P, TWO, 'use "none"'),
        (settings(), P2P, dataclasses.replace(TWO, graph=True), "eager only"),
        (settings(), P2P, dataclasses.replace(TWO, context_parallel=True), "never tried"),
        (settings(), P2P, dataclasses.replace(TWO, split="token"), "tp_size of 2"),
        (settings(), P2P, dataclasses.replace(TWO, split="both"), "request, token"),
        (settings(), dataclasses.replace(P2P, honours_current_stream=False), TWO, "caller's"),
        (settings(roles=["attention"]), dataclasses.replace(P2P, roles=frozenset({"ffn"})), TWO,
         "the adapter has"),
        (settings(max_inflight=1), ASYNC, ONE, "starves compute"),
        (settings(**{**GATED, "recv_gate": "ready_probe"}),
         dataclasses.replace(ASYNC, ready_probe=False), ONE, "no readiness probe"),
        (settings(**{**GATED, "recv_gate": "core_partition"}), ASYNC, ONE, "needs recv_cores"),
        (settings(**{**GATED, "recv_gate": "core_partition", "recv_cores": 24, "compute_cores": 24,
                     "send_cores": 8}), ASYNC, ONE, "56 of 48 cores"),
        (settings(**{**GATED, "recv_gate": "core_partition"}),
         dataclasses.replace(ASYNC, core_limits=False), ONE, "do not keep to core limits"),
        (settings(recv_gate="ready_probe"), ASYNC, ONE, "2000 bytes of buffers"),
        (settings(**{**GATED, "memory_budget_bytes": 1999}), ASYNC, ONE, "2 slots need 2000"),
        (settings(**GATED, metadata_read="device"), ASYNC, ONE, "readable here: blocking"),
        (settings(**GATED, roles=["ffn", "attention"]), ASYNC, ONE, "nothing to overlap with"),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_refused_with_its_reason(config, capabilities, shape, reason):
    found = config.problems(capabilities, shape)
    assert any(reason in text for text in found), found
    with pytest.raises(ConfigError, match="multistream settings are not supported with CAM"):
        config.validate(capabilities, shape)


@pytest.mark.parametrize("mode", list(StreamMode))
@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"stages": 7}, "stages=7"),
        ({"split": "bogus"}, "split='bogus'"),
        ({"graph": True}, "eager only"),
        ({"context_parallel": True}, "never tried"),
    ],
)
def test_the_deployment_is_checked_in_every_mode(mode, wrong, reason):
    with pytest.raises(ConfigError, match=reason):
        MultistreamConfig(mode=mode).validate(P2P, dataclasses.replace(TWO, **wrong))


def test_all_reasons_are_given_at_once():
    shape = dataclasses.replace(ONE, graph=True, context_parallel=True)
    assert len(settings(metadata_read="device").problems(ASYNC, shape)) >= 5


def test_what_is_supported_is_accepted():
    settings(max_inflight=4).validate(P2P, TWO)
    settings(roles=["ffn", "attention"]).validate(P2P, TWO)
    config = MultistreamConfig.from_mapping(GATED)
    config.validate(ASYNC, ONE)
    config.validate(ASYNC, dataclasses.replace(ONE, dynamic_quant=True, tp_size=2))
    both = settings(**GATED, roles=["ffn", "attention"])
    both.validate(ASYNC, dataclasses.replace(ONE, stages=2))
    partition = {"recv_cores": 24, "compute_cores": 16, "send_cores": 8}
    settings(**{**GATED, "recv_gate": "core_partition", **partition}).validate(ASYNC, ONE)
    assert RecvGate(config.recv_gate) is RecvGate.READY_PROBE
