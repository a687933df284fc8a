// SPDX-License-Identifier: Apache-2.0
// What the operator accepts, by profile and SoC. These numbers are this library's own: the policy
// layer has another copy, so that a test of one against the other can show either to be wrong.
#pragma once

#include <cstdint>

namespace megamoe {

struct Limits {
  const char* profile;
  const char* soc;  // prefix of aclrtGetSocName
  int64_t inter_min, inter_max, inter_step;
  int64_t hidden_min, hidden_max, hidden_step;
  int64_t tokens_max, topk_max, local_experts_max, experts_max, ranks_max;
};

// "seed": the split of the intermediate size that the integration this project follows relies on
// (A3 512, A2 1024). "9.1.0": the tiling source of that release, one bound for both SoCs.
constexpr Limits kLimits[] = {
    {"seed", "Ascend910_93", 512, 3072, 512, 1024, 8192, 512, 4096, 16, 128, 1024, 32},
    {"seed", "Ascend910B", 1024, 3072, 512, 1024, 8192, 512, 4096, 16, 128, 1024, 32},
    {"9.1.0", "Ascend910_93", 1024, 3072, 512, 1024, 8192, 512, 4096, 16, 128, 1024, 32},
    {"9.1.0", "Ascend910B", 1024, 3072, 512, 1024, 8192, 512, 4096, 16, 128, 1024, 32},
};

}  // namespace megamoe
