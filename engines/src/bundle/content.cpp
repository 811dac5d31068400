#include "bundle/content.hpp"

#ifdef _WIN32
#define NOMINMAX
#include <windows.h>
#else
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#endif

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <new>

#include "bundle/files.hpp"
#include "errors.hpp"

namespace tformer {
namespace {

Error unmapped(const std::filesystem::path& path, bool full) {
  if (full) return Error(Status::no_memory, "no memory to map " + path.string() + ": free some");
  return Error(Status::bundle, path.string() + " cannot be mapped into memory: copy it again");
}

}  // namespace

#ifdef _WIN32

Content mapped(const std::filesystem::path& path) {
  const HANDLE file = ::CreateFileW(path.c_str(), GENERIC_READ, FILE_SHARE_READ | FILE_SHARE_DELETE, nullptr,
                                    OPEN_EXISTING, FILE_ATTRIBUTE_NORMAL, nullptr);
  if (file == INVALID_HANDLE_VALUE) throw unreadable(path, ::GetLastError() == ERROR_ACCESS_DENIED ? EACCES : 0);
  LARGE_INTEGER size = {};
  const bool empty = ::GetFileSizeEx(file, &size) && size.QuadPart == 0;
  void* found = nullptr;
  if (const HANDLE mapping = empty ? nullptr : ::CreateFileMappingW(file, nullptr, PAGE_READONLY, 0, 0, nullptr)) {
    found = ::MapViewOfFile(mapping, FILE_MAP_READ, 0, 0, 0);
    ::CloseHandle(mapping);
  }
  const bool full = ::GetLastError() == ERROR_NOT_ENOUGH_MEMORY;
  ::CloseHandle(file);
  if (empty) return {};
  if (!found) throw unmapped(path, full);
  const auto bytes = static_cast<std::size_t>(size.QuadPart);
  return {found, bytes, std::shared_ptr<const void>(found, [](const void* it) { ::UnmapViewOfFile(it); })};
}

#else

Content mapped(const std::filesystem::path& path) {
  const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) throw unreadable(path, errno);
  struct stat about = {};
  void* found = MAP_FAILED;
  if (::fstat(file, &about) == 0) {
    const auto size = static_cast<std::size_t>(about.st_size);
    found = size ? ::mmap(nullptr, size, PROT_READ, MAP_SHARED, file, 0) : nullptr;
  }
  const bool full = errno == ENOMEM;
  ::close(file);
  if (found == MAP_FAILED) throw unmapped(path, full);
  if (!found) return {};
  const auto size = static_cast<std::size_t>(about.st_size);
  return {found, size, std::shared_ptr<const void>(found, [size](void* it) { ::munmap(it, size); })};
}

#endif

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
