// The bytes of a bundle's file.
#pragma once

#include <cstddef>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

namespace tformer {

/// Bytes that stay as long as a copy of this lives: a mapped file, or somebody's memory. An empty file may have no data.
class Content {
 public:
  Content() = default;
  Content(const void* data, std::size_t size, std::shared_ptr<const void> owner)
      : data_(static_cast<const std::byte*>(data)), size_(size), owner_(std::move(owner)) {}
  const std::byte* data() const { return data_; }
  std::size_t size() const { return size_; }
  std::string_view view() const { return {reinterpret_cast<const char*>(data_), size_}; }

 private:
  const std::byte* data_ = nullptr;
  std::size_t size_ = 0;
  std::shared_ptr<const void> owner_;
};

/// A file mapped into memory, which processes that read it share. Throws Error.
Content mapped(const std::filesystem::path& path);

/// The bytes of a text.
Content content_of(std::string text);

/// The same bytes at an address that is a multiple of 64; a copy, unless they lie at one.
Content aligned(const Content& content);

}  // namespace tformer
