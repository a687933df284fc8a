// SPDX-License-Identifier: Apache-2.0
// The four asynchronous kernels as queued objects; the C functions that fill them are in
// async_abi.cpp.
#pragma once

#include "async.h"

namespace cam {

struct AsyncKernel {
  const char* name = "";
  AsyncShape shape;
  Group group;
  int32_t device = 0;
};

struct DispatchSend : AsyncKernel {
  View x, ids;
  int run();

 private:
  std::vector<uint32_t> counts, prefix;
  int credit();
  int statistics();
  void store_token(char* to, int64_t token);
  void write_slot(int64_t ffn, Run& run);
};

struct CombineRecv : AsyncKernel {
  View ids, weights, out;
  int run();

 private:
  void gather();
};

struct DispatchRecv : AsyncKernel {
  View anchor, x, scales, info, counts;        // both operator sets
  View x_shared, scales_shared, shared_count;  // the older set only
  int64_t capacity = 0;
  int run();

 private:
  int64_t first = -1;                      // Attention group chosen: its first rank
  std::vector<uint32_t> per_slot, per_tp;  // rows by slot; by (TP rank, slot)
  bool stopped() const;
  void emit_stop();
  int choose(const Run& run);
  int chunk(int64_t* start, int64_t* end);
  uint64_t copy_rows(int64_t start, int64_t end);  // bytes
  void publish(int64_t start, int64_t end);
};

struct CombineSend : AsyncKernel {
  View x, x_shared, info;
  int run();

 private:
  int push(const int64_t* words, Run& run);
};

}  // namespace cam
