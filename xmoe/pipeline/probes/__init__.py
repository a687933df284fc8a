# SPDX-License-Identifier: Apache-2.0
"""Probes of the connectors' operators: what a device guarantees, shown by running it."""

from xmoe.pipeline.probes.evidence import Evidence
from xmoe.pipeline.probes.table import PROBES, run_probes

__all__ = ["PROBES", "Evidence", "run_probes"]
