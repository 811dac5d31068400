#include "bundle/content.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <new>

#include "bundle/files.hpp"
#include "errors.hpp"

namespace tformer {

Content mapped(const std::filesystem::path& path) {
  const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) throw unreadable(path, errno);
  struct stat about = {};
  void* found = MAP_FAILED;
  if (::fstat(file, &about) == 0) {
    const auto size = static_cast<std::size_t>(about.st_size);
    found = size ? ::mmap(nullptr, size, PROT_READ, MAP_SHARED, file, 0) : nullptr;
  }
  ::close(file);
  if (found == MAP_FAILED) throw Error(Status::bundle, path.string() + " cannot be mapped into memory: copy it again");
  if (!found) return {};
  const auto size = static_cast<std::size_t>(about.st_size);
  return {found, size, std::shared_ptr<const void>(found, [size](void* it) { ::munmap(it, size); })};
}

Content content_of(std::string text) {
  const auto owner = std::make_shared<const std::string>(std::move(text));
  return {owner->data(), owner->size(), owner};
}

Content aligned(const Content& content) {
  constexpr std::align_val_t unit{64};
  if (reinterpret_cast<std::uintptr_t>(content.data()) % static_cast<std::size_t>(unit) == 0) return content;
  const std::shared_ptr<void> copy(::operator new(content.size(), unit), [](void* it) { ::operator delete(it, unit); });
  std::memcpy(copy.get(), content.data(), content.size());
  return {copy.get(), content.size(), copy};
}

}  // namespace tformer
