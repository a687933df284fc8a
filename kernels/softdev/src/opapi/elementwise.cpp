// SPDX-License-Identifier: Apache-2.0
// Operators that work on each element: arithmetic, comparison, logic, activation, fill, copy, random.
// Source of the parameter lists: op-plugin's calls and the CANN 9.1 operator documentation.
#include "opapi.h"

using namespace xsd::op;

// clang-format off
#define UNARY(op, function) \
  ACLNN(op, (T self, T out), out.copy_(at::function(self)))
#define UNARY_AND_INPLACE(op, function) \
  UNARY(op, function) \
  ACLNN(Inplace##op, (T self), self.copy_(at::function(self)))
#define BINARY(op, function) \
  ACLNN(op, (T self, T other, T out), out.copy_(at::function(self, other)))
#define COMPARISON(op, function) \
  ACLNN(op##Tensor, (T self, T other, T out), out.copy_(at::function(self, other))) \
  ACLNN(op##Scalar, (T self, S other, T out), out.copy_(at::function(self, other))) \
  ACLNN(Inplace##op##Tensor, (T self, T other), self.copy_(at::function(self, other))) \
  ACLNN(Inplace##op##Scalar, (T self, S other), self.copy_(at::function(self, other)))

UNARY_AND_INPLACE(Abs, abs)
UNARY_AND_INPLACE(Ceil, ceil)
UNARY_AND_INPLACE(Cos, cos)
UNARY_AND_INPLACE(Erf, erf)
UNARY_AND_INPLACE(Exp, exp)
UNARY_AND_INPLACE(Expm1, expm1)
UNARY_AND_INPLACE(Floor, floor)
UNARY_AND_INPLACE(Log, log)
UNARY_AND_INPLACE(Log1p, log1p)
UNARY_AND_INPLACE(Neg, neg)
UNARY_AND_INPLACE(Reciprocal, reciprocal)
UNARY_AND_INPLACE(Relu, relu)
UNARY_AND_INPLACE(Round, round)
UNARY_AND_INPLACE(Rsqrt, rsqrt)
UNARY_AND_INPLACE(Sigmoid, sigmoid)
UNARY_AND_INPLACE(Sin, sin)
UNARY_AND_INPLACE(Sqrt, sqrt)
UNARY_AND_INPLACE(Tanh, tanh)
UNARY_AND_INPLACE(Trunc, trunc)
UNARY(BitwiseNot, bitwise_not)
UNARY(IsFinite, isfinite)
UNARY(LogicalNot, logical_not)
UNARY(Sign, sign)
UNARY(Silu, silu)

COMPARISON(Eq, eq)
COMPARISON(Ne, ne)
COMPARISON(Lt, lt)
COMPARISON(Le, le)
COMPARISON(Gt, gt)
COMPARISON(Ge, ge)

ACLNN(Add, (T self, T other, S alpha, T out), out.copy_(at::add(self, other, alpha)))
ACLNN(AddV3, (S self, T other, S alpha, T out), out.copy_(at::add(at::mul(other, alpha), self)))
ACLNN(Adds, (T self, S other, S alpha, T out), out.copy_(at::add(self, other, alpha)))
ACLNN(InplaceAdd, (T self, T other, S alpha), self.add_(other, alpha))
ACLNN(InplaceAdds, (T self, S other, S alpha), self.add_(other, alpha))
ACLNN(Sub, (T self, T other, S alpha, T out), out.copy_(at::sub(self, other, alpha)))
ACLNN(Subs, (T self, S other, S alpha, T out), out.copy_(at::sub(self, other, alpha)))
ACLNN(InplaceSub, (T self, T other, S alpha), self.sub_(other, alpha))
ACLNN(InplaceSubs, (T self, S other, S alpha), self.sub_(other, alpha))
ACLNN(Rsub, (T self, T other, S alpha, T out), out.copy_(at::rsub(self, other, alpha)))
ACLNN(Rsubs, (T self, S other, S alpha, T out), out.copy_(at::rsub(self, other, alpha)))
ACLNN(Mul, (T self, T other, T out), out.copy_(at::mul(self, other)))
ACLNN(Muls, (T self, S other, T out), out.copy_(at::mul(self, other)))
ACLNN(InplaceMul, (T self, T other), self.mul_(other))
ACLNN(InplaceMuls, (T self, S other), self.mul_(other))
ACLNN(Div, (T self, T other, T out), out.copy_(at::div(self, other)))
ACLNN(Divs, (T self, S other, T out), out.copy_(at::div(self, other)))
ACLNN(InplaceDiv, (T self, T other), self.div_(other))
ACLNN(InplaceDivs, (T self, S other), self.div_(other))
ACLNN(Addcmul, (T self, T a, T b, S value, T out), out.copy_(at::addcmul(self, a, b, value)))
ACLNN(FloorDivide, (T self, T other, T out), out.copy_(at::floor_divide(self, other)))
ACLNN(FloorDivides, (T self, S other, T out), out.copy_(at::floor_divide(self, other)))
ACLNN(InplaceFloorDivide, (T self, T other), self.copy_(at::floor_divide(self, other)))
ACLNN(InplaceFloorDivides, (T self, S other), self.copy_(at::floor_divide(self, other)))
ACLNN(RemainderTensorTensor, (T self, T other, T out), out.copy_(at::remainder(self, other)))
ACLNN(RemainderTensorScalar, (T self, S other, T out), out.copy_(at::remainder(self, other)))
ACLNN(PowTensorTensor, (T self, T exponent, T out), out.copy_(at::pow(self, exponent)))
ACLNN(PowTensorScalar, (T self, S exponent, T out), out.copy_(at::pow(self, exponent)))
ACLNN(PowScalarTensor, (S self, T exponent, T out), out.copy_(at::pow(self, exponent)))
ACLNN(InplacePowTensorScalar, (T self, S exponent), self.pow_(exponent))
ACLNN(InplacePowTensorTensor, (T self, T exponent), self.pow_(exponent))
BINARY(Maximum, maximum)
BINARY(Minimum, minimum)
BINARY(LogicalAnd, logical_and)
BINARY(LogicalOr, logical_or)
BINARY(LogicalXor, logical_xor)
BINARY(BitwiseAndTensor, bitwise_and)
BINARY(BitwiseOrTensor, bitwise_or)
ACLNN(BitwiseAndScalar, (T self, S other, T out), out.copy_(at::bitwise_and(self, other)))
ACLNN(BitwiseOrScalar, (T self, S other, T out), out.copy_(at::bitwise_or(self, other)))
ACLNN(InplaceBitwiseAndTensor, (T self, T other), self.bitwise_and_(other))
ACLNN(InplaceBitwiseAndScalar, (T self, S other), self.bitwise_and_(other))
ACLNN(InplaceBitwiseOrTensor, (T self, T other), self.bitwise_or_(other))
ACLNN(InplaceBitwiseOrScalar, (T self, S other), self.bitwise_or_(other))
ACLNN(InplaceLogicalAnd, (T self, T other), self.logical_and_(other))
ACLNN(InplaceLogicalOr, (T self, T other), self.logical_or_(other))
ACLNN(Clamp, (T self, OS low, OS high, T out), out.copy_(at::clamp(self, low, high)))
ACLNN(ClampMin, (T self, S low, T out), out.copy_(at::clamp_min(self, low)))
ACLNN(ClampMax, (T self, S high, T out), out.copy_(at::clamp_max(self, high)))
ACLNN(InplaceClampMax, (T self, S high), self.clamp_max_(high))
ACLNN(NanToNum, (T self, float nan, float high, float low, T out), out.copy_(at::nan_to_num(self, nan, high, low)))
ACLNN(Gelu, (T self, T out), out.copy_(at::gelu(self)))
ACLNN(GeluV2, (T self, int64_t tanh, T out), out.copy_(at::gelu(self, tanh != 0 ? "tanh" : "none")))
ACLNN(Softplus, (T self, S beta, S threshold, T out), out.copy_(at::softplus(self, beta, threshold)))
ACLNN(SWhere, (T condition, T self, T other, T out), out.copy_(at::where(condition, self, other)))

ACLNN(Cast, (T self, D, T out), out.copy_(self))
ACLNN(InplaceCopy, (T self, T source), self.copy_(source))
ACLNN(InplaceFillScalar, (T self, S value), self.fill_(value))
ACLNN(InplaceFillTensor, (T self, T value), self.fill_(value.reshape({})))
ACLNN(InplaceOne, (T self), self.fill_(1))
ACLNN(InplaceZero, (T self), self.zero_())
ACLNN(InplaceMaskedFillScalar, (T self, T mask, S value), self.masked_fill_(mask, value))
ACLNN(InplaceMaskedFillTensor, (T self, T mask, T value), self.masked_fill_(mask, value.reshape({})))
ACLNN(Arange, (S start, S end, S step, T out),
      out.copy_(at::arange(start, end, step, at::TensorOptions(out.scalar_type())).narrow(0, 0, out.numel())))
ACLNN(Eye, (int64_t rows, int64_t columns, T out), out.copy_(at::eye(rows, columns, out.options())))

// The numbers differ from the device's and from the CPU's: only the distribution and the seed hold.
namespace {
at::Generator generator(int64_t seed, int64_t offset) {
  return at::detail::createCPUGenerator(static_cast<uint64_t>(seed) * 0x9e3779b97f4a7c15ULL + static_cast<uint64_t>(offset));
}
}  // namespace
ACLNN(InplaceNormal, (T self, float mean, float deviation, int64_t seed, int64_t offset),
      self.normal_(mean, deviation, generator(seed, offset)))
ACLNN(NormalFloatFloat, (float mean, float deviation, int64_t seed, int64_t offset, T out),
      out.normal_(mean, deviation, generator(seed, offset)))
ACLNN(InplaceUniform, (T self, double from, double to, int64_t seed, int64_t offset),
      self.uniform_(from, to, generator(seed, offset)))
ACLNN(InplaceRandom, (T self, int64_t from, int64_t to, int64_t seed, int64_t offset),
      self.random_(from, to, generator(seed, offset)))
// clang-format on
