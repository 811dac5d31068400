// The one place that reads the files of bundles, which others may have made: only inside their folder, only up to a size; and JSON.
#pragma once

#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "bundle/source.hpp"
#include "errors.hpp"

namespace tformer {

using Json = nlohmann::json;

constexpr std::uintmax_t header_bytes = 16u << 20;     ///< larger manifests are refused before they are read
constexpr std::uintmax_t tokenizer_bytes = 64u << 20;  ///< and larger tokenizers
constexpr std::size_t most_nesting = 200;              ///< of JSON

/// The error for a file that cannot be read, with the text of `errno`, if it is not 0.
Error unreadable(const std::filesystem::path& path, int why);

/// The path of a regular file in a folder of the file system. Throws Error for one that lies outside or is missing.
std::filesystem::path member(const Folder& directory, const std::string& name);

/// Whether a folder has a file. Throws Error where that cannot be found out.
bool exists(const Folder& directory, const std::string& name);

/// The content of a file in a folder: mapped, or as the folder's source gives it. Throws Error as `member` does.
Content content(const Folder& directory, const std::string& name);

/// The content of a file in a folder, copied. Throws Error beyond `limit` bytes, and as `member` does.
std::string read_bytes(const Folder& directory, const std::string& name, std::uintmax_t limit);

/// Parse JSON. Throws std::invalid_argument, also for what is nested too deeply.
Json parse_json(const std::string& text);

/// Parse a JSON file in a folder. Throws Error.
Json read_json(const Folder& directory, const std::string& name, std::uintmax_t limit);

/// The list "a, b, c".
std::string joined(const std::vector<std::string>& names);

/// The message for an unknown name: the nearest valid one, and the list of all.
std::string unknown(const std::string& kind, const std::string& name, std::vector<std::string> valid);

}  // namespace tformer
