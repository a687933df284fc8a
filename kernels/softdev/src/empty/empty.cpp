// SPDX-License-Identifier: Apache-2.0
// Libraries that torch_npu names among its dependencies but takes nothing from: libge_runner, libgraph,
// libacl_tdt_channel; and libhcomm, whose lookups reach libhccl behind it.
