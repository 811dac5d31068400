#include "native/program.hpp"

#include <stdexcept>

#include "bundle/files.hpp"
#include "errors.hpp"
#include "native/reader.hpp"

namespace tformer::native {
namespace {

const std::string file_name = "program.json", weights_name = "weights.data", format = "tformer-program";
constexpr std::int64_t version = 1;

}  // namespace

Program::Program(const Json& program, const Content& weights, const Model& model, const Recipe& recipe)
    : weights_(aligned(weights)) {
  const Json graphs = program.value("graphs", Json::object());
  const auto read = [&](const char* name, Graph graph) {
    if (!graphs.contains(name)) throw std::invalid_argument(std::string("no graph '") + name + "'");
    return read_code(program, graphs[name], graph, weights_, model, recipe);
  };
  encoder_ = read("encoder", Graph::encoder);
  step_ = read("decoder_step", Graph::step);
  if (graphs.contains("memory")) memory_ = read("memory", Graph::memory);
}

Program::Program(const Bundle& bundle, const std::string& variant) {
  const Folder folder = bundle.folder(variant);
  const std::filesystem::path path = folder.path() / file_name;
  bundle.verify(bundle.graph_files({"encoder"}, variant));
  const Json program = read_json(folder, file_name, header_bytes);
  try {
    if (!program.is_object() || program.value("format", Json()) != format) throw std::invalid_argument("it is no program");
    const Json found = program.value("version", Json());
    if (found != version) {
      throw Error(Status::bundle, path.string() + " is a program of version " + found.dump().substr(0, 40) +
                                      ", this tformer runs " + std::to_string(version) +
                                      ": update it, or export the bundle again with it");
    }
    std::map<std::string, std::string> metadata;
    if (!program.contains("metadata") || !program["metadata"].is_object()) throw std::invalid_argument("no metadata");
    for (const auto& [key, value] : program["metadata"].items()) {
      if (value.is_string()) metadata[key] = value.get<std::string>();
    }
    bundle.check_metadata("encoder", metadata, variant);
    *this = Program(program, content(folder, weights_name), bundle.model(), bundle.recipe(variant));
  } catch (const std::invalid_argument& error) {
    throw Error(Status::bundle, path.string() + " is damaged, or tformer did not make it (" + error.what() +
                                    "): copy or export the bundle again");
  } catch (const Json::exception&) {
    throw Error(Status::bundle,
                path.string() + " is damaged, or tformer did not make it: copy or export the bundle again");
  }
}

}  // namespace tformer::native
