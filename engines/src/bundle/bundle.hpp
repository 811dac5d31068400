// A bundle, the directory that is deployed: manifest.json, tokenizers, graphs, each with its hash.
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
  /// Read and check the manifest; `verified`: files are compared with their hashes when they are used. Of a source only
  /// the manifest is read, of a folder all files must be there. Throws Error.
  static Bundle open(const Folder& directory, bool verified);

  const Folder& directory() const { return directory_; }
  const Model& model() const { return model_; }
  const Json& manifest() const { return manifest_; }
  /// How the graphs of a variant were made; "": the standard ones.
  const Recipe& recipe(const std::string& variant) const { return recipes_.at(variant); }
  /// The variant of a name that a user gave; empty: the default; `fp32`: the standard graphs, "". Throws Error.
  std::string chosen(const std::string& name) const;
  /// The variant with graphs for TensorRT. Throws Error where there is none, or its kinds are unknown.
  std::string trt_variant() const;
  /// All variants; the first is "", the standard graphs.
  std::vector<std::string> variants() const;
  /// The variants of target native.
  std::vector<std::string> programs() const;
  /// The folder of a variant's graphs.
  Folder folder(const std::string& variant) const;
  /// The file of a graph.
  std::filesystem::path graph(const std::string& name, const std::string& variant) const;
  /// Whether a variant has a graph that is optional.
  bool lists(const std::string& graph, const std::string& variant) const;
  /// Compare files with their hashes, unless the bundle was opened without. Throws Error.
  void verify(const std::vector<std::string>& names) const;
  /// The files of some graphs of a variant and of their weights, as the manifest names them.
  std::vector<std::string> graph_files(const std::vector<std::string>& graphs, const std::string& variant) const;
  /// Whether files are compared with their hashes.
  bool verified() const { return verified_; }
  /// Throws Error where a variant has graphs that this version cannot run.
  void require_kinds(const std::string& variant) const;
  /// Compare the manifest, which has no hash of its own, with the metadata in a graph's file. Throws Error.
  void check_metadata(const std::string& name, const std::map<std::string, std::string>& metadata,
                      const std::string& variant) const;
  /// SHA-256 of each tokenizer's file, by its name.
  std::map<std::string, std::string> tokenizer_hashes() const;

 private:
  Folder directory_;
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
