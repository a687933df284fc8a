// SPDX-License-Identifier: Apache-2.0
// The operator's work, on the stream's thread. The phases and what orders them across ranks:
//
//   route     sort (token, slot) pairs by expert, copy rows into own A, then send the counts
//   exchange  counts of every source arrive: that publishes its A and says where each row is
//   compute   pull rows from the sources' A, two products, push into the sources' D
//   barrier   all D are complete, nobody reads A any more, own counts are zero again
//   gather    y = weighted sum of own D rows, k rising, fp32
//
// A peer can send the next launch's counts only after the barrier, and nobody writes D before all
// counts of its launch have arrived; so launches in the same order on all ranks need no other
// protection.
#include <algorithm>
#include <cstring>

#include "quant.h"
#include "window.h"

namespace megamoe {
namespace {

using Long = long long;  // for printf

// Call sites of xsdDelay.
enum Site : uint32_t {
  kSiteStart = 0x4d4d0000,
  kSiteRouted,
  kSiteSend,
  kSiteExchanged,
  kSiteComputed,
  kSiteCleared,
  kSiteGather,
  kSiteEnd
};

class Launch {
 public:
  Launch(const Problem& problem, char* workspace)
      : p_(problem),
        workspace_(workspace),
        strict_(xsdSettings()->strict),
        buckets_(problem.ranks * problem.local_experts + 1),
        ids_(part<int32_t>(workspace, problem.plan.ids)),
        position_(part<int32_t>(workspace, problem.plan.position)),
        counts_(part<int32_t>(workspace, problem.plan.counts)),
        first_row_(part<int32_t>(workspace, problem.plan.first_row)),
        gate_up_(part<uint16_t>(workspace, problem.plan.gate_up)),
        tile_in_(part<float>(workspace, problem.plan.tile_in)),
        tile_out_(part<float>(workspace, problem.plan.tile_out)) {}

  int operator()() {
    xsdDelay(kSiteStart);
    int code = window_.open(p_);
    if (code != 0) return code;
    if (strict_ && (code = check_memory()) != 0) return code;
    if ((code = read_ids()) != 0) return code;
    route();
    xsdDelay(kSiteRouted);
    send_counts();
    if ((code = receive_counts()) != 0) return code;
    xsdDelay(kSiteExchanged);
    compute();
    xsdDelay(kSiteComputed);
    clear_counts();
    xsdDelay(kSiteCleared);
    if ((code = window_.barrier()) != 0) return code;
    xsdDelay(kSiteGather);
    gather();
    xsdDelay(kSiteEnd);
    return 0;
  }

 private:
  template <class T>
  static T* part(char* workspace, uint64_t offset) {
    return reinterpret_cast<T*>(workspace + offset);
  }

  int32_t* counts(int64_t source) const { return counts_ + source * buckets_; }
  int32_t* first_row(int64_t source) const { return first_row_ + source * buckets_; }
  // EP * E: the id the operator gives masked tokens.
  int64_t unrouted() const { return buckets_ - 1; }

  // Strict: every view must lie inside the allocation it points into.
  int check_memory() {
    int code = 0;
    for (const View* v :
         {&p_.x, &p_.topk_ids, &p_.topk_weights, &p_.mask, &p_.y, &p_.expert_token_nums})
      if (v->data != nullptr && (code = check_view(*v)) != 0) return code;
    for (const std::vector<View>* list :
         {&p_.weight1, &p_.weight2, &p_.scales1, &p_.scales2, &p_.bias1, &p_.bias2})
      for (const View& v : *list)
        if ((code = check_view(v)) != 0) return code;
    for (const std::vector<View>* list : {&p_.scales1, &p_.scales2})
      for (size_t e = 0; e < list->size(); ++e)
        if ((code = check_scales((*list)[e], e)) != 0) return code;
    if (p_.topk_weights.dtype != ACL_FLOAT)
      return window_.abort(
          kException,
          "topk_weights are BF16: accepted by the operator's checks, but its kernel "
          "reads them as FLOAT; pass FLOAT");
    if (p_.moe_expert_num != p_.ranks * p_.local_experts)
      return window_.abort(
          kException,
          "moe_expert_num=%lld, but EP=%lld ranks with %lld experts each hold %lld; "
          "the operator does not check this and would misroute",
          Long(p_.moe_expert_num), Long(p_.ranks), Long(p_.local_experts),
          Long(p_.ranks * p_.local_experts));
    return 0;
  }

  int check_view(const View& v) {
    int64_t low = 0, high = 0;  // elements relative to the first one
    for (int d = 0; d < 2; ++d) (v.strides[d] < 0 ? low : high) += (v.dims[d] - 1) * v.strides[d];
    const int64_t span = high - low + 1;
    const uint64_t bytes =
        static_cast<uint64_t>(v.dtype == ACL_INT4 ? span / 2 : span * v.item_bytes);
    const char* start = v.data + low * v.item_bytes;
    if (xsdCheckRange(start, bytes) >= 0 && xsdMapped(start, bytes) != 0) return 0;
    return window_.abort(
        kException,
        "%s, shape [%lld, %lld], strides [%lld, %lld], runs past its allocation or is not mapped",
        v.name, Long(v.dims[0]), Long(v.dims[1]), Long(v.strides[0]), Long(v.strides[1]));
  }

  int check_scales(const View& v, size_t expert) {
    for (int64_t n = 0; n < v.dims[0]; ++n) {
      const uint64_t element = *v.at<uint64_t>(n);
      if (element >> 32 != 0)
        return window_.abort(kException,
                             "%s[%zu][%lld]=%#llx: the upper 32 bits must be 0 and the lower ones "
                             "the scale as a float; were floats passed as they are?",
                             v.name, expert, Long(n), static_cast<unsigned long long>(element));
    }
    return 0;
  }

  int read_ids() {
    // Only a contiguous tensor is rewritten in place; of others the operator gets a copy.
    const bool rewrite = p_.has_mask && p_.topk_ids.contiguous();
    for (int64_t t = 0; t < p_.tokens; ++t) {
      const bool active = !p_.has_mask || *p_.mask.at<int8_t>(t) != 0;
      for (int64_t k = 0; k < p_.topk; ++k) {
        int32_t id = *p_.topk_ids.at<int32_t>(t, k);
        if (!active) {
          id = static_cast<int32_t>(unrouted());
          if (rewrite) *p_.topk_ids.at<int32_t>(t, k) = id;
        } else if (strict_) {
          const int code = check_id(t, k, id);
          if (code != 0) return code;
        }
        // Not strict: hardware would index with whatever the id is. Here such a slot is simply
        // never computed, and its result is whatever the window held.
        ids_[t * p_.topk + k] = id >= 0 && id < unrouted() ? id : static_cast<int32_t>(unrouted());
      }
    }
    return 0;
  }

  int check_id(int64_t t, int64_t k, int32_t id) {
    if (id < 0 || id >= unrouted())
      return window_.abort(
          kException, "topk_ids[%lld, %lld]=%d is outside 0..%lld; the operator does not check ids",
          Long(t), Long(k), id, Long(unrouted() - 1));
    for (int64_t other = 0; other < k; ++other)
      if (ids_[t * p_.topk + other] == id)
        return window_.abort(
            kException,
            "topk_ids[%lld] names expert %d twice (slots %lld and %lld); ids of one "
            "token must be distinct",
            Long(t), id, Long(other), Long(k));
    return 0;
  }

  // Stable sort by expert: rows of one expert stay in the order of their (token, slot).
  void route() {
    int32_t* mine = counts(window_.rank());
    int32_t* next = first_row(window_.rank());
    std::memset(mine, 0, static_cast<size_t>(buckets_) * sizeof(int32_t));
    const int64_t slots = p_.tokens * p_.topk;
    const char* written = nullptr;  // a row of this token
    for (int64_t i = 0; i < slots; ++i) ++mine[ids_[i]];
    for (int64_t g = 0, row = 0; g < buckets_; row += mine[g], ++g)
      next[g] = static_cast<int32_t>(row);
    for (int64_t i = 0; i < slots; ++i) {
      const int32_t row = next[ids_[i]]++;
      position_[i] = row;
      if (i % p_.topk == 0) written = nullptr;
      if (ids_[i] != unrouted()) {
        char* to = window_.sent(window_.rank(), row);
        send_row(i / p_.topk, to, written);
        written = to;
      } else if (strict_) {
        // Nobody will write this result row. Stale data there may look plausible; NaN does not.
        std::memset(window_.result(window_.rank(), row), 0xff, static_cast<size_t>(p_.hidden) * 2);
      }
    }
  }

  // `written`, if not null, holds the same row already.
  void send_row(int64_t token, char* to, const char* written) const {
    const uint16_t* from = p_.x.at<uint16_t>(token);
    if (p_.quant != Quant::kNone) {
      if (written == nullptr) return write_token(p_, from, to, workspace_);
      std::memcpy(to, written, static_cast<size_t>(token_bytes(p_.hidden)));
    } else if (p_.x.strides[1] == 1) {
      std::memcpy(to, from, static_cast<size_t>(p_.hidden) * 2);
    } else {
      uint16_t* out = reinterpret_cast<uint16_t*>(to);
      for (int64_t h = 0; h < p_.hidden; ++h) out[h] = from[h * p_.x.strides[1]];
    }
  }

  void send_counts() {
    if (strict_) window_.publish_shape();
    const int64_t me = window_.rank();
    const int32_t* mine = counts(me);
    for (int64_t i = 0; i < p_.ranks; ++i) {
      int32_t* row = window_.tpe_row((me + i) % p_.ranks, me);
      // The poller looks at the first word of each line, so that one is stored last.
      for (int64_t line = 0; line < window_.tpe_row_ints(); line += kLineInts) {
        for (int64_t c = kLineInts - 1; c >= 0; --c) {
          const int64_t bucket = line + c;
          const int32_t value = kCountTag + (bucket < buckets_ ? mine[bucket] : 0);
          if (c > 0)
            row[bucket] = value;
          else
            __atomic_store_n(row + bucket, value, __ATOMIC_RELEASE);
        }
      }
      xsdDelay(kSiteSend);
    }
  }

  int receive_counts() {
    int code = 0;
    for (int64_t source = 0; source < p_.ranks; ++source) {
      if ((code = window_.wait_counts(source)) != 0) return code;
      const int32_t* row = window_.tpe_row(window_.rank(), source);
      int64_t sum = 0;
      for (int64_t g = 0; g < buckets_; ++g) {
        const int64_t count = static_cast<int64_t>(row[g]) - kCountTag;
        if (count < 0 || count > p_.tokens * p_.topk) sum = INT32_MAX;
        counts(source)[g] = static_cast<int32_t>(count);
        first_row(source)[g] = static_cast<int32_t>(sum);
        if (sum < INT32_MAX) sum += count;
      }
      sums_ok_ = sums_ok_ && sum <= p_.tokens * p_.topk;
    }
    if (strict_ && (code = window_.check_shapes()) != 0) return code;
    if (!sums_ok_)  // would address rows outside the windows
      return window_.abort(
          kException,
          "the counts received are impossible: the window is used by another launch, "
          "or ranks differ in bs or K");
    const int64_t first = window_.rank() * p_.local_experts;
    for (int64_t e = 0; e < p_.local_experts; ++e) {
      int64_t total = 0;
      for (int64_t source = 0; source < p_.ranks; ++source) total += counts(source)[first + e];
      *p_.expert_token_nums.at<int32_t>(e) = static_cast<int32_t>(total);
    }
    return 0;
  }

  struct Row {
    int64_t source, row;
  };

  void compute() {
    std::vector<Row> rows;
    int64_t done =
        0;  // rows so far, over all experts; the operator stops at max_recv without a word
    for (int64_t e = 0; e < p_.local_experts && done < p_.max_recv; ++e) {
      rows.clear();
      const int64_t expert = window_.rank() * p_.local_experts + e;
      for (int64_t source = 0; source < p_.ranks; ++source)
        for (int32_t i = 0;
             i < counts(source)[expert] && done + static_cast<int64_t>(rows.size()) < p_.max_recv;
             ++i)
          rows.push_back({source, first_row(source)[expert] + i});
      const int64_t count = static_cast<int64_t>(rows.size());
      for (int64_t start = 0; start < count; start += kTileRows)
        tile(e, rows.data() + start, std::min(kTileRows, count - start), done + start);
      done += count;
    }
  }

  // One expert on up to kTileRows rows. Every value that the operator stores as bf16 is rounded
  // here too.
  void tile(int64_t expert, const Row* rows, int64_t count, int64_t first) {
    const int64_t hidden = p_.hidden, inter = p_.inter;
    if (p_.quant != Quant::kNone) {
      const char* tokens[kTileRows];
      uint16_t* results[kTileRows];
      for (int64_t r = 0; r < count; ++r) {
        tokens[r] = window_.sent(rows[r].source, rows[r].row);
        results[r] = window_.result(rows[r].source, rows[r].row);
      }
      return quant_tile(p_, workspace_, static_cast<size_t>(expert), tokens, results, count);
    }
    for (int64_t r = 0; r < count; ++r) {
      const char* sent = window_.sent(rows[r].source, rows[r].row);
      const uint16_t* from = reinterpret_cast<const uint16_t*>(sent);
      for (int64_t h = 0; h < hidden; ++h) tile_in_[r * hidden + h] = widen(from[h]);
    }
    const View& w1 = p_.weight1[static_cast<size_t>(expert)];
    const View& w2 = p_.weight2[static_cast<size_t>(expert)];
    multiply(tile_in_, w1.at<uint16_t>(0), tile_out_, count, 2 * inter, hidden);
    uint16_t* gate_up = gate_up_ + first * 2 * inter;
    for (int64_t i = 0; i < count * 2 * inter; ++i) gate_up[i] = narrow(tile_out_[i]);
    for (int64_t r = 0; r < count; ++r) activate(gate_up + r * 2 * inter, tile_in_ + r * inter);
    multiply(tile_in_, w2.at<uint16_t>(0), tile_out_, count, hidden, inter);
    for (int64_t r = 0; r < count; ++r) {
      uint16_t* to = window_.result(rows[r].source, rows[r].row);
      for (int64_t h = 0; h < hidden; ++h) to[h] = narrow(tile_out_[r * hidden + h]);
    }
  }

  void activate(const uint16_t* gate_up, float* out) const {
    for (int64_t i = 0; i < p_.inter; ++i)
      out[i] = widen(narrow(gated(widen(gate_up[i]), widen(gate_up[p_.inter + i]), p_.clamp)));
  }

  void clear_counts() {
    std::memset(window_.tpe_row(window_.rank(), 0), 0,
                static_cast<size_t>(p_.ranks * window_.tpe_row_ints()) * sizeof(int32_t));
  }

  void gather() {
    float* sum = tile_out_;
    for (int64_t t = 0; t < p_.tokens; ++t) {
      std::memset(sum, 0, static_cast<size_t>(p_.hidden) * sizeof(float));
      for (int64_t k = 0; k < p_.topk; ++k) {
        const float weight = topk_weight(t, k);
        const uint16_t* row = window_.result(window_.rank(), position_[t * p_.topk + k]);
        for (int64_t h = 0; h < p_.hidden; ++h) sum[h] += weight * widen(row[h]);
      }
      for (int64_t h = 0; h < p_.hidden; ++h) *p_.y.at<uint16_t>(t, h) = narrow(sum[h]);
    }
  }

  float topk_weight(int64_t t, int64_t k) const {
    if (p_.topk_weights.dtype == ACL_FLOAT) return *p_.topk_weights.at<float>(t, k);
    // The kernel takes BF16 weights for FLOAT: pairs of them become one number. It reads on past
    // the end of the tensor; here the second half reads as zero.
    const int64_t slot = 2 * (t * p_.topk + k);
    if (slot + 1 >= p_.tokens * p_.topk) return 0.0f;
    float value;
    std::memcpy(&value, p_.topk_weights.at<uint16_t>(slot / p_.topk, slot % p_.topk),
                sizeof(uint16_t) * 2);
    return value;
  }

  const Problem& p_;
  char* const workspace_;
  const bool strict_;
  const int64_t buckets_;  // experts of the group, and one for what is not routed
  int32_t* const ids_;
  int32_t* const position_;
  int32_t* const counts_;
  int32_t* const first_row_;
  uint16_t* const gate_up_;
  float* const tile_in_;
  float* const tile_out_;
  Window window_;
  bool sums_ok_ = true;
};

}  // namespace

int run(void* problem, void* workspace, uint64_t workspace_bytes) {
  const Problem& p = *static_cast<const Problem*>(problem);
  if (workspace_bytes < p.plan.bytes) {
    xsdTaskError("aclnnMegaMoe: workspace has %llu bytes, phase one asked for %llu",
                 static_cast<unsigned long long>(workspace_bytes),
                 static_cast<unsigned long long>(p.plan.bytes));
    return kException;
  }
  return Launch(p, static_cast<char*>(workspace))();
}

}  // namespace megamoe
