#include "bundle/mapped.hpp"

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

#include "bundle/files.hpp"
#include "errors.hpp"

namespace tformer {
namespace {

Error unmapped(const std::filesystem::path& path) {
  return Error(Status::bundle, path.string() + " cannot be mapped into memory: copy it again");
}

}  // namespace

#ifdef _WIN32

Mapped::Mapped(const std::filesystem::path& path) {
  const HANDLE file = ::CreateFileW(path.c_str(), GENERIC_READ, FILE_SHARE_READ | FILE_SHARE_DELETE, nullptr,
                                    OPEN_EXISTING, FILE_ATTRIBUTE_NORMAL, nullptr);
  if (file == INVALID_HANDLE_VALUE) throw unreadable(path, ::GetLastError() == ERROR_ACCESS_DENIED ? EACCES : 0);
  LARGE_INTEGER size = {};
  bool done = ::GetFileSizeEx(file, &size) && size.QuadPart == 0;
  if (const HANDLE mapping = done ? nullptr : ::CreateFileMappingW(file, nullptr, PAGE_READONLY, 0, 0, nullptr)) {
    data_ = static_cast<const std::byte*>(::MapViewOfFile(mapping, FILE_MAP_READ, 0, 0, 0));
    done = data_ != nullptr;
    ::CloseHandle(mapping);
  }
  ::CloseHandle(file);
  if (!done) throw unmapped(path);
  size_ = static_cast<std::size_t>(size.QuadPart);
}

Mapped::~Mapped() {
  if (data_) ::UnmapViewOfFile(data_);
}

#else

Mapped::Mapped(const std::filesystem::path& path) {
  const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) throw unreadable(path, errno);
  struct stat about = {};
  void* found = MAP_FAILED;
  if (::fstat(file, &about) == 0) {
    const auto size = static_cast<std::size_t>(about.st_size);
    found = size ? ::mmap(nullptr, size, PROT_READ, MAP_SHARED, file, 0) : nullptr;
  }
  ::close(file);
  if (found == MAP_FAILED) throw unmapped(path);
  data_ = static_cast<const std::byte*>(found);
  size_ = static_cast<std::size_t>(about.st_size);
}

Mapped::~Mapped() {
  if (data_) ::munmap(const_cast<std::byte*>(data_), size_);
}

#endif

Mapped& Mapped::operator=(Mapped&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

}  // namespace tformer
