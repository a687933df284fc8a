// SPDX-License-Identifier: Apache-2.0
// Reductions, normalisations and matrix products.
#include "opapi.h"

using namespace xsd::op;

namespace {

std::vector<int64_t> dims_or_all(const at::Tensor& self, IA dims) {
  if (!dims.empty()) return dims;
  std::vector<int64_t> all(static_cast<size_t>(self.dim()));
  for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<int64_t>(i);
  return all;
}

void pair(const std::tuple<at::Tensor, at::Tensor>& result, T values, T indices) {
  values.copy_(std::get<0>(result));
  indices.copy_(std::get<1>(result));
}

at::Tensor all_of(const at::Tensor& self, IA dims, bool keep) {
  return self.dim() == 0 ? self.to(at::kBool) : at::all(self.to(at::kBool), dims_or_all(self, dims), keep);
}

at::Tensor any_of(const at::Tensor& self, IA dims, bool keep) {
  return self.dim() == 0 ? self.to(at::kBool) : at::any(self.to(at::kBool), dims_or_all(self, dims), keep);
}

void rms_norm(T self, T gamma, double epsilon, T out, T inverse) {
  std::vector<int64_t> dims(static_cast<size_t>(gamma.dim()));
  for (size_t i = 0; i < dims.size(); ++i) dims[i] = static_cast<int64_t>(i) - gamma.dim();
  const auto wide = self.to(at::kFloat);
  const auto scale = at::rsqrt(at::mean(wide * wide, dims, true) + epsilon);
  out.copy_(wide * scale * gamma.to(at::kFloat));
  if (inverse.defined()) inverse.copy_(scale);
}

}  // namespace

// clang-format off
ACLNN(Max, (T self, T out), out.copy_(at::max(self)))
ACLNN(Min, (T self, T out), out.copy_(at::min(self)))
ACLNN(MaxDim, (T self, int64_t dim, bool keep, T values, T indices), pair(at::max(self, dim, keep), values, indices))
ACLNN(MinDim, (T self, int64_t dim, bool keep, T values, T indices), pair(at::min(self, dim, keep), values, indices))
ACLNN(ArgMax, (T self, int64_t dim, bool keep, T out), out.copy_(at::argmax(self, dim, keep)))
ACLNN(ArgMin, (T self, int64_t dim, bool keep, T out), out.copy_(at::argmin(self, dim, keep)))
ACLNN(Amax, (T self, IA dims, bool keep, T out), out.copy_(at::amax(self, dims, keep)))
ACLNN(Amin, (T self, IA dims, bool keep, T out), out.copy_(at::amin(self, dims, keep)))
ACLNN(All, (T self, IA dims, bool keep, T out), out.copy_(all_of(self, dims, keep)))
ACLNN(Any, (T self, IA dims, bool keep, T out), out.copy_(any_of(self, dims, keep)))
ACLNN(Mean, (T self, IA dims, bool keep, D dtype, T out), out.copy_(at::mean(self, dims_or_all(self, dims), keep, dtype)))
ACLNN(MeanV2, (T self, IA dims, bool keep, bool, T out), out.copy_(at::mean(self, dims_or_all(self, dims), keep, out.scalar_type())))
ACLNN(ReduceSum, (T self, IA dims, bool keep, D dtype, T out), out.copy_(at::sum(self, dims_or_all(self, dims), keep, dtype)))
ACLNN(Prod, (T self, D dtype, T out), out.copy_(at::prod(self, dtype)))
ACLNN(ProdDim, (T self, int64_t dim, bool keep, D dtype, T out), out.copy_(at::prod(self, dim, keep, dtype)))
ACLNN(Std, (T self, IA dims, int64_t correction, bool keep, T out), out.copy_(at::std(self, dims_or_all(self, dims), at::Scalar(correction), keep)))
ACLNN(Var, (T self, IA dims, bool unbiased, bool keep, T out), out.copy_(at::var(self, dims_or_all(self, dims), unbiased, keep)))
ACLNN(VarCorrection, (T self, IA dims, int64_t correction, bool keep, T out), out.copy_(at::var(self, dims_or_all(self, dims), at::Scalar(correction), keep)))
ACLNN(Norm, (T self, S p, IA dims, bool keep, T out), out.copy_(at::norm(self, p, dims_or_all(self, dims), keep)))
ACLNN(LinalgVectorNorm, (T self, S order, IA dims, bool keep, D dtype, T out), out.copy_(at::linalg_vector_norm(self, order, dims_or_all(self, dims), keep, dtype)))
ACLNN(Cumsum, (T self, int64_t dim, D dtype, T out), out.copy_(at::cumsum(self, dim, dtype)))
ACLNN(CumsumV2, (T self, int64_t dim, bool, bool, T out), out.copy_(at::cumsum(self, dim, out.scalar_type())))
ACLNN(Softmax, (T self, int64_t dim, T out), out.copy_(at::softmax(self, dim, out.scalar_type() == self.scalar_type() ? std::optional<at::ScalarType>() : out.scalar_type())))
ACLNN(LogSoftmax, (T self, int64_t dim, T out), out.copy_(at::log_softmax(self, dim, out.scalar_type() == self.scalar_type() ? std::optional<at::ScalarType>() : out.scalar_type())))
ACLNN(Equal, (T self, T other, T out), out.fill_(at::equal(self, other)))
ACLNN(RmsNorm, (T self, T gamma, double epsilon, T out, T inverse), rms_norm(self, gamma, epsilon, out, inverse))

ACLNN(Mm, (T self, T other, T out, int8_t), out.copy_(at::mm(self, other)))
ACLNN(Matmul, (T self, T other, T out, int8_t), out.copy_(at::matmul(self, other)))
ACLNN(BatchMatMul, (T self, T other, T out, int8_t), out.copy_(at::bmm(self, other)))
ACLNN(Mv, (T self, T vector, T out, int8_t), out.copy_(at::mv(self, vector)))
ACLNN(Dot, (T self, T other, T out), out.copy_(at::dot(self, other)))
ACLNN(Addmm, (T self, T a, T b, S beta, S alpha, T out, int8_t), out.copy_(at::addmm(self, a, b, beta, alpha)))
ACLNN(Baddbmm, (T self, T a, T b, S beta, S alpha, T out, int8_t), out.copy_(at::baddbmm(self, a, b, beta, alpha)))
ACLNN(TriangularSolve, (T b, T a, bool upper, bool transpose, bool unit, T out, T a_out),
      out.copy_(at::linalg_solve_triangular(transpose ? a.mT() : a, b, transpose ? !upper : upper, true, unit)); a_out.copy_(a))
ACLNN(Convolution, (T input, T weight, T bias, IA stride, IA padding, IA dilation, bool transposed, IA output_padding, int64_t groups, T out, int8_t),
      out.copy_(at::convolution(input, weight, bias.defined() ? std::optional<at::Tensor>(bias) : std::nullopt, stride, padding, dilation, transposed, output_padding, groups)))
// clang-format on
