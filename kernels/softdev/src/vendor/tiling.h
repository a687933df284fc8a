// SPDX-License-Identifier: Apache-2.0
// The host-side checks. tiling.cpp: order, scalars, sizes; tiling_weights.cpp: weights, scales,
// biases and other optional tensors.
#pragma once

#include "limits.h"
#include "mega_moe.h"

namespace megamoe {

const char* soc_name();

// One run over the arguments of one call. Each step returns kOk, or a status with the text set.
class Tiling {
 public:
  Tiling(const Args& args, Problem* problem) : args_(args), p_(*problem) {}
  aclnnStatus operator()();

 private:
  // Steps, in this order.
  aclnnStatus comm_alg();
  aclnnStatus tokens();
  aclnnStatus weights();
  aclnnStatus optionals();
  aclnnStatus sizes();
  aclnnStatus quantisation();
  aclnnStatus activation();
  aclnnStatus outputs();
  aclnnStatus platform();
  aclnnStatus ccl_size();
  aclnnStatus kernel();
  aclnnStatus workspace();

  aclnnStatus weight_type();
  aclnnStatus one_weight(const aclTensor* tensor, const char* list, size_t index, View* out);
  aclnnStatus column_lists();
  const char* mode_name() const;

  aclnnStatus view(const aclTensor* tensor, const char* name, size_t rank, View* out);
  aclnnStatus live(const aclTensorList* list, const char* name);
  aclnnStatus dtype(const View& view, aclDataType allowed, const char* text);
  aclnnStatus range(const char* what, int64_t value, int64_t low, int64_t high, int64_t step = 1);
  aclnnStatus same(const char* what, int64_t value, const char* other, int64_t wanted);
  static bool present(const aclTensorList* list);
  static bool present(const aclTensor* tensor);

  const Args& args_;
  Problem& p_;
  const Limits* limits_ = nullptr;
};

}  // namespace megamoe
