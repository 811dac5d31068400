#include "bundle/header.hpp"

#include "bundle/schema.hpp"
#include "bundle/sha256.hpp"
#include "errors.hpp"

namespace fs = std::filesystem;

namespace tformer {

std::string damaged(const fs::path& path, const std::string& wrong) { return path.string() + " is damaged: " + wrong; }

void verify_file(const Folder& directory, const std::string& name, const std::string& sha256,
                 const std::string& kind) {
  const std::string found = directory.source() ? sha256_of(content(directory, name).view())
                                               : sha256_of_file(member(directory, name));
  if (found == sha256) return;
  throw Error(Status::bundle, kind + " " + directory.string() + " is damaged: " + name +
                                  " does not match its SHA-256 as recorded; copy or make it again");
}

namespace {

/// What was found instead of a header, and what was expected.
std::string instead(const Folder& folder, const std::string& name, const std::string& kind) {
  const std::string wanted = kind == "bundle" ? "; a bundle is a folder that tformer export writes" : "";
  if (folder.source()) return "it has no " + name + wanted;
  const fs::path& directory = folder.path();
  std::error_code unused;
  if (!fs::is_directory(directory, unused)) {
    return (fs::exists(directory, unused) ? "it is a file" : "there is no such folder") + wanted;
  }
  const std::pair<const char*, const char*> others[] = {
      {"manifest.json", "a bundle: give the run folder that it was exported from"},
      {"checkpoint.json", "a run folder: make a bundle of it with tformer export"},
      {"config.json", "another tool's model: make a run folder of it with tformer import"},
  };
  const std::string lacks = "it has no " + name;
  for (const auto& [other, what] : others) {
    if (fs::is_regular_file(directory / other, unused)) return lacks + "; it is " + what;
  }
  return lacks + wanted;
}

}  // namespace

Json read_header(const Folder& directory, const std::string& name, const std::string& kind, Versions versions,
                 const Json& schema) {
  const fs::path path = directory.path() / name;
  const std::string again = "make the " + kind + " again";
  const auto refuse = [](const std::string& message) { throw Error(Status::bundle, message); };
  if (!exists(directory, name)) refuse(directory.string() + " is not a " + kind + ": " + instead(directory, name, kind));
  Json header = read_json(directory, name, header_bytes);
  for (const char* key : {"format", "version"}) {
    if (!header.is_object() || !header.contains(key)) refuse(path.string() + " is damaged ('" + key + "'): " + again);
  }
  const Json &format = header["format"], &stated = header["version"];
  if (format != "tformer-" + kind) {
    refuse(path.string() + " describes a '" +
           (format.is_string() ? format.get<std::string>() : format.dump()).substr(0, 80) + "', not a " + kind);
  }
  const std::string shown = path.string() + " has format version " + stated.dump().substr(0, 40);
  if (!stated.is_number_integer() || stated < 1) refuse(shown + ", which never was: " + again);
  if (stated < versions.oldest) refuse(shown + ", of before the first release: " + again);
  if (stated > versions.newest) {
    refuse(shown + ", this tformer reads up to " + std::to_string(versions.newest) + ": update it");
  }
  const std::string wrong = schema_error(header, schema);
  if (!wrong.empty()) refuse(damaged(path, wrong + "; " + again));
  return header;
}

}  // namespace tformer
