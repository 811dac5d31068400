#include "backend.hpp"

#include "cores.hpp"
#include "errors.hpp"
#include "log.hpp"
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

namespace {

std::shared_ptr<const Backend> opened(std::shared_ptr<const Bundle> bundle, const OpenOptions& options) {
  if (options.backend == "trt") return open_plans(std::move(bundle), options);
  if (options.backend == "native") return open_program(std::move(bundle), options);
  if (options.backend != "ort") {
    throw Error(Status::usage, unknown("backend", options.backend, {"ort", "native", "trt"}));
  }
  return std::make_shared<const Sessions>(std::make_shared<const Graphs>(std::move(bundle), options));
}

}  // namespace

std::shared_ptr<const Backend> open_backend(std::shared_ptr<const Bundle> bundle, const OpenOptions& options) {
  const std::string name = bundle->directory().string();
  const bool verified = bundle->verified();
  auto made = opened(std::move(bundle), options);
  const int threads = options.threads ? options.threads : cores();
  log(Level::info, [&] {
    return "opened " + name + ": backend " + options.backend + ", variant " + made->variant() + ", " +
           std::to_string(threads) + " threads" + (options.shortlist ? ", with its shortlist" : "") +
           (verified ? "" : ", files not compared with their SHA-256");
  });
  if (options.backend != "trt" && threads > cores()) {
    log(Level::warning, [&] {
      return name + ": " + std::to_string(threads) + " threads share " + std::to_string(cores()) +
             " cores: use as many, or fewer workers";
    });
  }
  return made;
}

}  // namespace tformer
