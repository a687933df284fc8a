/* SPDX-License-Identifier: Apache-2.0 */
/* Objects of stub_nnop.c, for the operator libraries that look into them. */
#pragma once
#include <stdint.h>
struct tensor {
  int64_t dims[3][8];
  uint64_t n, m;
  int type, format;
  void* data;
};
struct list {
  uint64_t n;
  struct tensor* items[];
};
