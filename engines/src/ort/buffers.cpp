#include "ort/buffers.hpp"

#include <algorithm>
#include <numeric>

#include "errors.hpp"
#include "ort/graphs.hpp"
#include "system.hpp"

namespace tformer {
namespace {

constexpr std::size_t alignment = 64;

double bytes_of(std::size_t count) { return static_cast<double>(count); }

}  // namespace

BufferPool::~BufferPool() {
  while (!idle_.empty()) free_oldest();
}

void BufferPool::free_oldest() {
  unused_ -= idle_.front().second;
  system::release(idle_.front().first);
  idle_.erase(idle_.begin());
}

std::pair<float*, std::size_t> BufferPool::take(std::size_t bytes) {
  idle_.reserve(idle_.size() + given_ + 1);  // so that `give` never fails
  auto found = idle_.end();
  for (auto it = idle_.begin(); it != idle_.end(); ++it) {
    const bool fits = it->second >= bytes && bytes_of(it->second) <= loose * bytes_of(bytes);
    if (fits && (found == idle_.end() || it->second < found->second)) found = it;
  }
  std::pair<float*, std::size_t> block{nullptr, bytes};
  if (found != idle_.end()) {
    block = *found;
    idle_.erase(found);
    unused_ -= block.second;
  }
  most_used_ = std::max(most_used_, used_ + block.second);
  if (!block.first) {
    while (!idle_.empty() && bytes_of(used_ + unused_ + bytes) > kept * bytes_of(most_used_)) free_oldest();
    block.first = static_cast<float*>(system::allocate(alignment, bytes));
  }
  if (block.first) {
    used_ += block.second;
    ++given_;
  }
  return block;
}

void BufferPool::give(float* memory, std::size_t bytes) {
  --given_;
  used_ -= bytes;
  unused_ += bytes;
  idle_.emplace_back(memory, bytes);
}

Buffer::Buffer(const std::vector<std::int64_t>& shape, const std::shared_ptr<BufferPool>& pool) {
  const auto count =
      static_cast<std::size_t>(std::accumulate(shape.begin(), shape.end(), std::int64_t{1}, std::multiplies<>()));
  const auto [memory, bytes] =
      pool->take(std::max(alignment, (count * sizeof(float) + alignment - 1) / alignment * alignment));
  if (!memory) throw Error(Status::no_memory, "no memory for caches of " + shown(shape) + ": use smaller batches");
  memory_ = std::unique_ptr<float, Return>(memory, Return{pool, bytes});
  value_ = tensor(memory, shape);
}

}  // namespace tformer
