// Backends: ONNX Runtime sessions, the library's own CPU kernels, or TensorRT plans on a GPU.
#pragma once

#include <memory>
#include <string>

#include "bundle/bundle.hpp"
#include "engine.hpp"
#include "spec.hpp"

namespace tformer {

/// How a model is opened.
struct OpenOptions {
  std::string backend = "ort";  ///< ort, native or trt
  std::string variant;  ///< empty: the default, with native the first program; fp32: the standard graphs; with trt
                        ///< the precision of plans
  int threads = 0;      ///< per call of the engine; 0: one per core
  bool shortlist = false;
  std::string kernels;      ///< native only: an instruction set by name; empty: the best of this machine
  bool verify = true;       ///< compare files with their hashes
  std::string onnxruntime;  ///< the library's file; empty: see load_onnxruntime
  std::string tensorrt;     ///< TensorRT's file, or its folder; empty: see load_tensorrt
};

/// One opened model on one backend. Thread-safe: any thread may make engines from it.
class Backend {
 public:
  virtual ~Backend() = default;
  virtual const Model& model() const = 0;
  virtual const Limits& limits() const = 0;
  /// The variant's name, fp32 for the standard graphs; for plans their precision.
  virtual std::string variant() const = 0;
  /// Why it runs slower than it could, if that is known by now; else empty.
  virtual const char* warning() const { return ""; }
  /// The batch size, in padded source tokens per beam, at which it is fast.
  virtual std::int64_t batch_tokens() const { return spec::batch_tokens; }
  /// An engine for one thread; all engines share weights and sessions.
  virtual std::unique_ptr<Engine> make_engine() const = 0;
};

/// Open a bundle on the backend that the options name. Throws Error.
std::shared_ptr<const Backend> open_backend(std::shared_ptr<const Bundle> bundle, const OpenOptions& options);

}  // namespace tformer
