#include "ort/graphs.hpp"

#include <algorithm>
#include <future>
#include <numeric>

#include "backend.hpp"
#include "cores.hpp"
#include "errors.hpp"
#include "log.hpp"

namespace tformer {
namespace {

constexpr int short_spin_us = 100;  // enough to reach the next operator, then the core is free for the search

constexpr const char* slots_graph = "slots_step";

/// Messages of the library about graphs that a later version may support.
bool newer(const std::string& said) {
  for (const char* words : {"IR version", "onnx opset versions", "No Op registered", "not a registered function"}) {
    if (said.find(words) != std::string::npos) return true;
  }
  return false;
}

Error cannot_load(const std::filesystem::path& path, const std::string& error) {
  std::string said = reason(error);
  if (said.find("alloc") != std::string::npos) said += ": free some memory";
  else if (said.find("procfs") != std::string::npos) said += ": mount /proc";
  else if (newer(said)) said += ": update onnxruntime, or export with a lower opset";
  else said = "it is damaged, or tformer did not make it (" + said + "): copy or export the bundle again";
  return Error(Status::bundle, "onnxruntime " + onnxruntime_version() + " cannot load " + path.string() + ": " + said);
}

std::string dtype_name(ONNXTensorElementDataType type) {
  switch (type) {
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT: return "float32";
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32: return "int32";
    case ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8: return "int8";
    default: return "type " + std::to_string(static_cast<int>(type));
  }
}

const Ort::MemoryInfo& cpu() {
  static const auto* info = new Ort::MemoryInfo(Ort::MemoryInfo::CreateCpu(OrtDeviceAllocator, OrtMemTypeCPU));
  return *info;
}

/// Throws Error where ONNX Runtime has no memory for a tensor.
template <typename Make>
Ort::Value made(const std::vector<std::int64_t>& shape, const Make& make) {
  try {
    return make();
  } catch (const Ort::Exception& error) {
    throw Error(Status::no_memory,
                "no memory for a tensor of " + shown(shape) + " (" + reason(error.what()) + "): use smaller batches");
  }
}

}  // namespace

std::string shown(const std::vector<std::int64_t>& shape) {
  std::string text;
  for (const std::int64_t size : shape) text += (text.empty() ? "" : ", ") + (size > 0 ? std::to_string(size) : "?");
  return "[" + text + "]";
}

void Feed::input(const std::string& name, const Ort::Value& value) {
  input_names.push_back(name.c_str());
  inputs.push_back(value);
}

void Feed::output(const std::string& name, Ort::Value& value) {
  output_names.push_back(name.c_str());
  outputs.push_back(value);
}

Graphs::Graphs(std::shared_ptr<const Bundle> bundle, const OpenOptions& options)
    : bundle_(std::move(bundle)), variant_(bundle_->chosen(options.variant)),
      threads_(options.threads ? options.threads : cores()) {
  const std::string target = recipe().target;
  if (target == "trt") {
    throw Error(Status::usage, "variant " + variant_ + " of " + bundle_->directory().string() +
                                   " has graphs for TensorRT: use backend trt, or another variant");
  }
  if (target == "native") {
    throw Error(Status::usage, "variant " + variant_ + " of " + bundle_->directory().string() +
                                   " is a program: use backend native, or another variant");
  }
  if (options.shortlist) {
    const std::string shown = variant_.empty() ? "fp32" : variant_;
    if (target != "ort-cpu") {
      throw Error(Status::usage, "shortlist: " + shown + " has no graphs for it: use a variant of target ort-cpu");
    }
    if (recipe().integer_step() && !has_vnni()) {  // its weights are inputs, not constants to be made unsigned
      throw Error(Status::usage, "shortlist: " + shown + " needs a processor with VNNI for it: use another variant");
    }
    shortlist_.emplace(open_shortlist(*bundle_, variant_));
  }
  bundle_->require_kinds(variant_);
  load_onnxruntime(options.onnxruntime);
  std::vector<std::string> names = {"encoder", shortlist_ ? "short_step" : "decoder_step"};
  if (shortlist_) names.push_back("short_rows");
  auto verified = std::async(std::launch::async, [&] { bundle_->verify(bundle_->graph_files(names, variant_)); });
  auto opened = std::async(std::launch::async, [&] {
    // The step first, and alone: while its output is packed, the largest matrix is in memory twice.
    Ort::Session second = open(names[step], 0);
    sessions_.push_back(open(names[encoder], short_spin_us));
    sessions_.push_back(std::move(second));
    if (shortlist_) sessions_.push_back(open(names[rows], short_spin_us));
  });
  verified.get();  // first: a damaged file should be reported as such
  opened.get();
}

bool Graphs::has_slots() const { return !shortlist_ && bundle_->lists(slots_graph, variant_); }

void Graphs::open_slots() const {
  {
    const std::lock_guard<std::mutex> held(slots_lock_);
    if (slots_) return;
    const auto kept = bundle_->directory().keep();
    bundle_->verify(bundle_->graph_files({slots_graph}, variant_));
    slots_.emplace(open(slots_graph, 0));
  }
  log(Level::debug, [&] { return bundle_->directory().string() + ": opened " + slots_graph + ", whose lines can join a batch"; });
}

/// Session options; threads spin for `spin_us` after an operator, 0: ONNX Runtime's default.
Ort::SessionOptions Graphs::session_options(int spin_us) const {
  Ort::SessionOptions options;
  options.SetIntraOpNumThreads(threads_).SetInterOpNumThreads(1).SetLogSeverityLevel(ORT_LOGGING_LEVEL_FATAL);
  if (spin_us) options.AddConfigEntry("session.intra_op.spin_duration_us", std::to_string(spin_us).c_str());
  // Without VNNI, products of unsigned and signed bytes overflow, unless the weights are made unsigned as well.
  options.AddConfigEntry("session.x64quantprecision", has_vnni() ? "0" : "1");
  // The fused kernel is several times slower than its parts.
  options.AddConfigEntry("optimization.disable_specified_optimizers", "SkipLayerNormFusion");
  return options;
}

/// A session of a graph; of a bundle in memory with its weights, which ONNX Runtime copies.
Ort::Session Graphs::session_of(const std::filesystem::path& path, const Content& content, int spin_us) const {
  Ort::SessionOptions options = session_options(spin_us);
  const Folder folder = bundle_->folder(variant_);
  if (!folder.source()) return Ort::Session(ort_env(), path.c_str(), options);
  // Else it would look for files of weights in the working directory.
  options.AddConfigEntry(kOrtSessionOptionsModelExternalInitializersFileFolderPath, "/dev/null");
  const std::string name = contract()["weights"];
  if (!bundle_->manifest()["files"].contains(folder.name(name))) {
    return Ort::Session(ort_env(), content.data(), content.size(), options);
  }
  const Content weights = tformer::content(folder, name);
  auto* const bytes = const_cast<char*>(weights.view().data());  // which it only reads
  options.AddExternalInitializersFromFilesInMemory({name}, {bytes}, {weights.size()});
  return Ort::Session(ort_env(), content.data(), content.size(), options);
}

Ort::Session Graphs::open(const std::string& graph, int spin_us) const {
  const std::filesystem::path path = bundle_->graph(graph, variant_);
  Ort::Session session{nullptr};
  try {
    const Content file = content(bundle_->folder(variant_), path.filename().string());
    require_no_control_flow(file.view(), path.string());
    session = session_of(path, file, spin_us);
    const Ort::AllocatorWithDefaultOptions allocator;
    const Ort::ModelMetadata about = session.GetModelMetadata();
    std::map<std::string, std::string> metadata;
    for (const Ort::AllocatedStringPtr& key : about.GetCustomMetadataMapKeysAllocated(allocator)) {
      metadata[key.get()] = about.LookupCustomMetadataMapAllocated(key.get(), allocator).get();
    }
    bundle_->check_metadata(graph, metadata, variant_);
    check_tensors(graph, session);
  } catch (const std::invalid_argument& error) {
    throw cannot_load(path, std::string("Protobuf parsing failed: ") + error.what());
  } catch (const Ort::Exception& error) {
    throw cannot_load(path, error.what());
  }
  return session;
}

/// Throws Error for a graph that lacks an input or output of the contract, or has one of another type or shape.
void Graphs::check_tensors(const std::string& graph, const Ort::Session& session) const {
  struct Found {
    std::string dtype;
    std::vector<std::int64_t> shape;
  };
  std::map<std::string, Found> found;
  const Ort::AllocatorWithDefaultOptions allocator;
  const auto note = [&found](const char* name, const Ort::TypeInfo& type) {
    if (type.GetONNXType() != ONNX_TYPE_TENSOR) return;
    const auto tensor = type.GetTensorTypeAndShapeInfo();
    found[name] = {dtype_name(tensor.GetElementType()), tensor.GetShape()};
  };
  for (std::size_t i = 0; i < session.GetInputCount(); ++i) {
    note(session.GetInputNameAllocated(i, allocator).get(), session.GetInputTypeInfo(i));
  }
  for (std::size_t i = 0; i < session.GetOutputCount(); ++i) {
    note(session.GetOutputNameAllocated(i, allocator).get(), session.GetOutputTypeInfo(i));
  }
  const std::string path = bundle_->graph(graph, variant_).string();
  const Signature wanted = signature(graph, model(), recipe());
  for (const auto* side : {&wanted.inputs, &wanted.outputs}) {
    for (const TensorSpec& spec : *side) {
      const auto value = found.find(spec.name);
      if (value == found.end()) {
        throw Error(Status::bundle, path + " has no '" + spec.name +
                                        "': it is not a graph of tformer, export the bundle again");
      }
      const auto& [dtype, shape] = value->second;
      bool fits = dtype == spec.dtype && shape.size() == spec.shape.size();
      for (std::size_t i = 0; fits && i < shape.size(); ++i) {
        fits = shape[i] <= 0 || spec.shape[i] == 0 || shape[i] == spec.shape[i];
      }
      if (!fits) {
        throw Error(Status::bundle, path + ": '" + spec.name + "' is " + dtype + " of " + shown(shape) + ", not " +
                                        spec.dtype + " of " + shown(spec.shape) + ": export the bundle again");
      }
    }
  }
}

void Graphs::run(Which which, Feed& feed) const {
  const OrtSession* session = which == slots ? *slots_ : sessions_[which];
  try {
    Ort::ThrowOnError(Ort::GetApi().Run(const_cast<OrtSession*>(session), nullptr, feed.input_names.data(),
                                        feed.inputs.data(), feed.inputs.size(), feed.output_names.data(),
                                        feed.output_names.size(), feed.outputs.data()));
  } catch (const Ort::Exception& error) {
    const std::string said = reason(error.what());
    const bool memory = said.find("alloc") != std::string::npos;
    throw Error(memory ? Status::no_memory : Status::engine,
                "onnxruntime " + onnxruntime_version() + " stopped in " +
                    bundle_->folder(variant_).string() + ": " + said + ": " +
                    (memory ? "use smaller batches" : "export the bundle again if tformer check fails too"));
  }
}

Ort::Value tensor(std::vector<std::int32_t>& values, const std::vector<std::int64_t>& shape) {
  return made(shape, [&] {
    return Ort::Value::CreateTensor<std::int32_t>(cpu(), values.data(), values.size(), shape.data(), shape.size());
  });
}

Ort::Value tensor(std::vector<float>& values, const std::vector<std::int64_t>& shape) {
  return tensor(values.data(), shape);
}

Ort::Value tensor(float* values, const std::vector<std::int64_t>& shape) {
  const auto count = std::accumulate(shape.begin(), shape.end(), std::int64_t{1}, std::multiplies<>());
  return made(shape, [&] {
    return Ort::Value::CreateTensor<float>(cpu(), values, static_cast<std::size_t>(count), shape.data(), shape.size());
  });
}

Ort::Value tensor(const std::vector<std::int64_t>& shape) {
  return made(shape, [&] {
    return Ort::Value::CreateTensor<float>(Ort::AllocatorWithDefaultOptions(), shape.data(), shape.size());
  });
}

}  // namespace tformer
