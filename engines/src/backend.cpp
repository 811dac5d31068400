#include "backend.hpp"

#include "errors.hpp"
#include "native/engines.hpp"
#include "ort/engines.hpp"
#include "trt/open.hpp"

namespace tformer {
namespace {

class Sessions final : public Backend {
 public:
  explicit Sessions(std::shared_ptr<const Graphs> graphs) : graphs_(std::move(graphs)) {}

  const Model& model() const override { return graphs_->model(); }
  const Limits& limits() const override { return graphs_->recipe().limits; }
  std::string variant() const override { return graphs_->variant().empty() ? "fp32" : graphs_->variant(); }
  std::unique_ptr<Engine> make_engine() const override { return tformer::make_engine(graphs_); }

 private:
  std::shared_ptr<const Graphs> graphs_;
};

}  // namespace

std::shared_ptr<const Backend> open_backend(std::shared_ptr<const Bundle> bundle, const OpenOptions& options) {
  if (options.backend == "trt") return open_plans(std::move(bundle), options);
  if (options.backend == "native") return open_program(std::move(bundle), options);
  if (options.backend != "ort") {
    throw Error(Status::usage, unknown("backend", options.backend, {"ort", "native", "trt"}));
  }
  return std::make_shared<const Sessions>(std::make_shared<const Graphs>(std::move(bundle), options));
}

}  // namespace tformer
