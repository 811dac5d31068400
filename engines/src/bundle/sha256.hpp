// SHA-256.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>

namespace tformer {

/// Hex SHA-256 of a file. Throws Error where it cannot be read.
std::string sha256_of_file(const std::filesystem::path& path);

/// Hex SHA-256 of bytes.
std::string sha256_of(std::string_view bytes);

/// Bytes as hexadecimal digits, two each.
std::string hex(std::string_view bytes);

}  // namespace tformer
