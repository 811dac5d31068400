// Reading what others may have written: files within their folder, of a size that is expected, JSON.
#pragma once

#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "errors.hpp"

namespace tformer {

using Json = nlohmann::json;

constexpr std::uintmax_t header_bytes = 16u << 20;     ///< larger manifests are refused before they are read
constexpr std::uintmax_t tokenizer_bytes = 64u << 20;  ///< and larger tokenizers
constexpr std::size_t most_nesting = 200;              ///< of JSON

/// The error for a file that cannot be read, with the system's words for the `errno` that says why; 0: nothing says it.
Error unreadable(const std::filesystem::path& path, int why);

/// A regular file of a directory, by its relative name. Throws Error for one that lies elsewhere or is missing.
std::filesystem::path member(const std::filesystem::path& directory, const std::string& name);

/// What a file of a directory holds. Throws Error beyond `limit` bytes, and as `member` does.
std::string read_bytes(const std::filesystem::path& directory, const std::string& name, std::uintmax_t limit);

/// JSON of a text. Throws std::invalid_argument, also for what is nested too deeply.
Json parse_json(const std::string& text);

/// A JSON file of a directory. Throws Error.
Json read_json(const std::filesystem::path& directory, const std::string& name, std::uintmax_t limit);

/// The name and value list "a, b, c".
std::string joined(const std::vector<std::string>& names);

/// An unknown name, with the nearest valid one and the list of all, as a message.
std::string unknown(const std::string& kind, const std::string& name, std::vector<std::string> valid);

}  // namespace tformer
