# SPDX-License-Identifier: Apache-2.0
"""The first failure of an executor: final, told once, and what is held because of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from xmoe.errors import AclError, ConfigError, XmoeError
from xmoe.pipeline.ticket import Ticket

OnFailure = Callable[[BaseException, tuple[Ticket, ...]], None]

QUARANTINE: list[object] = []
"""Memory that a device may still use after its executor is gone lives as long as the process."""


class Failure:
    """No failure yet, or the first one.

    Args:
        translate: turns a device error into the error to raise.
        on_failure: told of the first failure, with the items whose phases were not all issued.

    Attributes:
        error: the first failure.
        quarantined: items that were under way then; the device may still use what they hold.
    """

    def __init__(
        self,
        translate: Callable[[Exception], Exception] | None,
        on_failure: OnFailure | None,
    ) -> None:
        self._translate = translate
        self._on_failure = on_failure
        self.error: BaseException | None = None
        self.quarantined: list[Ticket] = []

    def make_final(
        self, ticket: Ticket | None, error: BaseException, inflight: Iterable[Ticket]
    ) -> BaseException:
        """Note `error` of `ticket` unless there was one before; returns what it means."""
        if isinstance(error, ConfigError) and ticket is not None:
            final: BaseException = XmoeError(
                f"{ticket.item.op}, layer {ticket.item.layer} was refused half-way: {error}"
            )
            meaning: BaseException = error
        elif self._translate is not None and isinstance(error, Exception):
            meaning = final = self._translate(error)
        else:
            meaning = final = error
        if self.error is None:
            self.error = final
            self._tell(final, inflight)
        return meaning

    def _tell(self, final: BaseException, inflight: Iterable[Ticket]) -> None:
        for one in inflight:
            one._error = final  # whatever was queued behind it cannot be trusted either
            self.quarantined.append(one)
        if self._on_failure is None:
            return
        try:
            self._on_failure(final, tuple(one for one in self.quarantined if not one.issued))
        except XmoeError as second:
            final.add_note(f"and then, while the peers were told: {second}")

    @property
    def on_device(self) -> bool:
        """It was the device's."""
        error = self.error
        return isinstance(error, AclError) or (
            error is not None and isinstance(error.__cause__, AclError)
        )

    def refuse(self) -> None:
        """Raise because of the failure, if there was one."""
        if self.error is not None:
            raise XmoeError(
                f"executor stopped after its first failure ({type(self.error).__name__}: "
                f"{self.error}); allowed: no further work; next: close the runner and build a new "
                "one on every rank"
            ) from self.error
