// Fills the kernel table of one instruction set.
#pragma once

#include "kernels/attention.hpp"
#include "kernels/output.hpp"
#include "kernels/product.hpp"

namespace tformer::kernels {
namespace {

template <class V, typename V::F (*function)(typename V::F)>
void all(const float* x, float* y, std::int64_t count) {
  over(count, [&](std::int64_t i, std::int64_t n) TFORMER_LAMBDA { put<V>(y + i, function(get<V>(x + i, n)), n); });
}

/// `multiply`: products, also of the output layer.
template <class V, void (*multiply)(const Product&, const Piece&) = product<V>>
constexpr Kernels table_of(const char* name) {
  return {name,           elementwise<V>,  round_groups<V>, multiply,
          norm<V>,        embed<V>,        recur<V>,        attend_self<V>,  pack_source<V>,
          attend_shared<V>, start_output<V>, output<V, multiply>, finish_output<V>,
          all<V, exp<V>>, all<V, log<V>>, all<V, erf<V>>};
}

}  // namespace
}  // namespace tformer::kernels
