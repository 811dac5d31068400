// tformer_native: libtformer inside a Python process, with the CPU engine, ONNX Runtime or TensorRT. Its outputs are
// shared with numpy, not copied, and other threads of Python run while it computes.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <mutex>
#include <new>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "arrays.hpp"
#include "backend.hpp"
#include "bundles.hpp"
#include "bundle/bundle.hpp"
#include "bundle/files.hpp"
#include "decode/decode.hpp"
#include "described.hpp"
#include "engines.hpp"
#include "errors.hpp"
#include "joined.hpp"
#include "kernels/kernels.hpp"
#include "settings.hpp"
#include "speed.hpp"
#include "tformer/version.h"
#include "trt/open.hpp"

namespace tformer::python {
namespace {

using Lists = std::vector<std::vector<std::int32_t>>;

/// Ids of sources (B, S) and how many of each row count.
struct Sources {
  Ids ids, lengths;

  Sources(nb::handle src_ids, nb::handle src_lengths)
      : ids(ids_of(src_ids, "src_ids", 2)), lengths(ids_of(src_lengths, "src_lengths", 1)) {
    lengths.require_shape(lengths.shape[0] == ids.shape[0], Ids::shown({ids.shape[0]}) + ", one for each row of src_ids");
    if (count() == 0) throw Error(Status::usage, "a batch of no sentences: give one at least");
  }

  std::size_t count() const { return lengths.values.size(); }
  std::size_t width() const { return ids.shape[1]; }

  /// Throws Python's ValueError where a list has not one of something for each source, nor none.
  void require_each(const char* name, std::size_t given) const {
    if (given && given != count()) {
      refuse(name, std::to_string(given), std::to_string(count()) + ", one for each source, or none");
    }
  }
};

/// What a state will be asked for. Throws Error for numbers that no search of this model has.
Outlook outlook_of(const Engine& engine, std::int64_t beams, std::int64_t tokens, const Lists& required) {
  if (beams < 0 || tokens < 0) {
    throw Error(Status::usage, "beams=" + std::to_string(beams) + ", tokens=" + std::to_string(tokens) +
                                   ": must be at least 0, which is as many as the model takes");
  }
  check_step(beams, 0, engine.limits());
  for (const auto& each : required) check_tokens(each, engine.model().tgt_vocab);
  return {beams, tokens, required};
}

/// Decoding options as JSON. Throws Error.
DecodeOptions options_from(const std::string& text) {
  Json values;
  try {
    values = parse_json(text);
  } catch (const std::exception& error) {
    throw Error(Status::usage, std::string("options are not JSON: ") + error.what());
  }
  return options_of(values);
}

Batch batch_of(nb::handle src_ids, nb::handle src_lengths, const std::vector<std::int64_t>& numbers,
               const Lists& prefixes) {
  const Sources sources(src_ids, src_lengths);
  sources.require_each("numbers", numbers.size());
  sources.require_each("prefixes", prefixes.size());
  return {sources.ids.values, sources.lengths.values, numbers, prefixes};
}

/// Stops where Python has a signal to handle, such as Ctrl-C.
void stop_for_signals() {
  const nb::gil_scoped_acquire held;
  if (PyErr_CheckSignals() != 0) throw nb::python_error();
}

/// A state and the engine that is its own as long as it lives.
struct Decode {
  std::unique_ptr<std::mutex> lock = std::make_unique<std::mutex>();
  std::shared_ptr<Engine> engine;
  std::unique_ptr<State> state;
  std::size_t sentences = 0, beams = 1, src_tokens = 0;
  std::shared_ptr<Scores> scores = std::make_shared<Scores>();  // of the last step; numpy may still read them
};

/// A call of a state, the only one: other threads of Python run while it computes.
std::unique_lock<std::mutex> only_call(const Decode& decode) {
  std::unique_lock<std::mutex> held(*decode.lock, std::try_to_lock);
  if (held.owns_lock()) return held;
  throw Error(Status::usage, "the state is in a call of another thread: encode once for each thread");
}

/// (B, K, width) over memory that `owner` keeps.
template <typename Value>
nb::ndarray<nb::numpy, Value> shared(std::vector<Value>& found, const Decode& decode, const nb::capsule& owner) {
  const std::size_t rows = decode.sentences * decode.beams;
  if (found.empty() || found.size() % rows != 0) {
    throw Error(Status::internal, "internal fault: a step gave other sizes: please report it");
  }
  return {found.data(), {decode.sentences, decode.beams, found.size() / rows}, owner};
}

void admit(Decode& decode, nb::handle src_ids, nb::handle src_lengths, std::int64_t beams, std::int64_t tokens,
           const Lists& required) {
  const Sources sources(src_ids, src_lengths);
  sources.require_each("required", required.size());
  const auto call = only_call(decode);
  const Outlook outlook = outlook_of(*decode.engine, beams, tokens, required);
  {
    const nb::gil_scoped_release others;
    decode.engine->admit(*decode.state, sources.ids.values, sources.lengths.values, outlook);
  }
  decode.sentences += sources.count();
  decode.src_tokens = std::max(decode.src_tokens, sources.width());
}

std::int64_t best(const Decode& decode, std::int64_t beams) {
  const auto call = only_call(decode);
  if (beams < 1) refuse("beams", std::to_string(beams), "at least 1");
  check_step(beams, 0, decode.engine->limits());
  return decode.engine->best(beams, *decode.state);
}

/// Ids and scores (B, K, k), log-probabilities (B, K, V) and attention (B, K, S), None where not asked for.
nb::tuple step(Decode& decode, nb::handle tokens, bool full, bool attention) {
  const Ids fed = ids_of(tokens, "tokens", 2);
  const auto call = only_call(decode);
  const std::vector<std::size_t> rows{decode.sentences, decode.beams};
  fed.require_shape(fed.shape == rows, Ids::shown(rows) + ", the state's sentences and rows of each");
  if (decode.scores.use_count() > 1) decode.scores = std::make_shared<Scores>();
  Scores& found = *decode.scores;
  {
    const nb::gil_scoped_release others;
    decode.engine->step(fed.values, *decode.state, full, attention, found);
  }
  const nb::capsule owner(new std::shared_ptr<Scores>(decode.scores),
                          [](void* kept) noexcept { delete static_cast<std::shared_ptr<Scores>*>(kept); });
  nb::object log_probs = nb::none(), weights = nb::none();
  if (full) log_probs = nb::cast(shared(found.log_probs, decode, owner));
  if (attention) weights = nb::cast(shared(found.attention, decode, owner));
  return nb::make_tuple(shared(found.ids, decode, owner), shared(found.scores, decode, owner), log_probs, weights);
}

void reorder(Decode& decode, nb::handle parents, nb::handle sentences) {
  const Ids from = ids_of(parents, "parents", 2);
  const auto call = only_call(decode);
  std::vector<std::int32_t> kept;
  if (!sentences.is_none()) {
    kept = ids_of(sentences, "sentences", 1).values;
  } else {
    for (std::size_t i = 0; i < decode.sentences; ++i) kept.push_back(static_cast<std::int32_t>(i));
  }
  from.require_shape(from.shape[0] == kept.size() && !from.values.empty(),
                     "(" + std::to_string(kept.size()) + ", rows), with the parents of each sentence that is kept");
  const std::size_t width = from.shape[1];
  check_step(static_cast<std::int64_t>(width), 0, decode.engine->limits());
  for (std::size_t i = 0; i < kept.size(); ++i) {
    const auto sentence = static_cast<std::size_t>(kept[i]);
    if (sentence >= decode.sentences || (i && kept[i - 1] >= kept[i])) {
      refuse("sentences", std::to_string(kept[i]),
             "numbers from 0 to " + std::to_string(decode.sentences - 1) + ", each larger than the one before");
    }
  }
  for (std::size_t i = 0; i < from.values.size(); ++i) {
    const std::size_t first = static_cast<std::size_t>(kept[i / width]) * decode.beams;
    const auto row = static_cast<std::size_t>(from.values[i]);
    if (row < first || row >= first + decode.beams) {
      refuse("parents", std::to_string(from.values[i]),
             "a row of sentence " + std::to_string(kept[i / width]) + ", which has " + std::to_string(first) + " to " +
                 std::to_string(first + decode.beams - 1));
    }
  }
  {
    const nb::gil_scoped_release others;
    decode.engine->reorder(*decode.state, from.values, kept);
  }
  decode.sentences = kept.size();
  decode.beams = width;
}

/// A numpy array that owns the numbers.
nb::ndarray<nb::numpy, float> as_numpy(std::vector<float> found) {
  auto kept = std::make_unique<std::vector<float>>(std::move(found));
  std::vector<float>& numbers = *kept;
  const nb::capsule owner(kept.release(), [](void* all) noexcept { delete static_cast<std::vector<float>*>(all); });
  return {numbers.data(), {numbers.size()}, owner};
}

/// 2L of (B * H * S * D).
nb::list cross_keys_values(const Decode& decode) {
  const auto call = only_call(decode);
  nb::list found;
  for (auto& each : decode.engine->cross_keys_values(*decode.state)) found.append(as_numpy(std::move(each)));
  return found;
}

class Model {
 public:
  /// `onnxruntime`: the file of the library that is to run the bundle's graphs, `tensorrt`: its plans; without both the
  /// CPU engine runs a program.
  Model(nb::handle files, const std::string& variant, int threads, bool shortlist, const std::string& kernels,
        const std::optional<std::string>& onnxruntime, const std::optional<std::string>& tensorrt,
        const std::string& name) {
    const Folder folder = folder_of(files, name);
    const nb::gil_scoped_release others;
    const auto kept = folder.keep();
    if (onnxruntime && tensorrt) throw Error(Status::usage, "onnxruntime and tensorrt: name one of them");
    Settings settings;
    settings.set("backend", tensorrt ? "trt" : onnxruntime ? "ort" : "native");
    if (onnxruntime) settings.set("onnxruntime", *onnxruntime);
    if (tensorrt) settings.set("tensorrt", *tensorrt);
    settings.set("variant", variant);
    settings.set("threads", std::to_string(threads));
    settings.set("shortlist", shortlist ? "true" : "false");
    settings.set("kernels", kernels);
    auto bundle = std::make_shared<const Bundle>(Bundle::open(folder, true));
    engines_ = std::make_shared<Engines>(open_backend(std::move(bundle), settings.open));
    const auto engine = engines_->lend();
    attention_ = engine->attention();
    admits_ = engine->admits();
  }

  bool attention() const { return attention_; }
  bool admits() const { return admits_; }
  std::int64_t batch_tokens() const { return engines_->backend().batch_tokens(); }
  std::string warning() const { return engines_->backend().warning(); }
  nb::tuple limits() const {
    const Limits& most = engines_->backend().limits();
    return nb::make_tuple(most.batch, most.src_tokens, most.tgt_tokens, most.beams);
  }

  Decode encode(nb::handle src_ids, nb::handle src_lengths, std::int64_t beams, std::int64_t tokens,
                const Lists& required) const {
    const Sources sources(src_ids, src_lengths);
    sources.require_each("required", required.size());
    Decode made;
    made.sentences = sources.count();
    made.src_tokens = sources.width();
    const nb::gil_scoped_release others;
    made.engine = engines_->lend();
    made.state = made.engine->encode(sources.ids.values, sources.lengths.values,
                                     outlook_of(*made.engine, beams, tokens, required));
    return made;
  }

  std::unique_ptr<Running> continuous() const {
    const nb::gil_scoped_release others;
    return std::make_unique<Running>(engines_->lend());
  }

  /// The encoder's own output, (B * S * E).
  nb::ndarray<nb::numpy, float> memory(nb::handle src_ids, nb::handle src_lengths) const {
    const Sources sources(src_ids, src_lengths);
    std::vector<float> found;
    {
      const nb::gil_scoped_release others;
      found = engines_->lend()->memory(sources.ids.values, sources.lengths.values);
    }
    return as_numpy(std::move(found));
  }

  /// Of each source its outputs: ids, end token or None, score, value, alignment. `calls` gets name, begin, end of each
  /// call of the engine, unless it is None.
  nb::list search(nb::handle src_ids, nb::handle src_lengths, const std::vector<std::int64_t>& numbers, const Lists& prefixes,
                  const std::string& options, const Trie* allowed, bool strict, std::optional<nb::list> calls) const {
    const Batch batch = batch_of(src_ids, src_lengths, numbers, prefixes);
    const DecodeOptions asked = options_from(options);
    Hooks hooks;
    hooks.allowed = allowed;
    hooks.strict = strict;
    std::vector<Call> noted;
    std::vector<std::vector<Hypothesis>> found;
    {
      const nb::gil_scoped_release others;
      const auto engine = engines_->lend();
      Observed observed(*engine, calls ? &noted : nullptr, stop_for_signals);
      found = decode(observed, batch, asked, hooks);
    }
    for (const Call& each : noted) calls->append(nb::make_tuple(each.name, each.begin, each.end));
    return listed(found);
  }

 private:
  std::shared_ptr<Engines> engines_;
  bool attention_ = false, admits_ = false;
};

/// Raises `Error` of the module: message, status, number of the request.
void raise(PyObject* type, Status status, const std::string& message, std::uint64_t request = 0) {
  const nb::object text = nb::steal(PyUnicode_DecodeUTF8(message.data(), static_cast<Py_ssize_t>(message.size()), "replace"));
  PyErr_SetObject(type, nb::make_tuple(text, static_cast<int>(status), request).ptr());
}

void translate(const std::exception_ptr& thrown, void* type) {
  auto* const error_type = static_cast<PyObject*>(type);
  try {
    std::rethrow_exception(thrown);
  } catch (const nb::python_error&) {  // nanobind raises these two itself
    throw;
  } catch (const nb::builtin_exception&) {
    throw;
  } catch (const NotNumbers& error) {
    raise(error_type, error.status, error.what(), error.request);
  } catch (...) {
    const Error error = described(thrown);
    raise(error_type, error.status, error.what());
  }
}

}  // namespace
}  // namespace tformer::python

NB_MODULE(_native, module) {
  using namespace tformer::python;
  using namespace nb::literals;
  nb::set_leak_warnings(false);  // a translator that nobody closed is no fault at the end of a process
  module.attr("__version__") = TFORMER_VERSION;
  nb::object error = nb::steal(PyErr_NewException("tformer_native.Error", PyExc_Exception, nullptr));
  module.attr("Error") = error;
  error.attr("__str__") = nb::cpp_function(
      [](nb::handle self) {
        const nb::tuple values(self.attr("args"));
        return values.size() ? nb::str(values[0]) : nb::str("");
      },
      nb::is_method());
  nb::register_exception_translator(translate, error.release().ptr());  // the module lives as long as the process
  nb::class_<tformer::Trie>(module, "Outputs").def(nb::init<const Lists&>(), "outputs"_a);
  nb::class_<Decode>(module, "State")
      .def_ro("sentences", &Decode::sentences)
      .def_ro("src_tokens", &Decode::src_tokens)
      .def("admit", admit, "src_ids"_a.none(), "src_lengths"_a.none(), "beams"_a, "tokens"_a, "required"_a)
      .def("best", best, "beams"_a)
      .def("step", step, "tokens"_a.none(), "full"_a, "attention"_a)
      .def("reorder", reorder, "parents"_a.none(), "sentences"_a.none())
      .def("cross_keys_values", cross_keys_values);
  static PyType_Slot collected[] = {{Py_tp_traverse, reinterpret_cast<void*>(Joined::traverse)},
                                    {Py_tp_clear, reinterpret_cast<void*>(Joined::clear)},
                                    {0, nullptr}};
  nb::class_<Joined>(module, "Joined", nb::type_slots(collected))
      .def(
          "__init__",
          [](Joined* made, const Running& batch, nb::handle src_ids, nb::handle src_lengths,
             const std::vector<std::int64_t>& numbers, const Lists& prefixes, const std::string& options,
             const tformer::Trie* allowed, nb::object on_token) {
            new (made) Joined(batch.engine(), batch_of(src_ids, src_lengths, numbers, prefixes), options_from(options),
                              allowed, std::move(on_token));
          },
          "batch"_a, "src_ids"_a.none(), "src_lengths"_a.none(), "numbers"_a, "prefixes"_a, "options"_a,
          "allowed"_a.none(), "on_token"_a.none(), nb::keep_alive<1, 8>())
      .def_prop_ro("running", &Joined::running)
      .def("outputs", &Joined::outputs);
  nb::class_<Running>(module, "Running")
      .def("add", &Running::add, "searches"_a)
      .def("step", &Running::step)
      .def("remove", &Running::remove, "search"_a);
  nb::class_<Model>(module, "Model")
      .def(nb::init<nb::handle, const std::string&, int, bool, const std::string&, const std::optional<std::string>&,
                    const std::optional<std::string>&, const std::string&>(),
           "bundle"_a, "variant"_a, "threads"_a, "shortlist"_a = false, "kernels"_a = "", "onnxruntime"_a = nb::none(),
           "tensorrt"_a = nb::none(), "name"_a = "memory")
      .def_prop_ro("limits", &Model::limits)
      .def_prop_ro("attention", &Model::attention)
      .def_prop_ro("admits", &Model::admits)
      .def_prop_ro("batch_tokens", &Model::batch_tokens)
      .def_prop_ro("warning", &Model::warning)
      .def("encode", &Model::encode, "src_ids"_a.none(), "src_lengths"_a.none(), "beams"_a, "tokens"_a, "required"_a)
      .def("continuous", &Model::continuous)
      .def("memory", &Model::memory, "src_ids"_a.none(), "src_lengths"_a.none())
      .def("search", &Model::search, "src_ids"_a.none(), "src_lengths"_a.none(), "numbers"_a, "prefixes"_a, "options"_a,
           "allowed"_a.none(), "strict"_a, "calls"_a.none());
  add_bundles(module);
  module.def("tensorrt_headers", &tformer::tensorrt_headers);
  module.def("kernels", &tformer::kernels::names);
  module.def("best_kernels", [] { return tformer::kernels::best().name; });
  module.def("product_rate", &product_rate, "numbers"_a, "threads"_a, nb::call_guard<nb::gil_scoped_release>());
}
