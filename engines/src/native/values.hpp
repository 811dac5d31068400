// Where the values of a graph lie: rows of numbers, in memory that later values use again.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "native/memory.hpp"
#include "native/program.hpp"

namespace tformer::native {

class Values {
 public:
  explicit Values(const Code& code);
  /// Have room for so many rows. Values lose what they hold.
  void resize(std::size_t rows, Memory& memory);

  float* floats(const View& view, std::size_t row = 0) const {
    return reinterpret_cast<float*>(at(view.value)) + row * stride(view.value) + view.first;
  }
  float* floats(std::int32_t value, std::size_t row = 0) const {
    return value < 0 ? nullptr : reinterpret_cast<float*>(at(value)) + row * stride(value);
  }
  std::uint8_t* bytes(std::int32_t value, std::size_t row = 0) const {
    return value < 0 ? nullptr : reinterpret_cast<std::uint8_t*>(at(value)) + row * stride(value);
  }
  /// Elements from one row of a value to the next.
  std::size_t stride(std::int32_t value) const { return value < 0 ? 0 : strides_[static_cast<std::size_t>(value)]; }

 private:
  std::vector<std::size_t> strides_, slots_;  // of each value
  std::vector<std::size_t> sizes_;            // bytes of a row of each slot
  std::vector<std::byte*> places_;            // of each slot
  std::size_t rows_ = 0;
  Block block_;

  std::byte* at(std::int32_t value) const { return places_[slots_[static_cast<std::size_t>(value)]]; }
};

}  // namespace tformer::native
