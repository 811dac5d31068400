// A file of weights in memory.
#pragma once

#include <cstddef>
#include <filesystem>

namespace tformer::native {

/// A file mapped into memory, which processes that read it share.
class Mapped {
 public:
  Mapped() = default;
  /// Throws Error.
  explicit Mapped(const std::filesystem::path& path);
  Mapped(Mapped&& other) noexcept { *this = std::move(other); }
  Mapped& operator=(Mapped&& other) noexcept;
  ~Mapped();
  const std::byte* data() const { return data_; }
  std::size_t size() const { return size_; }

 private:
  const std::byte* data_ = nullptr;
  std::size_t size_ = 0;
};

}  // namespace tformer::native
