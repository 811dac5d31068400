// A bundle's file in memory.
#pragma once

#include <cstddef>
#include <filesystem>
#include <string_view>
#include <utility>

namespace tformer {

/// A file mapped into memory, which processes that read it share. An empty file has no data.
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
  std::string_view view() const { return {reinterpret_cast<const char*>(data_), size_}; }

 private:
  const std::byte* data_ = nullptr;
  std::size_t size_ = 0;
};

}  // namespace tformer
