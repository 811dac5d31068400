// Cache buffers of in-place steps, and a pool that reuses the memory of earlier batches.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "ort/library.hpp"

namespace tformer {

/// The memory pool of one engine. A fresh page costs more than what is copied into it, so the memory of a freed buffer
/// is kept for the next: used and idle memory together, at most `kept` times the most that was in use at once.
class BufferPool {
 public:
  BufferPool() = default;
  BufferPool(const BufferPool&) = delete;
  BufferPool& operator=(const BufferPool&) = delete;
  ~BufferPool();
  /// A block of at least `bytes`, and its size; null where memory is full.
  std::pair<float*, std::size_t> take(std::size_t bytes);
  void give(float* memory, std::size_t bytes);

 private:
  static constexpr double kept = 1.25;
  static constexpr double loose = 1.5;  // a block is reused for buffers down to 1 / this of its size

  std::vector<std::pair<float*, std::size_t>> idle_;   // oldest first
  std::size_t given_ = 0;                              // blocks in use
  std::size_t used_ = 0, unused_ = 0, most_used_ = 0;  // bytes

  void free_oldest();
};

/// A tensor over pool memory, uninitialized.
class Buffer {
 public:
  /// Throws Error where there is no memory.
  Buffer(const std::vector<std::int64_t>& shape, const std::shared_ptr<BufferPool>& pool);
  float* data() const { return memory_.get(); }
  const Ort::Value& value() const { return value_; }
  Ort::Value& value() { return value_; }

 private:
  struct Return {
    std::shared_ptr<BufferPool> pool;
    std::size_t bytes;
    void operator()(float* memory) const { pool->give(memory, bytes); }
  };
  std::unique_ptr<float, Return> memory_;
  Ort::Value value_{nullptr};
};

}  // namespace tformer
