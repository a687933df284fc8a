# SPDX-License-Identifier: Apache-2.0
"""Small host collectives by which the ranks of a group agree, and notice that a rank is gone.

Every function is COLLECTIVE over `group`: each rank calls it, in the same order. `group` is a
torch.distributed ProcessGroup that accepts CPU tensors, or None for a single rank without a group.

A rank that died must not leave the others waiting. While a collective is pending, the processes of
the group on this host are looked at; when one is gone, PeerLost names its rank at once. Ranks on
other hosts are noticed by the connection or by the deadline.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

import xmoe.errors as errors
from xmoe.errors import AclError, PeerLost, RankDisagreement, XmoeError

T = TypeVar("T")
DEFAULT_TIMEOUT_S = 60.0
# Device codes that mean "a peer died or never arrived" (contract: 507057 remote error, 507034
# timeout).
_REMOTE_CODES = (507057, 507034)
_LIVENESS_EVERY_S = 0.1
# A peer that finished its part and left is no loss: its data may still be on the way.
_LOST_GRACE_S = 0.5
# Long enough for every other rank to see for itself who is gone.
_LINGER_S = 1.5


@dataclass(frozen=True)
class _Process:
    host: str
    pid: int
    started: str


# Who stands behind each rank; dropped with the group.
_PROCESSES: weakref.WeakKeyDictionary[ProcessGroup, tuple[_Process, ...]] = (
    weakref.WeakKeyDictionary()
)


def group_size(group: ProcessGroup | None) -> int:
    """Number of ranks; 1 without a group. Local."""
    return 1 if group is None else dist.get_world_size(group)


def group_rank(group: ProcessGroup | None) -> int:
    """This process' rank within the group; 0 without a group. Local."""
    return 0 if group is None else dist.get_rank(group)


def _process_started(pid: int) -> str | None:
    """Start time of a live process, None when there is none (a zombie counts as none)."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in ("Z", "X") else fields[19]


def lost_ranks(group: ProcessGroup | None) -> tuple[int, ...]:
    """Ranks on this host whose process has ended, as far as `introduce` was called. Local."""
    if group is None:
        return ()
    here = socket.gethostname()
    return tuple(
        rank
        for rank, process in enumerate(_PROCESSES.get(group, ()))
        if process.host == here and _process_started(process.pid) != process.started
    )


def introduce(group: ProcessGroup | None, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
    """Learn which process stands behind each rank; once per group. COLLECTIVE on the first call."""
    if group is None or group in _PROCESSES:
        return
    pid = os.getpid()
    own = _Process(socket.gethostname(), pid, _process_started(pid) or "")
    _PROCESSES[group] = tuple(_gather_objects(group, own, "introduction", timeout_s))


def peer_lost(group: ProcessGroup | None, what: str, cause: str) -> PeerLost:
    """The error for a step that cannot complete because of another rank. Local.

    Takes its time: a rank that left at once would look to the others like one more lost peer, and
    each of them would blame another one.
    """
    # A process that is being killed may close its sockets before it counts as gone.
    deadline = time.monotonic() + 0.5
    lost = lost_ranks(group)
    while not lost and group in _PROCESSES and time.monotonic() < deadline:
        time.sleep(0.02)
        lost = lost_ranks(group)
    if lost:
        time.sleep(_LINGER_S)
    who = f"peer {', '.join(map(str, lost))} lost" if lost else "a peer does not answer"
    return PeerLost(
        f"{what}: {who} (rank {group_rank(group)} of {group_size(group)}: {cause}); allowed: all "
        "ranks alive and at the same step; next: look at that rank's own error, then restart the "
        "group"
    )


def as_peer_lost(error: Exception, group: ProcessGroup | None, what: str) -> Exception:
    """PeerLost for a device error that says a peer is gone, else the error itself. Local."""
    if isinstance(error, AclError) and error.code in _REMOTE_CODES:
        return peer_lost(group, what, str(error))
    return error


@contextlib.contextmanager
def _transport_errors(group: ProcessGroup, what: str) -> Iterator[None]:
    """torch.distributed reports a broken connection as RuntimeError; give it its name."""
    try:
        yield
    except XmoeError:
        raise
    except RuntimeError as error:
        text = str(error).strip() or type(error).__name__
        raise peer_lost(group, what, text.splitlines()[0]) from error


def run_work(start: Callable[[], Any], group: ProcessGroup, what: str, timeout_s: float) -> None:
    """Start an asynchronous torch.distributed operation and wait for it, watching the peers.
    COLLECTIVE.

    Raises:
        PeerLost: a peer's process ended, its connection broke, or `timeout_s` passed.
    """
    began = time.monotonic()
    lost_since, next_look = began, began + _LIVENESS_EVERY_S
    pause = 20e-6
    with _transport_errors(group, what):
        work = start()
        while not work.is_completed():
            now = time.monotonic()
            if now >= next_look:
                next_look = now + _LIVENESS_EVERY_S
                if not lost_ranks(group):
                    lost_since = now
                elif now - lost_since > _LOST_GRACE_S:
                    raise peer_lost(group, what, "its process ended")
                if now - began > timeout_s:
                    raise peer_lost(group, what, f"no answer within {timeout_s:g} s")
            time.sleep(pause)
            pause = min(pause * 1.5, 1e-3)
        work.wait()


def all_gather_int64(
    group: ProcessGroup | None,
    values: Sequence[int],
    what: str,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> list[list[int]]:
    """Every rank's list of integers, by rank; the lists have one length. COLLECTIVE."""
    if group is None:
        return [list(values)]
    own = torch.tensor(list(values), dtype=torch.int64)
    rows = [torch.empty_like(own) for _ in range(group_size(group))]
    run_work(lambda: dist.all_gather(rows, own, group=group, async_op=True), group, what, timeout_s)
    return [row.tolist() for row in rows]


def _gather_objects(group: ProcessGroup, value: T, what: str, timeout_s: float) -> list[T]:
    payload = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    sizes = [row[0] for row in all_gather_int64(group, [payload.numel()], what, timeout_s)]
    own = torch.zeros(max(sizes), dtype=torch.uint8)
    own[: payload.numel()] = payload
    rows = [torch.empty_like(own) for _ in sizes]
    run_work(lambda: dist.all_gather(rows, own, group=group, async_op=True), group, what, timeout_s)
    return [
        pickle.loads(row[:size].numpy().tobytes()) for row, size in zip(rows, sizes, strict=True)
    ]


def gather_facts(
    group: ProcessGroup | None, facts: T, timeout_s: float = DEFAULT_TIMEOUT_S
) -> list[T]:
    """Every rank's facts, by rank. Values must pickle; the group is trusted. COLLECTIVE."""
    if group is None:
        return [facts]
    introduce(group, timeout_s)
    return _gather_objects(group, facts, "gather_facts", timeout_s)


def broadcast_bytes(
    group: ProcessGroup | None, value: bytes | None, what: str, timeout_s: float = DEFAULT_TIMEOUT_S
) -> bytes:
    """Rank 0's bytes on every rank. COLLECTIVE. Other ranks pass None."""
    if group is None:
        assert value is not None
        return value
    found = _gather_objects(group, value if group_rank(group) == 0 else None, what, timeout_s)[0]
    assert found is not None
    return found


def compare_digest(
    group: ProcessGroup | None,
    digest: str,
    what: str = "decision",
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> None:
    """Check that all ranks hold the same text. COLLECTIVE.

    Raises:
        RankDisagreement: on every rank, listing which ranks hold what.
    """
    require_equal(group, what, {what: digest}, timeout_s)


def require_equal(
    group: ProcessGroup | None,
    what: str,
    values: dict[str, Any],
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> None:
    """Check that named values are the same on all ranks. COLLECTIVE.

    Raises:
        RankDisagreement: on every rank, naming the first differing value and who holds which.
    """
    held = gather_facts(group, values, timeout_s)
    for name in sorted({key for one in held for key in one}):
        by_value: dict[str, list[int]] = {}
        for rank, one in enumerate(held):
            by_value.setdefault(repr(one.get(name)), []).append(rank)
        if len(by_value) > 1:
            listing = "; ".join(
                f"ranks {','.join(map(str, ranks))}: {text}" for text, ranks in by_value.items()
            )
            raise RankDisagreement(
                f"{what}: ranks hold different values of {name} ({listing}); allowed: one value on "
                "all ranks; next: start every rank with the same model, settings and libraries"
            )


def agree_success(
    group: ProcessGroup | None,
    what: str,
    error: Exception | None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> None:
    """Go on only if no rank has an error. COLLECTIVE, also for the rank that failed.

    Raises:
        The lowest failing rank's error, of the same class and with the same text on every rank.
    """
    if group is None:
        if error is not None:
            raise error
        return
    introduce(group, timeout_s)
    flags = all_gather_int64(group, [error is not None], what, timeout_s)
    if not any(flag for (flag,) in flags):
        return
    portable = None if error is None else _portable(error)
    held = _gather_objects(group, portable, what, timeout_s)
    failed = [rank for rank, one in enumerate(held) if one is not None]
    first = held[failed[0]]
    assert first is not None
    raised = _rebuild(first, what, failed)
    if error is None:
        raise raised
    raise raised from error


def _portable(error: Exception) -> dict[str, Any]:
    fields: dict[str, Any] = {"class": type(error).__name__, "text": str(error)}
    if isinstance(error, AclError):
        fields |= {
            "call": error.call,
            "code": error.code,
            "name": error.name,
            "detail": error.detail,
        }
    return fields


def _rebuild(fields: dict[str, Any], what: str, ranks: Sequence[int]) -> Exception:
    """The same class if it is one of ours with a plain constructor; the text says the rest."""
    where = f"{what} failed on rank {','.join(map(str, ranks))}"
    if fields["class"] == "AclError":
        call = f"{where}: {fields['call']}"
        return AclError(call, fields["code"], fields["name"], fields["detail"])
    kind = getattr(errors, fields["class"], None)
    if not (isinstance(kind, type) and issubclass(kind, XmoeError)):
        return XmoeError(f"{where}: {fields['class']}: {fields['text']}")
    return kind(f"{where}: {fields['text']}")


def exchange_step(
    group: ProcessGroup | None,
    num_tokens: int,
    sequence: int,
    error: Exception | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> tuple[int, ...]:
    """Every rank's token count for this step; one small host collective. COLLECTIVE.

    Args:
        num_tokens: rows on this rank, may be 0.
        sequence: the step's number as this rank counts it. A rank that skipped a step is found
            here, at its next step, by its number.
        error: why this rank cannot take part; then all ranks raise it instead of launching.

    Returns:
        Token counts by rank.

    Raises:
        RankDisagreement: the numbers differ; on every rank, naming who is where.
    """
    if group is None:
        if error is not None:
            raise error
        return (num_tokens,)
    introduce(group, timeout_s)
    what = f"step {sequence}"
    rows = all_gather_int64(group, [sequence, num_tokens, error is not None], what, timeout_s)
    by_sequence: dict[int, list[int]] = {}
    for rank, row in enumerate(rows):
        by_sequence.setdefault(row[0], []).append(rank)
    if len(by_sequence) > 1:
        listing = "; ".join(
            f"step {step}: ranks {','.join(map(str, ranks))}"
            for step, ranks in sorted(by_sequence.items())
        )
        raise RankDisagreement(
            f"ranks are at different steps ({listing}); allowed: every rank takes part in every "
            "step, with zero tokens when it has none; next: make the idle rank run a dummy step"
        )
    if any(row[2] for row in rows):
        agree_success(group, what, error, timeout_s)
    return tuple(row[1] for row in rows)
