// SPDX-License-Identifier: Apache-2.0
// Element types of collectives and their reductions in rank order.
#pragma once

#include <cstdint>

#include "hccl.h"

namespace xsd {

uint32_t hccl_type_bytes(HcclDataType type);  // 0 = unknown
bool reducible(HcclDataType type);
// out[i] = op over sources[0..n) in that order; 16-bit floats are summed in float32, rounded once.
void reduce(HcclDataType type, HcclReduceOp op, const unsigned char* const* sources, uint32_t n,
            uint64_t count, unsigned char* out);

}  // namespace xsd
