# SPDX-License-Identifier: Apache-2.0
"""The stream pipeline: events, channels and items -> executor -> adapters -> worker loops."""
