// Where the files of a bundle come from: a folder, or a caller's memory.
#pragma once

#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "bundle/content.hpp"

namespace tformer {

/// The content of a file, named as in the manifest's `files`; none: there is no such file. Throws where it cannot be read.
using Read = std::function<std::optional<Content>(const std::string& name)>;

/// Files that somebody else reads. Thread-safe: reads come one at a time.
class Source {
 public:
  explicit Source(Read read) : read_(std::move(read)) {}
  std::optional<Content> read(const std::string& name);
  /// While one lives, each file is read once, so that what is compared with its hash is what is used.
  std::shared_ptr<const void> keep();

 private:
  Read read_;
  std::mutex lock_;
  std::size_t keeping_ = 0;
  std::map<std::string, std::optional<Content>> kept_;
};

/// A folder of the file system, or of a source.
class Folder {
 public:
  Folder() = default;
  Folder(std::filesystem::path path) : path_(std::move(path)) {}  // not explicit: most folders are paths
  /// All of a source; `name` stands for its path in messages.
  Folder(std::shared_ptr<Source> source, const std::string& name)
      : path_(name), root_(name), source_(std::move(source)) {}
  Folder operator/(const std::string& name) const {
    Folder inner = *this;
    inner.path_ /= name;
    inner.inside_ += name + "/";
    return inner;
  }

  /// In the file system, unless there is a source.
  const std::filesystem::path& path() const { return path_; }
  std::string string() const { return path_.string(); }
  /// The outermost folder of a source, whose name messages have.
  const std::string& root() const { return root_; }
  /// Null: a folder of the file system.
  Source* source() const { return source_.get(); }
  /// The name that the source has for a file of this folder.
  std::string name(const std::string& file) const { return inside_ + file; }
  /// As Source's; null without one.
  std::shared_ptr<const void> keep() const { return source_ ? source_->keep() : nullptr; }

 private:
  std::filesystem::path path_;
  std::string root_;
  std::shared_ptr<Source> source_;
  std::string inside_;
};

}  // namespace tformer
