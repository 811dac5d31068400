// The directory that is shipped: manifest.json, tokenizers, graphs. Versioned, hashed, self-describing.
#pragma once

#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "bundle/contract.hpp"
#include "bundle/files.hpp"

namespace tformer {

/// An opened bundle. Immutable.
class Bundle {
 public:
  /// Read the manifest and check it; `verified`: files are compared with their hashes when they are used. Throws Error.
  static Bundle open(const std::filesystem::path& directory, bool verified);

  const std::filesystem::path& directory() const { return directory_; }
  const Model& model() const { return model_; }
  const Json& manifest() const { return manifest_; }
  /// How the graphs of a variant were made; "": the standard ones.
  const Recipe& recipe(const std::string& variant) const { return recipes_.at(variant); }
  /// A name as a user gives it to the variant that runs: none is the default, `fp32` the standard graphs. Throws Error.
  std::string chosen(const std::string& name) const;
  /// The variant with graphs for TensorRT. Throws Error where there is none, or of a version that is not known.
  std::string trt_variant() const;
  /// The variants of target native.
  std::vector<std::string> programs() const;
  /// Where the graphs of a variant lie.
  std::filesystem::path folder(const std::string& variant) const;
  /// The file of a graph.
  std::filesystem::path graph(const std::string& name, const std::string& variant) const;
  /// Whether a variant has a graph that not every model has.
  bool lists(const std::string& graph, const std::string& variant) const;
  /// Compare files with their hashes, unless that is switched off. Throws Error.
  void verify(const std::vector<std::string>& names) const;
  /// Names in the manifest of the files that some graphs of a variant use, and of their weights.
  std::vector<std::string> graph_files(const std::vector<std::string>& graphs, const std::string& variant) const;
  /// Whether files are compared with their hashes.
  bool verified() const { return verified_; }
  /// Throws Error where a variant has graphs that this version does not know how to feed.
  void require_kinds(const std::string& variant) const;
  /// Compare the manifest, which has no hash, with what stands inside a graph's file. Throws Error.
  void check_metadata(const std::string& name, const std::map<std::string, std::string>& metadata,
                      const std::string& variant) const;
  /// SHA-256 of each tokenizer's file, by its name.
  std::map<std::string, std::string> tokenizer_hashes() const;

 private:
  std::filesystem::path directory_;
  Json manifest_;
  Model model_;
  std::map<std::string, Recipe> recipes_;
  std::string default_;  // the variant that runs where none is named; empty: the standard graphs
  bool verified_ = true;

  std::filesystem::path manifest_path() const;
  const Json& part(const std::string& variant) const;
  std::vector<std::string> names_in_use() const;
};

}  // namespace tformer
