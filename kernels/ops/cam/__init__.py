# SPDX-License-Identifier: Apache-2.0
"""Operators of the Attention/FFN connectors: CAMP2P (a2e, e2a) and CAMAsync (four of them).

topology <- protocols <- host <- soft; `binding` is the only module that calls C.
"""
