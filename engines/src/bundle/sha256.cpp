#include "bundle/sha256.hpp"

#define OPENSSL_SUPPRESS_DEPRECATED  // the functions without EVP, which take no more of the library than SHA-256 itself
#include <openssl/sha.h>

#include <array>
#include <cerrno>
#include <fstream>
#include <memory>

#include "bundle/files.hpp"

namespace tformer {
namespace {

constexpr std::size_t chunk_bytes = std::size_t{1} << 18;

std::string finished(SHA256_CTX& context) {
  std::array<unsigned char, SHA256_DIGEST_LENGTH> digest{};
  SHA256_Final(digest.data(), &context);
  return hex({reinterpret_cast<const char*>(digest.data()), digest.size()});
}

}  // namespace

std::string sha256_of_file(const std::filesystem::path& path) {
  errno = 0;
  std::ifstream file(path, std::ios::binary);
  if (!file) throw unreadable(path, errno);
  SHA256_CTX context;
  SHA256_Init(&context);
  const auto buffer = std::make_unique<unsigned char[]>(chunk_bytes);
  while (file) {
    file.read(reinterpret_cast<char*>(buffer.get()), static_cast<std::streamsize>(chunk_bytes));
    SHA256_Update(&context, buffer.get(), static_cast<std::size_t>(file.gcount()));
  }
  if (!file.eof()) throw unreadable(path, errno);
  return finished(context);
}

std::string sha256_of(std::string_view bytes) {
  SHA256_CTX context;
  SHA256_Init(&context);
  SHA256_Update(&context, bytes.data(), bytes.size());
  return finished(context);
}

std::string hex(std::string_view bytes) {
  static constexpr char digits[] = "0123456789abcdef";
  std::string text;
  for (const char byte : bytes) {
    text += digits[static_cast<unsigned char>(byte) >> 4];
    text += digits[static_cast<unsigned char>(byte) & 15];
  }
  return text;
}

}  // namespace tformer
