/* SPDX-License-Identifier: Apache-2.0 */
/* What every generated recorder has; see tests/support/launch_build.py. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include "stub_objects.h"
struct executor {
  int repeatable; /* first: the stub sets it */
  struct tensor* small[5];
};
struct slot {
  int64_t number, count, second, type, format, rows, columns;
  double real;
  char text[64];
};
struct slot slots[64];
int64_t launched[10]; /* workspace, its size, stream, then the five small tensors' addresses */
int64_t prepared, launches, workspace_bytes = 4096;
int phase_one_status, phase_two_status;
static void note_tensor(struct slot* s, const struct tensor* t) {
  s->number = t ? (int64_t)t->data : 0;
  if (!t) return;
  s->type = t->type;
  s->format = t->format;
  s->rows = t->dims[0][0];
  s->columns = t->n > 1 ? t->dims[0][1] : 0;
}
#define NOTE_T(i, p) note_tensor(&slots[i], p);
#define NOTE_L(i, p)                              \
  slots[i].count = p ? (int64_t)p->n : 0;         \
  note_tensor(&slots[i], p ? p->items[0] : NULL); \
  slots[i].second = p && p->n > 1 ? (int64_t)p->items[1]->data : 0;
#define NOTE_i(i, p) slots[i].number = p;
#define NOTE_S(i, p) snprintf(slots[i].text, sizeof slots[i].text, "%s", p);
#define NOTE_F(i, p) slots[i].real = p;
#define NOTE_P(i, p) slots[i].real = p[0];
int aclnnMegaMoe(void* workspace, uint64_t size, struct executor* executor, void* stream) {
  if (phase_two_status) return phase_two_status;
  launched[0] = (int64_t)workspace;
  launched[1] = (int64_t)size;
  launched[2] = (int64_t)stream;
  for (int i = 0; i < 5; i++) launched[3 + i] = (int64_t)executor->small[i]->data;
  launches++;
  if (!executor->repeatable) free(executor);
  return 0;
}
