#include "bundle/bundle.hpp"

#include <algorithm>
#include <set>
#include <stdexcept>

#include "errors.hpp"
#include "spec.hpp"
#include "bundle/header.hpp"
#include "bundle/model.hpp"
#include "bundle/schema.hpp"

namespace fs = std::filesystem;

namespace tformer {
namespace {

constexpr const char* manifest_name = "manifest.json";
constexpr std::int64_t oldest_version = 2, newest_version = 2;

std::string in_folder(const std::string& variant, const std::string& file) {
  return variant.empty() ? file : variant + "/" + file;
}

/// The tensors that a manifest states.
std::vector<TensorSpec> stated(const Json& tensors) {
  std::vector<TensorSpec> specs;
  for (const Json& each : tensors) {
    TensorSpec spec{each["name"], each["dtype"], {}};
    for (const Json& size : each["shape"]) {
      spec.shape.push_back(size.is_number_integer() ? size.get<std::int64_t>() : 0);
    }
    specs.push_back(std::move(spec));
  }
  return specs;
}

bool same(const std::vector<TensorSpec>& one, const std::vector<TensorSpec>& other) {
  return std::equal(one.begin(), one.end(), other.begin(), other.end(), [](const auto& a, const auto& b) {
    return a.name == b.name && a.dtype == b.dtype && a.shape == b.shape;
  });
}

}  // namespace

Bundle Bundle::open(const Folder& directory, bool verified) {
  const auto kept = directory.keep();
  Bundle bundle;
  bundle.directory_ = directory;
  bundle.verified_ = verified;
  bundle.manifest_ = read_header(directory, manifest_name, "bundle", {oldest_version, newest_version}, bundle_schema());
  const Json& manifest = bundle.manifest_;
  const fs::path path = bundle.manifest_path();
  const Json& model = manifest["model"];
  if (model.value("decoder_layers", Json()) == 0 && model.value("module_parameters", Json()) > 0) {
    throw Error(Status::usage, directory.string() + " has an encoder and no decoder: use tformer encode");
  }
  try {
    for (const auto& [name, variant] : manifest["variants"].items()) {
      bundle.recipes_[name] = recipe_of(variant["recipe"]);
    }
    bundle.model_ = model_of(manifest["model"]);
    bundle.recipes_[""] = recipe_of(manifest["recipe"]);
    for (const auto& [name, recipe] : bundle.recipes_) {
      if (recipe.top_k > bundle.model_.tgt_vocab) {
        throw std::invalid_argument(spec::top_k(recipe.top_k, bundle.model_.tgt_vocab));
      }
    }
  } catch (const std::invalid_argument& error) {
    throw Error(Status::bundle, damaged(path, error.what()));
  }
  bundle.default_ = manifest["default"];
  if (!bundle.recipes_.count(bundle.default_)) {
    throw Error(Status::bundle, damaged(path, "it has no variant '" + bundle.default_ + "'"));
  }
  const Json& files = manifest["files"];
  for (const std::string& name : bundle.names_in_use()) {
    if (!files.contains(name)) throw Error(Status::bundle, damaged(path, "no hash of " + name));
  }
  if (directory.source()) return bundle;  // what is missing is missed when it is read
  for (const auto& [name, unused] : files.items()) member(directory, name);
  return bundle;
}

fs::path Bundle::manifest_path() const { return directory_.path() / manifest_name; }

const Json& Bundle::part(const std::string& variant) const {
  return variant.empty() ? manifest_ : manifest_["variants"][variant];
}

/// The files that the manifest must have hashes of.
std::vector<std::string> Bundle::names_in_use() const {
  std::set<std::string> names;
  for (const auto& [variant, recipe] : recipes_) {
    for (const Json& graph : contract()["graphs"]) names.insert(in_folder(variant, file_of(graph, recipe)));
    for (const Json& optional : contract()["optional_files"]) {
      const std::string name = in_folder(variant, optional);
      std::error_code ignored;
      if (!directory_.source() && fs::exists(directory_.path() / name, ignored)) names.insert(name);
    }
  }
  for (const char* side : {"source", "target"}) {
    for (const char* key : {"file", "entries"}) {
      const Json& description = manifest_["tokenizer"][side];
      if (description.contains(key)) names.insert(description[key]);
    }
  }
  if (manifest_.contains("shortlist")) names.insert(manifest_["shortlist"]["file"]);
  return {names.begin(), names.end()};
}

std::string Bundle::trt_variant() const {
  for (const auto& [name, recipe] : recipes_) {
    if (recipe.target != "trt") continue;
    require_kinds(name);
    return name;
  }
  throw Error(Status::usage,
              directory_.string() + " has no graphs for TensorRT: export it again and add --recipe trt");
}

std::vector<std::string> Bundle::variants() const {
  std::vector<std::string> names;
  for (const auto& [name, unused] : recipes_) names.push_back(name);
  return names;
}

std::vector<std::string> Bundle::programs() const {
  std::vector<std::string> names;
  for (const auto& [name, recipe] : recipes_) {
    if (recipe.target == "native") names.push_back(name);
  }
  return names;
}

std::string Bundle::chosen(const std::string& name) const {
  if (name.empty()) return default_;
  if (name == "fp32") return "";
  if (!recipes_.count(name)) {
    std::vector<std::string> valid = {"fp32"};
    for (const auto& [variant, unused] : recipes_) {
      if (!variant.empty()) valid.push_back(variant);
    }
    throw Error(Status::usage, unknown("variant", name, valid));
  }
  return name;
}

Folder Bundle::folder(const std::string& variant) const {
  return variant.empty() ? directory_ : directory_ / variant;
}

fs::path Bundle::graph(const std::string& name, const std::string& variant) const {
  return directory_.path() / in_folder(variant, file_of(name, recipe(variant)));
}

bool Bundle::lists(const std::string& graph, const std::string& variant) const {
  return manifest_["files"].contains(in_folder(variant, graph + ".onnx"));
}

void Bundle::verify(const std::vector<std::string>& names) const {
  if (!verified_) return;
  for (const std::string& name : names) verify_file(directory_, name, manifest_["files"][name], "bundle");
}

std::vector<std::string> Bundle::graph_files(const std::vector<std::string>& graphs, const std::string& variant) const {
  std::vector<std::string> names;
  for (const std::string& graph : graphs) names.push_back(in_folder(variant, file_of(graph, recipe(variant))));
  const std::string weights = in_folder(variant, contract()["weights"]);
  if (manifest_["files"].contains(weights)) names.push_back(weights);
  return names;
}

void Bundle::require_kinds(const std::string& variant) const {
  const Recipe& own = recipe(variant);
  const Json& graphs = part(variant)["graphs"];
  const std::string where = folder(variant).string();
  for (const std::string& name : graphs_of(model_, own)) {
    if (!graphs.contains(name)) continue;  // it may list fewer: check_tensors compares what is opened with the contract
    const Json& theirs = graphs[name];
    const std::string kind = theirs["kind"];
    const std::vector<std::string> known = contract()["kinds"];
    if (std::find(known.begin(), known.end(), kind) == known.end()) {
      throw Error(Status::bundle, where + " has a graph '" + name + "' of kind " + kind + ", this tformer runs " +
                                      joined(known) + ": update it, or export the bundle again with it");
    }
    const Signature wanted = signature(name, model_, own);
    if (kind != kind_of(name, own) || !same(stated(theirs["inputs"]), wanted.inputs) ||
        !same(stated(theirs["outputs"]), wanted.outputs)) {
      throw Error(Status::bundle, where + " has other graphs than its recipe makes, or " + manifest_name +
                                      " was edited: export the bundle again");
    }
  }
}

void Bundle::check_metadata(const std::string& name, const std::map<std::string, std::string>& metadata,
                            const std::string& variant) const {
  const fs::path file = file_of(name, recipe(variant));  // called by its graph, or by the program of both
  bool fits = false;
  try {
    fits = metadata.at("tformer.graph") == file.stem() &&
           metadata.at("tformer.weights_sha256") == manifest_["checkpoint"]["weights_sha256"] &&
           same_model(parse_json(metadata.at("tformer.model")), manifest_["model"]) &&
           same_recipe(parse_json(metadata.at("tformer.recipe")), part(variant)["recipe"]);
    // Graphs that were exported without tokenizers do not name any.
    const auto tokenizers = metadata.find("tformer.tokenizers");
    if (fits && tokenizers != metadata.end()) fits = parse_json(tokenizers->second) == Json(tokenizer_hashes());
  } catch (const std::out_of_range&) {
  } catch (const std::invalid_argument&) {
  }
  if (!fits) {
    throw Error(Status::bundle, manifest_path().string() + " was edited: " + file.string() +
                                    " is of another model, recipe or tokenizer");
  }
}

std::map<std::string, std::string> Bundle::tokenizer_hashes() const {
  std::map<std::string, std::string> hashes;
  for (const char* side : {"source", "target"}) {
    for (const char* key : {"file", "entries"}) {
      const Json& description = manifest_["tokenizer"][side];
      if (description.contains(key)) hashes[description[key]] = manifest_["files"][description[key].get<std::string>()];
    }
  }
  return hashes;
}

}  // namespace tformer
