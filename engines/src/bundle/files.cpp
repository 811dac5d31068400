#include "bundle/files.hpp"

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <numeric>
#include <stdexcept>
#include <string_view>
#include <system_error>

#include "errors.hpp"

namespace fs = std::filesystem;

namespace tformer {
namespace {

/// The Levenshtein distance of two names.
std::size_t distance(const std::string& a, const std::string& b) {
  std::vector<std::size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), std::size_t{0});
  for (std::size_t i = 1; i <= a.size(); ++i) {
    std::size_t corner = row[0];
    row[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t changed = corner + (a[i - 1] != b[j - 1]);
      corner = row[j];
      row[j] = std::min({changed, row[j] + 1, row[j - 1] + 1});
    }
  }
  return row.back();
}

constexpr std::string_view pointer_begin = "version https://git-lfs.github.com/spec/";
constexpr std::uintmax_t largest_pointer = 1023;

/// Whether a file is a Git LFS pointer instead of the real file.
bool is_pointer(const fs::path& path) {
  std::error_code unknown_size;
  if (fs::file_size(path, unknown_size) > largest_pointer || unknown_size) return false;
  std::string found(pointer_begin.size(), '\0');
  std::ifstream file(path, std::ios::binary);
  file.read(found.data(), static_cast<std::streamsize>(found.size()));
  return file && found == pointer_begin;
}

Error incomplete(const std::string& directory, const std::string& name) {
  return {Status::bundle, directory + " is incomplete: " + name + " is missing; copy or make it again"};
}

Error pointer(const fs::path& path) {
  return {Status::bundle,
          path.string() + " is a pointer of Git LFS, not the file: run git lfs pull where it was cloned"};
}

Error too_large(const fs::path& path, std::uintmax_t size, std::uintmax_t limit) {
  return {Status::bundle, path.string() + " has " + std::to_string(size) + " bytes, more than " +
                              std::to_string(limit) + ": make it again"};
}

/// The content of a file of a source.
Content sourced(const Folder& directory, const std::string& name) {
  const std::optional<Content> found = directory.source()->read(directory.name(name));
  if (!found) throw incomplete(directory.root(), directory.name(name));
  if (found->size() <= largest_pointer && found->view().substr(0, pointer_begin.size()) == pointer_begin) {
    throw pointer(directory.path() / name);
  }
  return *found;
}

}  // namespace

Error unreadable(const fs::path& path, int why) {
  const bool too_many = why == EMFILE || why == ENFILE;
  const char* fix = too_many ? "close files, or raise ulimit -n" : why == EACCES ? "get the permission" : "copy it again";
  const std::string words = why ? std::generic_category().message(why) + ": " : "";
  return {Status::bundle, path.string() + " cannot be read: " + words + fix};
}

fs::path member(const Folder& directory, const std::string& name) {
  const fs::path path = directory.path() / name;
  std::error_code missing;
  const fs::path root = fs::canonical(directory.path(), missing);
  const fs::path real = missing ? fs::path() : fs::weakly_canonical(path, missing);
  if (!missing) {
    const auto [end, unused] = std::mismatch(root.begin(), root.end(), real.begin(), real.end());
    if (end != root.end()) {
      throw Error(Status::bundle, path.string() + " lies outside " + directory.string() +
                                      ": copy it into the folder, links as the files that they lead to (cp -rL), "
                                      "or make the folder again");
    }
  }
  const fs::file_status status = missing ? fs::file_status() : fs::status(path, missing);
  if (missing == std::errc::permission_denied) throw unreadable(path, EACCES);
  if (missing || !fs::exists(status)) throw incomplete(directory.string(), name);
  if (!fs::is_regular_file(status)) {
    throw Error(Status::bundle, path.string() + " is no regular file: copy or make it again");
  }
  if (is_pointer(path)) throw pointer(path);
  return path;
}

bool exists(const Folder& directory, const std::string& name) {
  if (directory.source()) return directory.source()->read(directory.name(name)).has_value();
  std::error_code problem;
  const fs::path path = directory.path() / name;
  const bool found = fs::exists(path, problem);
  if (problem) throw unreadable(path, problem.value());
  return found;
}

Content content(const Folder& directory, const std::string& name) {
  return directory.source() ? sourced(directory, name) : mapped(member(directory, name));
}

std::string read_bytes(const Folder& directory, const std::string& name, std::uintmax_t limit) {
  if (directory.source()) {
    const Content found = sourced(directory, name);
    if (found.size() > limit) throw too_large(directory.path() / name, found.size(), limit);
    return std::string(found.view());
  }
  const fs::path path = member(directory, name);
  std::error_code problem;
  const std::uintmax_t size = fs::file_size(path, problem);
  if (problem) throw unreadable(path, problem.value());
  if (size > limit) throw too_large(path, size, limit);
  errno = 0;
  std::ifstream file(path, std::ios::binary);
  std::string content(static_cast<std::size_t>(size), '\0');
  file.read(content.data(), static_cast<std::streamsize>(size));
  if (!file || file.gcount() != static_cast<std::streamsize>(size)) {
    throw unreadable(path, errno);
  }
  return content;
}

Json parse_json(const std::string& text) {
  // The parser would end at the one and skip the other, where Python's takes neither.
  if (text.find('\0') != std::string::npos) throw std::invalid_argument("it has a byte 0");
  if (text.rfind("\xEF\xBB\xBF", 0) == 0) throw std::invalid_argument("it begins with a byte order mark");
  std::size_t depth = 0;
  bool quoted = false;
  for (std::size_t i = 0; i < text.size(); ++i) {  // before the parser makes objects that are destroyed one in another
    if (quoted) {
      if (text[i] == '\\') ++i;
      else if (text[i] == '"') quoted = false;
    } else if (text[i] == '"') quoted = true;
    else if (text[i] == '[' || text[i] == '{') ++depth;
    else if ((text[i] == ']' || text[i] == '}') && depth) --depth;
    if (depth > most_nesting) throw std::invalid_argument("it is nested too deeply");
  }
  try {
    return Json::parse(text);
  } catch (const Json::exception& error) {
    const std::string said = error.what();  // "[json.exception.parse_error.101] parse error at ..."
    const std::size_t words = said.find("] ");
    throw std::invalid_argument(words == std::string::npos ? said : said.substr(words + 2));
  }
}

Json read_json(const Folder& directory, const std::string& name, std::uintmax_t limit) {
  const std::string content = read_bytes(directory, name, limit);
  try {
    return parse_json(content);
  } catch (const std::invalid_argument& error) {
    throw Error(Status::bundle,
                (directory / name).string() + " is damaged (" + error.what() + "): make it again");
  }
}

std::string joined(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : ", ") + name;
  return text;
}

std::string unknown(const std::string& kind, const std::string& name, std::vector<std::string> valid) {
  std::sort(valid.begin(), valid.end());
  const std::string shown = name.substr(0, 80);
  std::string near;
  std::size_t fewest = shown.size() / 2 + 1;
  for (const std::string& each : valid) {
    const std::size_t changes = distance(shown, each);
    if (changes < fewest) {
      fewest = changes;
      near = each;
    }
  }
  const std::string hint = near.empty() ? "" : "did you mean '" + near + "'? ";
  return "unknown " + kind + " '" + shown + "': " + hint + "valid: " + joined(valid);
}

}  // namespace tformer
