// SPDX-License-Identifier: Apache-2.0
// The MegaMoe operator of the software device: what its parts share.
//
//   abi.cpp     the two exported C functions; one parameter list per ABI variant
//   tiling.cpp  host-side checks of phase one (561002) and the workspace size
//   kernel.cpp  the work itself, on the stream's thread: the A3 cross-rank protocol
//   window.cpp  layout of the peer-visible window, waits, and who aborted
//   gemm.cpp    bf16 matrix product with a fixed order of accumulation
//   quant.cpp   integer modes: rounding of rows, exact products
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "xsd.h"

namespace megamoe {

constexpr aclnnStatus kOk = 0;
constexpr aclnnStatus kNullPointer = 161001;
constexpr aclnnStatus kInvalid = 161002;
constexpr aclnnStatus kTiling = 561002;
constexpr aclnnStatus kNoKernel = 561003;
constexpr aclnnStatus kExecutor = 561101;

constexpr int kWaitTimeout = 507034;  // a wait gave up
constexpr int kException = 507035;    // the core faulted, or strict mode caught a misuse
constexpr int kRemoteError = 507057;  // a peer died or aborted

// Every argument any variant has. What a variant lacks keeps the default below, which is the value
// the operator's own wrapper forwards for it.
struct Args {
  const aclTensor* context = nullptr;
  const aclTensor* x = nullptr;
  const aclTensor* topk_ids = nullptr;
  const aclTensor* topk_weights = nullptr;
  const aclTensorList* weight1 = nullptr;
  const aclTensorList* weight2 = nullptr;
  const aclTensorList* weight_scales1 = nullptr;
  const aclTensorList* weight_scales2 = nullptr;
  const aclTensorList* bias1 = nullptr;
  const aclTensorList* bias2 = nullptr;
  const aclTensor* x_active_mask = nullptr;
  const aclTensor* scales = nullptr;
  const aclTensorList* shared[6] = {nullptr, nullptr, nullptr, nullptr, nullptr, nullptr};
  const aclTensor* mask_buffer = nullptr;
  int64_t moe_expert_num = 0;
  int64_t ep_world_size = 0;
  int64_t ccl_buffer_size = 0;
  int64_t max_recv_token_num = 0;
  int64_t dispatch_quant_mode = 0;
  int64_t dispatch_quant_out_dtype = 28;
  int64_t shared_expert_quant_out_dtype = 28;
  int64_t combine_quant_mode = 0;
  const char* comm_alg = "";
  int64_t num_max_tokens_per_rank = 0;
  const char* activation = "swiglu";
  float activation_clamp = 0.0f;
  int64_t num_activation_params = 0;
  int64_t topo_type = 0;
  int64_t rank_num_per_server = 2;
  int64_t topk_weights_type = 0;
  const aclTensor* y = nullptr;
  const aclTensor* expert_token_nums = nullptr;
};

// One or two dimensions of device memory. Copied out of the aclTensor in phase one, because callers
// may destroy their descriptors as soon as phase two has returned.
struct View {
  const char* name = "";
  char* data = nullptr;
  int64_t dims[2] = {1, 1};
  int64_t strides[2] = {1, 1};  // elements
  int64_t item_bytes = 0;  // 0 for INT4, which no element address is asked of
  aclDataType dtype = ACL_DT_UNDEFINED;

  template <class T>
  T* at(int64_t i, int64_t j = 0) const {
    return reinterpret_cast<T*>(data + (i * strides[0] + j * strides[1]) * item_bytes);
  }
  bool contiguous() const {
    return (dims[1] == 1 || strides[1] == 1) && (dims[0] == 1 || strides[0] == dims[1]);
  }
};

enum class Quant : int64_t { kNone = 0, kInt8 = 8, kInt4 = 4 };

struct QuantSettings {
  bool offset_binary = false;          // int4 as value + 8 instead of two's complement
  uint32_t scale_mask = 0xffffffffu;  // the bits of a column scale that count
};

// Offsets into the launch's workspace, bytes; every part starts on 64 bytes.
struct WorkspacePlan {
  uint64_t ids = 0;        // int32 [bs, K]   experts after masking
  uint64_t position = 0;   // int32 [bs, K]   row of the permuted order
  uint64_t counts = 0;     // int32 [EP, EP*E + 1]  rows each source sends to each expert
  uint64_t first_row = 0;  // int32 [EP, EP*E + 1]  where they start in the source's window
  uint64_t gate_up = 0;    // bf16  [R, 2I]   first product, rounded; not with integer weights
  uint64_t tile_in = 0;    // fp32  [tile, max(H, I)]
  uint64_t tile_out = 0;   // fp32  [tile, max(H, 2I)]
  uint64_t rows = 0;       // int8  [2, tile, max(H, I)]   integer weights: high and low parts
  uint64_t scales = 0;     // fp32  [tile]
  uint64_t sums = 0;       // int32 [2, tile, max(H, 2I)]
  uint64_t group = 0;      // int8  [max(H, I), 64]   int4 weights of one block column
  uint64_t bytes = 0;
};

// Rows of one expert that are multiplied together. Results do not depend on it.
constexpr int64_t kTileRows = 48;

// A checked launch: what phase one hands to the stream's thread.
struct Problem {
  int64_t tokens = 0, hidden = 0, inter = 0, topk = 0;
  int64_t local_experts = 0, ranks = 0, max_recv = 0;
  int64_t moe_expert_num = 0, ccl_buffer_size = 0;
  float clamp = 0.0f;  // 0 = none
  bool has_mask = false;
  Quant quant = Quant::kNone;
  QuantSettings settings;
  View context, x, topk_ids, topk_weights, mask, y, expert_token_nums;
  std::vector<View> weight1, weight2;
  std::vector<View> scales1, scales2;  // UINT64 [2I] and [H], integer weights
  std::vector<View> bias1, bias2;      // FLOAT [2I] and [H], int4 weights
  WorkspacePlan plan;
};

// Host-side checks in the operator's order; fills `problem`. Sets the error text on failure.
aclnnStatus tile(const Args& args, Problem* problem);

// The kernel, an xsdKernelFn over a Problem.
int run(void* problem, void* workspace, uint64_t workspace_bytes);

// Set the thread's error text and return `status`.
aclnnStatus fail(aclnnStatus status, const char* fmt, ...) __attribute__((format(printf, 2, 3)));

// out[rows, cols] = in[rows, depth] * weight[depth, cols]; bf16 weights, fp32 elsewhere. Each
// output is summed over `depth` in rising order in one chain, so its bits depend on nothing but its
// own row and column: not on `rows`, not on the tile it happened to be in. `cols` must be a
// multiple of 64.
void multiply(const float* in, const uint16_t* weight, float* out, int64_t rows, int64_t cols,
              int64_t depth);

// silu(gate) * up; with a limit above 0 the gate is bounded above only. A NaN stays one.
inline float gated(float gate, float up, float limit) {
  if (limit > 0.0f) {
    gate = gate > limit ? limit : gate;
    up = up > limit ? limit : up < -limit ? -limit : up;
  }
  return gate / (1.0f + std::exp(-gate)) * up;
}

inline int64_t align_up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

inline float widen(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  __builtin_memcpy(&value, &wide, sizeof value);
  return value;
}

// Round to bf16, ties to even; a NaN stays a NaN.
inline uint16_t narrow(float value) {
  uint32_t wide;
  __builtin_memcpy(&wide, &value, sizeof wide);
  if ((wide & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((wide >> 16) | 0x40u);
  return static_cast<uint16_t>((wide + 0x7fffu + ((wide >> 16) & 1u)) >> 16);
}

}  // namespace megamoe
