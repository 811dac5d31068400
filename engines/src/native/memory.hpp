// Memory of caches: what a sentence leaves waits for the next, as a page that the system gives costs more than a copy.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

namespace tformer::native {

constexpr std::size_t line = 64;  // bytes; where blocks begin

class Memory;

/// Some memory without first values, at a multiple of `line`.
class Block {
 public:
  Block() = default;
  Block(std::shared_ptr<Memory> owner, float* data, std::size_t bytes)
      : owner_(std::move(owner)), data_(data), bytes_(bytes) {}
  Block(Block&& other) noexcept { *this = std::move(other); }
  Block& operator=(Block&& other) noexcept;
  ~Block();
  float* data() const { return data_; }

 private:
  std::shared_ptr<Memory> owner_;
  float* data_ = nullptr;
  std::size_t bytes_ = 0;
};

/// Of one engine. For one thread.
class Memory : public std::enable_shared_from_this<Memory> {
 public:
  ~Memory();
  /// A block of at least `count` floats. Throws Error where there is none.
  Block take(std::size_t count);

 private:
  friend class Block;
  struct Idle {
    float* data;
    std::size_t bytes;
  };
  std::vector<Idle> idle_;  // oldest first
  std::size_t used_ = 0, unused_ = 0, most_used_ = 0;  // bytes

  void give(float* data, std::size_t bytes);
  void free_oldest();
};

}  // namespace tformer::native
