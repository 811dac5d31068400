// TensorRT's runtime for plans that are typed ONNX graphs of fixed sizes, which ONNX Runtime executes.
//
// Compiled with NVIDIA's headers; stubs.hpp, which is made from them, has a function for every one that is not here.
//
// SIMULATED_NO_CONTEXT  what it complains of where it makes no execution context
// SIMULATED_NO_RUNTIME  if set, the factory fails as with a driver that is too old
// SIMULATED_TENSORRT  the version that it says it is, in its own notation; that of the headers
#include <NvInferRuntime.h>
#include <dlfcn.h>
#include <onnxruntime_cxx_api.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>

#include "libcuda.hpp"
#include "stubs.hpp"

using nvinfer1::DataType;
using nvinfer1::Dims;
using Severity = nvinfer1::ILogger::Severity;

extern "C" std::int32_t getInferLibVersion() noexcept;

namespace {

constexpr std::int64_t scratch_of_a_plan = 4096;

struct Tensor {
  ONNXTensorElementDataType type;
  std::vector<std::int64_t> shape;
  bool input;
  std::size_t bytes;
};

void require(bool holds, const std::string& what) {
  if (!holds) simulated_fault(what);
}

/// Counts what is alive, as a plan must outlive its contexts, and a runtime its plans.
struct Owned {
  explicit Owned(std::atomic<int>& owner) : owner_(owner) { ++owner_; }
  ~Owned() {
    require(simulated_has_context(), "TensorRT frees without a context");
    require(children == 0, "what belongs to it is still there");
    --owner_;
  }
  std::atomic<int> children{0};

 private:
  std::atomic<int>& owner_;
};

std::atomic<int> runtimes{0};
struct AtEnd {
  ~AtEnd() { require(runtimes == 0, "a runtime was not given back"); }
} at_end;

Ort::Env& environment() {
  static Ort::Env* made = [] {
    void* library = ::dlopen(std::getenv("TFORMER_ONNXRUNTIME"), RTLD_NOW | RTLD_LOCAL);
    require(library, "TFORMER_ONNXRUNTIME does not name the library");
    const auto base = reinterpret_cast<const OrtApiBase* (*)()>(::dlsym(library, "OrtGetApiBase"));
    Ort::InitApi(base()->GetApi(ORT_API_VERSION));
    return new Ort::Env(ORT_LOGGING_LEVEL_FATAL, "simulated");
  }();
  return *made;
}

Ort::Session opened(const void* bytes, std::size_t size) {
  Ort::Env& env = environment();  // first: it loads the library
  Ort::SessionOptions options;
  options.SetIntraOpNumThreads(1);
  return Ort::Session(env, bytes, size, options);
}

class Graph {
 public:
  Graph(const void* bytes, std::size_t size) : session_(opened(bytes, size)) {
    const Ort::AllocatorWithDefaultOptions allocator;
    const auto note = [&](const char* name, const Ort::TypeInfo& about, bool input) {
      const auto tensor = about.GetTensorTypeAndShapeInfo();
      const std::size_t each = tensor.GetElementType() == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16 ? 2 : 4;
      names.emplace_back(name);
      tensors[name] = {tensor.GetElementType(), tensor.GetShape(), input, each * tensor.GetElementCount()};
    };
    for (std::size_t i = 0; i < session_.GetInputCount(); ++i) {
      note(session_.GetInputNameAllocated(i, allocator).get(), session_.GetInputTypeInfo(i), true);
    }
    for (std::size_t i = 0; i < session_.GetOutputCount(); ++i) {
      note(session_.GetOutputNameAllocated(i, allocator).get(), session_.GetOutputTypeInfo(i), false);
    }
  }

  /// What a GPU would do with the memory at these addresses.
  void run(const std::map<std::string, void*>& addresses) {
    const auto memory = Ort::MemoryInfo::CreateCpu(OrtArenaAllocator, OrtMemTypeDefault);
    std::vector<const char*> in, out;
    std::vector<Ort::Value> values;
    std::vector<std::vector<char>> copies;
    for (const std::string& name : names) {
      const Tensor& tensor = tensors.at(name);
      require(simulated_on_device(addresses.at(name), tensor.bytes), name + " is not on the device by then");
      if (!tensor.input) {
        out.push_back(name.c_str());
        continue;
      }
      const char* from = static_cast<const char*>(addresses.at(name));
      copies.emplace_back(from, from + tensor.bytes);
      in.push_back(name.c_str());
      values.push_back(Ort::Value::CreateTensor(memory, copies.back().data(), tensor.bytes, tensor.shape.data(),
                                                tensor.shape.size(), tensor.type));
    }
    const auto found = session_.Run(Ort::RunOptions(), in.data(), values.data(), in.size(), out.data(), out.size());
    for (std::size_t i = 0; i < out.size(); ++i) {
      std::memcpy(addresses.at(out[i]), found[i].GetTensorRawData(), tensors.at(out[i]).bytes);
    }
  }

  std::vector<std::string> names;
  std::map<std::string, Tensor> tensors;

 private:
  Ort::Session session_;
};

class Context final : public nvinfer1::IExecutionContext, public ContextStubs, private Owned {
 public:
  Context(std::shared_ptr<Graph> graph, std::atomic<int>& owner, nvinfer1::ILogger& log)
      : Owned(owner), graph_(std::move(graph)), log_(log) {
    mImpl = this;
  }
  bool setTensorAddress(char const* name, void* data) noexcept override {
    const auto tensor = graph_->tensors.find(name);
    if (tensor == graph_->tensors.end()) return false;
    require(reinterpret_cast<std::uint64_t>(data) % 256 == 0, std::string(name) + " is not aligned");
    require(simulated_on_device(data, tensor->second.bytes), std::string(name) + " is not on the device");
    addresses_[name] = data;
    return true;
  }
  bool enqueueV3(cudaStream_t stream) noexcept override {
    require(simulated_has_context(), "TensorRT is called without a context");
    if (addresses_.size() != graph_->tensors.size()) {
      log_.log(Severity::kERROR, "an input or output has no address");
      return false;
    }
    require(!scratch_bytes || simulated_on_device(scratch_, scratch_bytes), "it has no memory to compute in");
    simulated_give(stream, [graph = graph_, addresses = addresses_] { graph->run(addresses); });
    return true;
  }
#if NV_TENSORRT_MAJOR >= 11
  void setDeviceMemoryV2(void* memory, std::int64_t size) noexcept override {
    require(size >= scratch_of_a_plan, "too little memory to compute in");
    scratch_ = memory;
  }
#endif
  std::size_t scratch_bytes = 0;  ///< that it must be given

 private:
  void* scratch_ = nullptr;
  std::shared_ptr<Graph> graph_;
  std::map<std::string, void*> addresses_;
  nvinfer1::ILogger& log_;
};

class Plan final : public nvinfer1::ICudaEngine, public PlanStubs, private Owned {
 public:
  Plan(std::shared_ptr<Graph> graph, std::atomic<int>& owner, nvinfer1::ILogger& log)
      : Owned(owner), graph_(std::move(graph)), log_(log) {
    mImpl = this;
  }
  std::int32_t getNbIOTensors() const noexcept override { return static_cast<std::int32_t>(graph_->names.size()); }
  char const* getIOTensorName(std::int32_t index) const noexcept override {
    return graph_->names.at(static_cast<std::size_t>(index)).c_str();
  }
  Dims getTensorShape(char const* name) const noexcept override {
    Dims dims{};
    for (const std::int64_t each : graph_->tensors.at(name).shape) {
      dims.d[dims.nbDims++] = static_cast<std::remove_reference_t<decltype(dims.d[0])>>(each);
    }
    return dims;
  }
  DataType getTensorDataType(char const* name) const noexcept override {
    switch (graph_->tensors.at(name).type) {
      case ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT: return DataType::kFLOAT;
      case ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16: return DataType::kHALF;
      case ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32: return DataType::kINT32;
      default: simulated_fault(std::string(name) + " has no type of TensorRT");
    }
  }
#if NV_TENSORRT_MAJOR >= 11
  std::int64_t getDeviceMemorySizeV2() const noexcept override { return scratch_of_a_plan; }
#endif
#if NV_TENSORRT_MAJOR >= 10
  using Strategy = nvinfer1::ExecutionContextAllocationStrategy;
  nvinfer1::IExecutionContext* createExecutionContext(Strategy strategy) noexcept override {
    const bool given = strategy == Strategy::kUSER_MANAGED;
#else
  nvinfer1::IExecutionContext* createExecutionContext() noexcept override {
    const bool given = false;
#endif
    require(given == (getInferLibVersion() / 10000 == 1), "memory to compute in is for TensorRT for RTX to be given");
    require(simulated_has_context(), "TensorRT is called without a context");
    if (const char* complaint = std::getenv("SIMULATED_NO_CONTEXT")) {
      log_.log(nvinfer1::ILogger::Severity::kERROR, complaint);
      return nullptr;
    }
    auto* made = new Context(graph_, children, log_);
    if (given) made->scratch_bytes = scratch_of_a_plan;
    return made;
  }

 private:
  std::shared_ptr<Graph> graph_;
  nvinfer1::ILogger& log_;
};

class Runtime final : public nvinfer1::IRuntime, public RuntimeStubs, private Owned {
 public:
  explicit Runtime(nvinfer1::ILogger& log) : Owned(runtimes), log_(log) { mImpl = this; }
#if NV_TENSORRT_MAJOR >= 10
  nvinfer1::ICudaEngine* deserializeCudaEngine(void const* blob, std::size_t size) noexcept override {
#else
  nvinfer1::ICudaEngine* deserializeCudaEngine(void const* blob, std::size_t size,
                                               nvinfer1::IPluginFactory*) noexcept override {
#endif
    require(simulated_has_context(), "TensorRT is called without a context");
    try {
      return new Plan(std::make_shared<Graph>(blob, size), children, log_);
    } catch (const Ort::Exception&) {
      log_.log(Severity::kERROR, "bad plan");
      return nullptr;
    }
  }
  void setEngineHostCodeAllowed(bool) noexcept override {}

 private:
  nvinfer1::ILogger& log_;
};

}  // namespace

extern "C" {

void* createInferRuntime_INTERNAL(void* logger, std::int32_t version) noexcept {
  require(simulated_has_context(), "the factory is called without a GPU");
  require(version == NV_TENSORRT_VERSION, "the factory is called with the version of other headers");
  if (std::getenv("SIMULATED_NO_RUNTIME")) return reinterpret_cast<void*>(std::uintptr_t{0x228});
  return static_cast<nvinfer1::IRuntime*>(new Runtime(*static_cast<nvinfer1::ILogger*>(logger)));
}
std::int32_t getInferLibVersion() noexcept {
  const char* version = std::getenv("SIMULATED_TENSORRT");
  return version ? std::atoi(version) : NV_TENSORRT_VERSION;
}
#if NV_TENSORRT_MAJOR >= 10
std::int32_t getInferLibBuildVersion() noexcept { return NV_TENSORRT_BUILD; }
#endif

}  // extern "C"
