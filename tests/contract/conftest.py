# SPDX-License-Identifier: Apache-2.0
"""Stub vendor libraries, compiled once per session."""

from __future__ import annotations

from pathlib import Path

import pytest

from support import acl_stubs


@pytest.fixture(scope="session")
def stub_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the four stub base libraries."""
    return acl_stubs.build_base(tmp_path_factory.mktemp("acl_stubs"))
