// What runs an open model: sessions of ONNX Runtime, the library's own kernels, or plans on a GPU.
#pragma once

#include <memory>
#include <string>

#include "bundle/bundle.hpp"
#include "engine.hpp"

namespace tformer {

struct OpenOptions;

/// Immutable to its users; any number of threads may make engines of one.
class Backend {
 public:
  virtual ~Backend() = default;
  virtual const Model& model() const = 0;
  virtual const Limits& limits() const = 0;
  /// The variant's name, fp32 for the standard graphs; of plans their precision.
  virtual std::string variant() const = 0;
  /// Why it is slower than it could be, as far as is known by now; empty: no reason is.
  virtual const char* warning() const { return ""; }
  /// Padded source tokens of a batch, per beam, with which it is fast.
  virtual std::int64_t batch_tokens() const { return 4096; }
  /// An engine for one thread, over what others use as well.
  virtual std::unique_ptr<Engine> make_engine() const = 0;
};

/// What runs a bundle as the options say. Throws Error.
std::shared_ptr<const Backend> open_backend(std::shared_ptr<const Bundle> bundle, const OpenOptions& options);

}  // namespace tformer
