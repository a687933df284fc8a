# SPDX-License-Identifier: Apache-2.0
"""`python -m xmoe`, the same as the console script."""

import sys

from xmoe.cli import main

sys.exit(main())
