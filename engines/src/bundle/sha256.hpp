// SHA-256 of files.
#pragma once

#include <filesystem>
#include <string>

namespace tformer {

/// Hex SHA-256 of a file. Throws Error where it cannot be read.
std::string sha256_of_file(const std::filesystem::path& path);

/// Hex SHA-256 of bytes.
std::string sha256_of(const std::string& bytes);

}  // namespace tformer
