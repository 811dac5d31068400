// The C API over the C++ classes: exceptions become statuses and messages.
#include <algorithm>
#include <atomic>
#include <limits>
#include <memory>
#include <new>

#include "api.hpp"
#include "cores.hpp"
#include "described.hpp"
#include "serving.hpp"
#include "text/unicode.hpp"
#include "translator.hpp"

using tformer::Status;

struct tformer_translator {
  tformer::Translator translator;
  decltype(tformer::Translator::on_step) on_step = nullptr;  ///< for calls that begin from now on
  std::atomic_flag busy = ATOMIC_FLAG_INIT;
};

struct tformer_serving {
  tformer::Serving serving;
};

struct tformer_results {
  tformer::Results found;
  std::vector<std::vector<tformer_output>> outputs;
};

namespace {

constexpr bool same(Status ours, tformer_status theirs) { return static_cast<int>(ours) == static_cast<int>(theirs); }
static_assert(same(Status::ok, TFORMER_OK) && same(Status::usage, TFORMER_USAGE) && same(Status::bundle, TFORMER_BUNDLE) &&
              same(Status::limit, TFORMER_LIMIT) && same(Status::text, TFORMER_TEXT) &&
              same(Status::engine, TFORMER_ENGINE) && same(Status::not_numbers, TFORMER_NOT_NUMBERS) &&
              same(Status::missing, TFORMER_MISSING) && same(Status::cancelled, TFORMER_CANCELLED) &&
              same(Status::no_memory, TFORMER_NO_MEMORY) && same(Status::internal, TFORMER_INTERNAL));

thread_local std::string last_message;

}  // namespace

tformer_status tformer::status_of_exception() noexcept {
  try {
    const Error error = described(std::current_exception());
    last_message = one_line(error.what());
    return static_cast<tformer_status>(error.status);
  } catch (const std::bad_alloc&) {
    last_message = "no memory left";  // so short that it needs none
    return TFORMER_NO_MEMORY;
  }
}

namespace {

using tformer::guarded;
using tformer::require;

std::vector<std::string_view> views(const tformer_text* texts, std::size_t count) {
  std::vector<std::string_view> all;
  for (std::size_t i = 0; i < count; ++i) {
    if (texts[i].size) require(texts[i].data, "a text");
    all.emplace_back(texts[i].size ? texts[i].data : "", texts[i].size);
  }
  return all;
}

/// Marks a translator as busy while it lives. A second call, as from a callback, would deadlock: it is refused.
class Call {
 public:
  explicit Call(tformer_translator& translator) : called_(translator) {
    auto on_step = called_.on_step;  // this may throw, so it comes before the translator is marked
    if (called_.busy.test_and_set()) {
      throw tformer::Error(Status::usage, "the translator is in a call: make none from a callback, nor from two threads");
    }
    called_.translator.on_step.swap(on_step);
  }
  ~Call() { called_.busy.clear(); }
  Call(const Call&) = delete;
  tformer::Translator* operator->() const { return &called_.translator; }

 private:
  tformer_translator& called_;
};

/// The number of the first of `count` lines. Throws Error where the last one's would overflow.
std::int64_t number_of(std::uint64_t first, std::size_t count, const char* name) {
  constexpr std::uint64_t most = std::numeric_limits<std::int64_t>::max();
  if (count <= most && first <= most - count) return static_cast<std::int64_t>(first);
  throw tformer::Error(Status::usage, std::string(name) + "=" + std::to_string(first) +
                                          ": must be a whole number from 0 to " + std::to_string(most) +
                                          " less the number of lines");
}

/// Results as C structs. If memory runs out, `found` is unchanged.
std::unique_ptr<tformer_results> results_of(tformer::Results& found) {
  auto made = std::make_unique<tformer_results>();
  for (const auto& line : found.lines) {
    std::vector<tformer_output>& outputs = made->outputs.emplace_back();
    for (const tformer::Output& each : line) {
      const tformer::Hypothesis& it = each.found;
      outputs.push_back({each.text.c_str(), each.text.size(), it.ids.data(), it.ids.size(),
                         it.alignment.empty() ? nullptr : it.alignment.data(), it.score, it.value, it.finished});
    }
  }
  made->found = std::move(found);  // moving does not move what the structs point to
  return made;
}

/// Hand results to the caller, then throw the error of the first bad line.
void hand_over(std::unique_ptr<tformer_results> made, tformer_results** results) {
  const std::exception_ptr error = made->found.error;
  *results = made.release();
  if (error) std::rethrow_exception(error);
}

/// Make a call of a translator that has results.
template <typename Work>
tformer_status with_results(tformer_translator* translator, tformer_results** results, const Work& work) noexcept {
  return guarded([&] {
    require(results, "results");
    *results = nullptr;
    require(translator, "translator");
    tformer::Results found = work();
    hand_over(results_of(found), results);
  });
}

/// The ids that `split` makes of a text.
template <typename Split>
tformer_status copy_ids(const tformer_model* model, tformer_text text, tformer_ids* ids, const Split& split) noexcept {
  return guarded([&] {
    require(ids, "ids");
    *ids = {nullptr, 0};
    require(model, "model");
    const std::vector<std::int32_t> found = split(*model->open, views(&text, 1)[0]);
    auto copy = std::make_unique<std::int32_t[]>(found.size() + 1);
    std::copy(found.begin(), found.end(), copy.get());
    ids->size = found.size();
    ids->data = copy.release();
  });
}

}  // namespace

extern "C" {

const char* tformer_version(void) { return TFORMER_VERSION; }

size_t tformer_cores(void) {
  try {
    return static_cast<std::size_t>(tformer::cores());
  } catch (...) {  // no memory to read the quota
    return 1;
  }
}

const char* tformer_error(void) { return last_message.c_str(); }

tformer_options* tformer_options_new(void) {
  try {
    return new tformer_options;
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

tformer_status tformer_options_set(tformer_options* options, const char* name, const char* value) {
  return guarded([&] {
    require(options, "options");
    require(name, "name");
    require(value, "value");
    options->settings.set(name, value);
  });
}

void tformer_options_free(tformer_options* options) { delete options; }

tformer_status tformer_model_open(const char* folder, const tformer_options* options, tformer_model** model) {
  return guarded([&] {
    require(model, "model");
    *model = nullptr;
    require(folder, "folder");
    const tformer::Settings settings = options ? options->settings : tformer::Settings();
    *model = new tformer_model{std::make_shared<const tformer::OpenModel>(std::filesystem::path(folder), settings)};
  });
}

void tformer_model_close(tformer_model* model) { delete model; }

const char* tformer_model_variant(const tformer_model* model) { return model ? model->open->variant().c_str() : ""; }

const char* tformer_model_warning(const tformer_model* model) { return model ? model->open->backend().warning() : ""; }

size_t tformer_model_source_tokens(const tformer_model* model) {
  return model ? static_cast<size_t>(model->open->backend().limits().src_tokens) : 0;
}

size_t tformer_model_target_tokens(const tformer_model* model) {
  return model ? static_cast<size_t>(model->open->backend().limits().tgt_tokens) : 0;
}

tformer_status tformer_source_ids(const tformer_model* model, tformer_text text, tformer_ids* ids) {
  return copy_ids(model, text, ids, tformer::source_ids);
}

tformer_status tformer_target_ids(const tformer_model* model, tformer_text text, tformer_ids* ids) {
  return copy_ids(model, text, ids, tformer::target_ids);
}

tformer_status tformer_target_entry(const tformer_model* model, tformer_text entry, int32_t* id) {
  return guarded([&] {
    require(id, "id");
    *id = -1;
    require(model, "model");
    *id = tformer::target_entry(*model->open, views(&entry, 1)[0]);
  });
}

void tformer_ids_free(tformer_ids* ids) {
  if (!ids) return;
  delete[] ids->data;
  *ids = {nullptr, 0};
}

tformer_status tformer_translator_new(tformer_model* model, const tformer_options* options,
                                      tformer_translator** translator) {
  return guarded([&] {
    require(translator, "translator");
    *translator = nullptr;
    require(model, "model");
    *translator = new tformer_translator{{model->open, options ? options->settings : tformer::Settings()}};
  });
}

void tformer_translator_free(tformer_translator* translator) { delete translator; }

size_t tformer_translator_n_best(const tformer_translator* translator) {
  return translator ? static_cast<std::size_t>(translator->translator.options().n_best) : 0;
}

int tformer_translator_aligns(const tformer_translator* translator) {
  return translator && translator->translator.options().align;
}

tformer_status tformer_allow(tformer_translator* translator, const tformer_text* outputs, size_t count) {
  return guarded([&] {
    require(translator, "translator");
    if (count) require(outputs, "outputs");
    Call(*translator)->allow(views(outputs, count));
  });
}

void tformer_on_step(tformer_translator* translator, tformer_step_callback callback, void* user) {
  if (!translator) return;
  translator->on_step = nullptr;
  if (!callback) return;
  translator->on_step = [callback, user](const std::vector<tformer::Candidate>& candidates) {
    std::vector<tformer_candidate> all;
    for (const tformer::Candidate& it : candidates) {
      all.push_back({static_cast<std::uint64_t>(it.sentence), it.row, it.token, it.rank, it.value, it.score});
    }
    return callback(user, all.data(), all.size()) == 0;
  };
}

void tformer_cancel(tformer_translator* translator) { if (translator) translator->translator.cancel(); }

tformer_status tformer_translate(tformer_translator* translator, const tformer_text* lines,
                                 const tformer_text* prefixes, size_t count, uint64_t first,
                                 tformer_results** results) {
  return with_results(translator, results, [&] {
    if (count) require(lines, "lines");
    return Call(*translator)->translate(views(lines, count), views(prefixes, prefixes ? count : 0),
                                        number_of(first, count, "first"));
  });
}

tformer_status tformer_generate(tformer_translator* translator, const tformer_ids* sources, size_t count,
                                uint64_t first, tformer_results** results) {
  return with_results(translator, results, [&] {
    if (count) require(sources, "sources");
    std::vector<std::vector<std::int32_t>> all;
    for (std::size_t i = 0; i < count; ++i) {
      if (sources[i].size) require(sources[i].data, "a source");
      all.emplace_back(sources[i].data, sources[i].data + sources[i].size);
    }
    return Call(*translator)->generate(all, number_of(first, count, "first"));
  });
}

tformer_status tformer_stream(tformer_translator* translator, tformer_text line, tformer_text prefix, uint64_t number,
                              tformer_text_callback write, void* user, tformer_results** results) {
  return with_results(translator, results, [&] {
    require(write, "write");
    const auto show = [&](std::string_view piece) { return write(user, piece.data(), piece.size()) == 0; };
    return Call(*translator)->stream(views(&line, 1)[0], views(&prefix, 1)[0], number_of(number, 1, "number"), show);
  });
}

tformer_status tformer_score(tformer_translator* translator, const tformer_text* sources, const tformer_text* targets,
                             size_t count, uint64_t first, tformer_results** results) {
  return with_results(translator, results, [&] {
    if (count) require(sources, "sources");
    if (count) require(targets, "targets");
    return Call(*translator)->score(views(sources, count), views(targets, count), number_of(first, count, "first"));
  });
}

tformer_status tformer_serving_new(tformer_model* model, const tformer_options* options, tformer_serving** serving) {
  return guarded([&] {
    require(serving, "serving");
    *serving = nullptr;
    require(model, "model");
    *serving = new tformer_serving{{model->open, options ? options->settings : tformer::Settings()}};
  });
}

void tformer_serving_free(tformer_serving* serving) { delete serving; }

tformer_status tformer_admit(tformer_serving* serving, tformer_text line, tformer_text prefix,
                             const tformer_options* options, uint64_t number) {
  return guarded([&] {
    require(serving, "serving");
    serving->serving.admit(views(&line, 1)[0], views(&prefix, 1)[0], options ? &options->settings : nullptr,
                           number_of(number, 1, "number"));
  });
}

tformer_status tformer_step(tformer_serving* serving, size_t* lines) {
  return guarded([&] {
    require(serving, "serving");
    const std::size_t left = serving->serving.step();
    if (lines) *lines = left;
  });
}

tformer_status tformer_take(tformer_serving* serving, uint64_t* number, tformer_results** results) {
  return guarded([&] {
    require(results, "results");
    *results = nullptr;
    require(serving, "serving");
    require(number, "number");
    std::unique_ptr<tformer_results> made;
    serving->serving.take([&made, number](tformer::Served& line) {
      made = results_of(line.results);
      *number = static_cast<std::uint64_t>(line.number);
    });
    if (made) hand_over(std::move(made), results);
  });
}

tformer_status tformer_retire(tformer_serving* serving, uint64_t number) {
  return guarded([&] {
    require(serving, "serving");
    serving->serving.retire(static_cast<std::int64_t>(number));
  });
}

size_t tformer_results_lines(const tformer_results* results) { return results ? results->outputs.size() : 0; }

size_t tformer_results_outputs(const tformer_results* results, size_t line) {
  return line < tformer_results_lines(results) ? results->outputs[line].size() : 0;
}

const tformer_output* tformer_results_output(const tformer_results* results, size_t line, size_t output) {
  return output < tformer_results_outputs(results, line) ? &results->outputs[line][output] : nullptr;
}

const double* tformer_results_scores(const tformer_results* results, size_t line) {
  return results && line < results->found.scores.size() ? results->found.scores[line].data() : nullptr;
}

void tformer_results_free(tformer_results* results) { delete results; }

}  // extern "C"
