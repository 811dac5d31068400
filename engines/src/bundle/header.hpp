// Headers: the JSON file that identifies a folder as a bundle or as plans, by format, version and schema.
#pragma once

#include <string>

#include "bundle/files.hpp"

namespace tformer {

/// Format versions that can be read.
struct Versions {
  std::int64_t oldest, newest;
};

/// Read the header of a `kind` of one of these versions, and check it against its schema. Throws Error.
Json read_header(const Folder& directory, const std::string& name, const std::string& kind,
                 Versions versions, const Json& schema);

/// Compare a file with the SHA-256 that the header of a `kind` records. Throws Error.
void verify_file(const Folder& directory, const std::string& name, const std::string& sha256,
                 const std::string& kind);

/// The message for a damaged header.
std::string damaged(const std::filesystem::path& path, const std::string& wrong);

}  // namespace tformer
