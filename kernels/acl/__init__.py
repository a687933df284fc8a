# SPDX-License-Identifier: Apache-2.0
"""The C contract with CANN: finding libraries, verifying symbols, calling, and owning handles.

Import direction inside the package: problems <- elf <- versions <- toolkit <- libraries <-
provenance <- vendor <- loader <- status <- handles <- op. Importing it opens no library.
"""
