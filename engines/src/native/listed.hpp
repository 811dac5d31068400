// The part of the output layer that belongs to a list of tokens.
#pragma once

#include <cstdint>
#include <vector>

#include "engine.hpp"
#include "kernels/kernels.hpp"
#include "native/memory.hpp"

namespace tformer::native {

/// Some outputs of a matrix, one behind the other, copied.
struct ShortlistWeights {
  std::vector<std::int32_t> ids;  // in order
  kernels::Matrix matrix;

  ShortlistWeights(const kernels::Matrix& all, std::vector<std::int32_t> tokens, Memory& memory);

 private:
  Block weights_, scales_, sums_, bias_;
};

}  // namespace tformer::native
