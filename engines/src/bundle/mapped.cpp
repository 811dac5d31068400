#include "bundle/mapped.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>

#include "bundle/files.hpp"
#include "errors.hpp"

namespace tformer {

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
  if (found == MAP_FAILED) throw Error(Status::bundle, path.string() + " cannot be mapped into memory: copy it again");
  data_ = static_cast<const std::byte*>(found);
  size_ = static_cast<std::size_t>(about.st_size);
}

Mapped& Mapped::operator=(Mapped&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

Mapped::~Mapped() {
  if (data_) ::munmap(const_cast<std::byte*>(data_), size_);
}

}  // namespace tformer
