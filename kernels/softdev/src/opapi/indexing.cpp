// SPDX-License-Identifier: Apache-2.0
// Operators that move elements: join, gather, scatter, select, repeat, order, triangle, pad.
#include "opapi.h"

using namespace xsd::op;

namespace {

// The front end stands for a missing index with an empty tensor of the data's type.
c10::List<std::optional<at::Tensor>> indices_of(const at::Tensor& self, TL given) {
  c10::List<std::optional<at::Tensor>> found;
  for (const at::Tensor& index : given) {
    const bool placeholder = index.dim() == 1 && index.numel() == 0 && index.scalar_type() == self.scalar_type() &&
                             index.scalar_type() != at::kLong && index.scalar_type() != at::kInt &&
                             index.scalar_type() != at::kBool;
    const bool missing = !index.defined() || placeholder || (index.numel() == 0 && given.size() > 1);
    found.push_back(missing ? std::optional<at::Tensor>() : std::optional<at::Tensor>(index.to(
        index.scalar_type() == at::kInt ? at::kLong : index.scalar_type())));
  }
  return found;
}

at::Tensor wide(const at::Tensor& index) { return index.to(at::kLong); }

const char* reduction(int64_t kind) { return kind == 1 ? "add" : "multiply"; }

void scatter(T self, int64_t dim, T index, T source, int64_t kind) {
  if (kind == 0) {
    self.scatter_(dim, wide(index), source);
  } else {
    self.scatter_(dim, wide(index), source, reduction(kind));
  }
}

void scatter_value(T self, int64_t dim, T index, S value, int64_t kind) {
  if (kind == 0) {
    self.scatter_(dim, wide(index), value);
  } else {
    self.scatter_(dim, wide(index), value, reduction(kind));
  }
}

void index_put(T self, TL indices, T values, bool accumulate) {
  auto target = self;
  at::index_put_(target, indices_of(self, indices), values, accumulate);
}

void pair(const std::tuple<at::Tensor, at::Tensor>& result, T values, T indices) {
  values.copy_(std::get<0>(result));
  indices.copy_(std::get<1>(result));
}

}  // namespace

// clang-format off
ACLNN(Cat, (TL parts, int64_t dim, T out), out.copy_(at::cat(parts, dim)))
ACLNN(Stack, (TL parts, int64_t dim, T out), out.copy_(at::stack(parts, dim)))
ACLNN(Repeat, (T self, IA repeats, T out), out.copy_(self.repeat(repeats)))
ACLNN(Flip, (T self, IA dims, T out), out.copy_(at::flip(self, dims)))
ACLNN(Roll, (T self, IA shifts, IA dims, T out), out.copy_(at::roll(self, shifts, dims)))
ACLNN(RepeatInterleave, (T self, T repeats, int64_t size, T out), out.copy_(at::repeat_interleave(self.flatten(), wide(repeats), 0, size)))
ACLNN(RepeatInterleaveInt, (T self, int64_t repeats, int64_t, T out), out.copy_(at::repeat_interleave(self.flatten(), repeats, 0)))
ACLNN(RepeatInterleaveWithDim, (T self, T repeats, int64_t dim, int64_t size, T out), out.copy_(at::repeat_interleave(self, wide(repeats), dim, size)))
ACLNN(RepeatInterleaveIntWithDim, (T self, int64_t repeats, int64_t dim, int64_t, T out), out.copy_(at::repeat_interleave(self, repeats, dim)))
ACLNN(Gather, (T self, int64_t dim, T index, T out), out.copy_(at::gather(self, dim, wide(index))))
ACLNN(Index, (T self, TL indices, T out), out.copy_(at::index(self, indices_of(self, indices))))
ACLNN(IndexPutImpl, (T self, TL indices, T values, bool accumulate, bool), index_put(self, indices, values, accumulate))
ACLNN(IndexSelect, (T self, int64_t dim, T index, T out), out.copy_(at::index_select(self, dim, wide(index))))
ACLNN(IndexAdd, (T self, int64_t dim, T index, T source, S alpha, T out), out.copy_(at::index_add(self, dim, wide(index), source, alpha)))
ACLNN(IndexCopy, (T self, int64_t dim, T index, T source, T out), out.copy_(at::index_copy(self, dim, wide(index), source)))
ACLNN(InplaceIndexCopy, (T self, int64_t dim, T index, T source), self.index_copy_(dim, wide(index), source))
ACLNN(Embedding, (T weight, T indices, T out), out.copy_(at::embedding(weight, indices)))
ACLNN(Scatter, (T self, int64_t dim, T index, T source, int64_t kind, T out), auto result = self.clone(); scatter(result, dim, index, source, kind); out.copy_(result))
ACLNN(ScatterValue, (T self, int64_t dim, T index, S value, int64_t kind, T out), auto result = self.clone(); scatter_value(result, dim, index, value, kind); out.copy_(result))
ACLNN(InplaceScatter, (T self, int64_t dim, T index, T source, int64_t kind), scatter(self, dim, index, source, kind))
ACLNN(InplaceScatterValue, (T self, int64_t dim, T index, S value, int64_t kind), scatter_value(self, dim, index, value, kind))
ACLNN(ScatterAdd, (T self, int64_t dim, T index, T source, T out), out.copy_(at::scatter_add(self, dim, wide(index), source)))
ACLNN(OneHot, (T self, int64_t, T on, T off, int64_t axis, T out), out.copy_(off.expand(out.sizes())); out.scatter_(axis, wide(self).unsqueeze(axis), on.item()))
ACLNN(ConstantPadNd, (T self, IA pad, S value, T out), out.copy_(at::constant_pad_nd(self, pad, value)))
ACLNN(Tril, (T self, int64_t diagonal, T out), out.copy_(at::tril(self, diagonal)))
ACLNN(Triu, (T self, int64_t diagonal, T out), out.copy_(at::triu(self, diagonal)))
ACLNN(InplaceTril, (T self, int64_t diagonal), self.tril_(diagonal))
ACLNN(InplaceTriu, (T self, int64_t diagonal), self.triu_(diagonal))
ACLNN(Sort, (T self, bool, int64_t dim, bool descending, T values, T indices), pair(at::sort(self, true, dim, descending), values, indices))
ACLNN(Topk, (T self, int64_t k, int64_t dim, bool largest, bool sorted, T values, T indices), pair(at::topk(self, k, dim, largest, sorted), values, indices))
ACLNN(Bincount, (T self, T weights, int64_t minimum, T out), out.copy_(at::bincount(self, weights.defined() ? std::optional<at::Tensor>(weights) : std::nullopt, minimum)))
ACLNN_WAIT(Nonzero, (T self, R out), out.set(at::nonzero(self)))
ACLNN_WAIT(NonzeroV2, (T self, R out), out.set(at::nonzero(self).t()))
ACLNN_WAIT(MaskedSelect, (T self, T mask, R out), out.set(at::masked_select(self, mask)))
// clang-format on
