// TensorRT, loaded at run time: which one is installed, and plans that it has loaded. Needs no header of TensorRT.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "trt/plans.hpp"

namespace nvinfer1 {
class ICudaEngine;
class IRuntime;
}  // namespace nvinfer1

namespace tformer {

/// A loaded library, TensorRT or TensorRT for RTX; never unloaded.
class TensorRt {
 public:
  TensorRt(void* library, const std::string& path);

  /// Name and version, such as TensorRT 11.4.0.106.
  std::string title() const { return name_ + " " + version_; }
  bool for_rtx() const { return name_ != "TensorRT"; }
  /// Stamps of plans that a GPU of that compute capability runs, those compiled for it first; none: it runs no plan.
  std::vector<Stamp> stamps(const std::string& capability, const std::string& precision) const;
  /// The CUDA version that the driver must support.
  static int oldest_driver();
  /// The library's function that makes a runtime; it crashes where there is no GPU.
  void* factory() const { return factory_; }

 private:
  void* factory_;
  std::string name_, version_, shorter_;
};

/// The libraries at `place`, a file or its folder; where that is empty, at the environment variable
/// TFORMER_TENSORRT, or what the loader finds. Throws Error where there is none, or where its version is not that of
/// the headers that this library was built with.
std::vector<TensorRt> load_tensorrt(const std::string& place);

/// Whether TensorRT's message says that GPU memory is full.
bool is_full(const std::string& reasons);

/// Loads plans, and collects the errors that TensorRT reports. Needs an OnGpu.
class TrtRuntime {
 public:
  explicit TrtRuntime(const TensorRt& tensorrt);
  ~TrtRuntime();
  TrtRuntime(const TrtRuntime&) = delete;
  TrtRuntime& operator=(const TrtRuntime&) = delete;

  /// A plan in GPU memory, to be freed before this; `path` is for messages. Throws Error, Status::no_memory where memory is full.
  std::shared_ptr<nvinfer1::ICudaEngine> load(const Content& plan, const std::string& path) const;
  const std::string& title() const { return title_; }
  bool for_rtx() const { return rtx_; }
  /// Errors that TensorRT has reported since the last call.
  std::string reasons() const;

 private:
  class Collector;
  std::string title_;
  bool rtx_;
  std::unique_ptr<Collector> log_;
  std::unique_ptr<nvinfer1::IRuntime> runtime_;
};

}  // namespace tformer
