#include "native/listed.hpp"

#include <cstring>

namespace tformer::native {
namespace {

using kernels::lanes;
using kernels::padded;

/// 4 bytes of some outputs of [panels][units][16], in the same layout; zeros behind the last.
Block gathered(const void* from, std::int64_t units, const std::vector<std::int32_t>& ids, Memory& memory) {
  const auto count = static_cast<std::int64_t>(ids.size());
  Block to = memory.take(size(padded(count) * units));
  std::memset(to.data(), 0, size(padded(count) * units) * sizeof(float));
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t id = ids[size(i)];
    const float* source = static_cast<const float*>(from) + id / lanes * units * lanes + id % lanes;
    float* target = to.data() + i / lanes * units * lanes + i % lanes;
    for (std::int64_t unit = 0; unit < units; ++unit) std::memcpy(target + unit * lanes, source + unit * lanes, sizeof(float));
  }
  return to;
}

}  // namespace

ShortlistWeights::ShortlistWeights(const kernels::Matrix& all, std::vector<std::int32_t> tokens, Memory& memory)
    : ids(std::move(tokens)), matrix(all),
      weights_(gathered(all.weights, kernels::panel_bytes(all) / (4 * lanes), ids, memory)) {
  const std::int64_t groups = all.numbers == kernels::Numbers::int4 ? padded(all.inputs, all.group) / all.group : 1;
  if (all.scales) scales_ = gathered(all.scales, groups, ids, memory);
  if (all.sums) sums_ = gathered(all.sums, 1, ids, memory);
  if (all.bias) bias_ = gathered(all.bias, 1, ids, memory);
  matrix.outputs = static_cast<std::int64_t>(ids.size());
  matrix.weights = weights_.data();
  matrix.scales = scales_.data();
  matrix.sums = reinterpret_cast<const std::int32_t*>(sums_.data());
  matrix.bias = bias_.data();
}

}  // namespace tformer::native
