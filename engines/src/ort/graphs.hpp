// The sessions of a variant's graphs: opened and checked once, run by any number of threads.
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "bundle/bundle.hpp"
#include "ort/library.hpp"
#include "shortlist.hpp"

namespace tformer {

/// How a model is opened.
struct OpenOptions {
  std::string backend = "ort";  ///< or trt, or native
  std::string variant;  ///< empty: the bundle's default, of native its first program; fp32: the standard graphs; of trt
                        ///< the precision of plans
  int threads = 0;      ///< of one call of the engine; 0: as many as this process has cores
  bool shortlist = false;
  std::string kernels;      ///< of native: an instruction set by name; empty: the best that this machine has
  bool verify = true;       ///< compare files with their hashes
  std::string onnxruntime;  ///< the library's file; empty: see load_onnxruntime
  std::string tensorrt;     ///< TensorRT's file, or its folder; empty: see load_tensorrt
};

/// Names and values of one run; values belong to others.
struct Feed {
  std::vector<const char*> input_names, output_names;
  std::vector<const OrtValue*> inputs;
  std::vector<OrtValue*> outputs;  ///< null: the library makes one
  void input(const std::string& name, const Ort::Value& value);
  void output(const std::string& name, Ort::Value& value);
};

/// Immutable once it is made; `run` may be called from several threads.
class Graphs {
 public:
  /// Throws Error.
  Graphs(std::shared_ptr<const Bundle> bundle, const OpenOptions& options);

  const Bundle& bundle() const { return *bundle_; }
  const Model& model() const { return bundle_->model(); }
  const Recipe& recipe() const { return bundle_->recipe(variant_); }
  const std::string& variant() const { return variant_; }
  const Shortlist* shortlist() const { return shortlist_ ? &*shortlist_ : nullptr; }

  /// Whether there is a graph whose rows are each at a position of their own, for sentences that join others.
  bool has_slots() const;
  /// Open it, if nobody has; most never do. Throws Error.
  void open_slots() const;

  enum Which { encoder = 0, step = 1, rows = 2, slots = 3 };
  /// Run a session; outputs that were null belong to the caller afterwards. Throws Error.
  void run(Which which, Feed& feed) const;

 private:
  std::shared_ptr<const Bundle> bundle_;
  std::string variant_;
  int threads_;
  std::optional<Shortlist> shortlist_;
  std::vector<Ort::Session> sessions_;
  mutable std::mutex slots_lock_;
  mutable std::optional<Ort::Session> slots_;

  Ort::SessionOptions session_options(int spin_us) const;
  Ort::Session open(const std::string& graph, int spin_us) const;
  void check_tensors(const std::string& graph, const Ort::Session& session) const;
};

/// Tensors over memory of the caller's, which must outlive them. Throws Error where there is no memory.
Ort::Value tensor(std::vector<std::int32_t>& values, const std::vector<std::int64_t>& shape);
Ort::Value tensor(std::vector<float>& values, const std::vector<std::int64_t>& shape);
Ort::Value tensor(float* values, const std::vector<std::int64_t>& shape);
/// A tensor of its own, without first values.
Ort::Value tensor(const std::vector<std::int64_t>& shape);

/// A shape in brackets, ? for sizes that are not known.
std::string shown(const std::vector<std::int64_t>& shape);

}  // namespace tformer
