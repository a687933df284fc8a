# SPDX-License-Identifier: Apache-2.0
"""Operators, one per file, without composition: the fused one and the parts of the split path."""
