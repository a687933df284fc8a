# SPDX-License-Identifier: Apache-2.0
"""Training of the small checkpoint that ships with the project."""
