// SHA-256 of files.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>

namespace tformer {

/// Hex SHA-256 of a file. Throws Error where it cannot be read.
std::string sha256_of_file(const std::filesystem::path& path);

/// Bytes as hexadecimal digits, two each.
std::string hex(std::string_view bytes);

}  // namespace tformer
