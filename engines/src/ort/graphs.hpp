// The ONNX Runtime sessions of a variant: opened and checked once, shared by all threads.
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

struct OpenOptions;

/// Names and values of one run; does not own the values.
struct Feed {
  std::vector<const char*> input_names, output_names;
  std::vector<const OrtValue*> inputs;
  std::vector<OrtValue*> outputs;  ///< null: ONNX Runtime allocates it
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

  /// Whether there is a step in which each row has its own position, so that sentences can join a running batch.
  bool has_slots() const;
  /// Open that step, if it is not open. Throws Error.
  void open_slots() const;

  enum Which { encoder = 0, step = 1, rows = 2, slots = 3 };
  /// Run a session; the caller then owns outputs that were null. Throws Error.
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
  Ort::Session session_of(const std::filesystem::path& path, const Content& content, int spin_us) const;
  void check_tensors(const std::string& graph, const Ort::Session& session) const;
};

/// Tensors over the caller's memory, which must outlive them. Throws Error where memory is full.
Ort::Value tensor(std::vector<std::int32_t>& values, const std::vector<std::int64_t>& shape);
Ort::Value tensor(std::vector<float>& values, const std::vector<std::int64_t>& shape);
Ort::Value tensor(float* values, const std::vector<std::int64_t>& shape);
/// A new tensor, uninitialized.
Ort::Value tensor(const std::vector<std::int64_t>& shape);

/// A shape as text, such as [1, ?, 8]; ?: unknown.
std::string shown(const std::vector<std::int64_t>& shape);

}  // namespace tformer
