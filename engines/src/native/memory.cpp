#include "native/memory.hpp"

#include <algorithm>
#include <new>
#include <string>
#include <utility>

#include "errors.hpp"
#include "system.hpp"

namespace tformer::native {
namespace {

constexpr double slack = 1.25;  // used plus idle bytes stay below so many times the peak use
constexpr std::size_t page = 4096;

/// Sizes an eighth apart, of which a block that comes back serves more.
std::size_t size_of(std::size_t bytes) {
  std::size_t step = page;
  while (step * 8 < bytes) step *= 2;
  return (bytes + step - 1) / step * step;
}

}  // namespace

Block& Block::operator=(Block&& other) noexcept {
  std::swap(owner_, other.owner_);
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

Block::~Block() {
  if (data_) owner_->give(data_, bytes_);
}

Memory::~Memory() {
  for (const Idle& each : idle_) system::release(each.data);
}

Block Memory::take(std::size_t count) {
  const std::size_t bytes = size_of(count * sizeof(float));
  const auto fits = [bytes](const Idle& each) { return each.bytes == bytes; };
  const auto found = std::find_if(idle_.rbegin(), idle_.rend(), fits);  // the newest, which is nearest in the caches
  float* data = nullptr;
  if (found != idle_.rend()) {
    data = found->data;
    idle_.erase(std::next(found).base());
    unused_ -= bytes;
  } else {
    data = static_cast<float*>(system::allocate(line, bytes));
    if (!data) {
      throw Error(Status::no_memory, "no memory for caches of " + std::to_string(bytes) + " bytes: use smaller batches");
    }
  }
  used_ += bytes;
  most_used_ = std::max(most_used_, used_);
  return {shared_from_this(), data, bytes};
}

void Memory::give(float* data, std::size_t bytes) {
  used_ -= bytes;
  try {
    idle_.push_back({data, bytes});
  } catch (const std::bad_alloc&) {
    system::release(data);
    return;
  }
  unused_ += bytes;
  while (!idle_.empty() && static_cast<double>(used_ + unused_) > slack * static_cast<double>(most_used_)) free_oldest();
}

void Memory::free_oldest() {
  system::release(idle_.front().data);
  unused_ -= idle_.front().bytes;
  idle_.erase(idle_.begin());
}

}  // namespace tformer::native
