// Caches of steps in place, and the memory that those of earlier batches have left.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "ort/library.hpp"

namespace tformer {

/// Memory of the buffers of one engine. A page that the system gives costs more than what is copied into it, so the
/// memory of a buffer that is freed waits for the next: in use or not, at most `kept` times what was in use at once.
class Pool {
 public:
  Pool() = default;
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;
  ~Pool();
  /// Memory of at least `bytes`, and its size. Null where there is none.
  std::pair<float*, std::size_t> take(std::size_t bytes);
  void give(float* memory, std::size_t bytes);

 private:
  static constexpr double kept = 1.25;
  static constexpr double loose = 1.5;  // what memory may be larger than a buffer that gets it

  std::vector<std::pair<float*, std::size_t>> idle_;   // oldest first
  std::size_t given_ = 0;                              // blocks in use
  std::size_t used_ = 0, unused_ = 0, most_used_ = 0;  // bytes

  void free_oldest();
};

/// A tensor of ours, without first values.
class Buffer {
 public:
  /// Throws Error where there is no memory.
  Buffer(const std::vector<std::int64_t>& shape, const std::shared_ptr<Pool>& pool);
  float* data() const { return memory_.get(); }
  const Ort::Value& value() const { return value_; }
  Ort::Value& value() { return value_; }

 private:
  struct Return {
    std::shared_ptr<Pool> pool;
    std::size_t bytes;
    void operator()(float* memory) const { pool->give(memory, bytes); }
  };
  std::unique_ptr<float, Return> memory_;
  Ort::Value value_{nullptr};
};

}  // namespace tformer
