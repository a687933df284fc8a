# SPDX-License-Identifier: Apache-2.0
"""What is particular to a connector: its operators, groups, transfer state and protocol rules."""
