# SPDX-License-Identifier: Apache-2.0
"""What this rank tells the policy: what the probe found, and what the configuration asks for.

The policy itself looks at nothing, so here is the one place where a machine becomes `Facts`. No
torch.
"""

from __future__ import annotations

from xmoe import env
from xmoe.config import XmoeConfig
from xmoe.kernels.acl.quant_modes import PREPARED_QUANTS
from xmoe.kernels.capability import Capability
from xmoe.layout import ccl_buffer_bytes_of
from xmoe.policy.facts import Facts
from xmoe.policy.profiles import soc_family
from xmoe.types import Mode


def facts_of(
    config: XmoeConfig, found: Capability, ep_size: int, assumed: tuple[str, ...] = ()
) -> Facts:
    """Facts of one rank. Local; the buffer is the one the communicator will be asked for.

    Args:
        found: the probe's result; an empty one in mode off, which probes nothing.
        assumed: names of facts that are not this machine's, for reports.
    """
    buffer_bytes = None
    if config.mode is not Mode.OFF:
        buffer_mb = config.ccl_buffer_mb or env.get("HCCL_BUFFSIZE")
        buffer_bytes = ccl_buffer_bytes_of(int(buffer_mb or 0), soc_family(found.soc) or "A3")
    return Facts(
        soc=found.soc,
        cann_version=found.cann_version,
        vendor_version=found.vendor_version,
        abi_variant=found.abi_variant,
        ep_size=ep_size,
        max_tokens_per_rank=config.max_tokens_per_rank,
        library_problem=found.library_problem,
        comm_problem=found.comm_problem,
        ccl_buffer_bytes=buffer_bytes,
        callable_variants=found.callable_variants,
        runtime_quants=PREPARED_QUANTS,
        config_digest=config.digest(),
        assumed=assumed,
    )
