// libtformer for C++17: classes over tformer.h, which documents threads and errors. Include only this header.
//
//   tformer::Model model("bundles/numbers");
//   tformer::Translator translator(model, {{"beams", "5"}});
//   std::cout << translator.translate({"forty-two"})[0][0].text << '\n';
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "bundle.hpp"

namespace tformer {
inline namespace api {

/// Names and values, as for tformer_options_set. A zero byte in one throws std::invalid_argument.
using Options = std::vector<std::pair<std::string, std::string>>;

/// One output of a line.
struct Output {
  std::string text;
  std::vector<std::int32_t> ids;        ///< target tokens without start and end token
  std::vector<std::int32_t> alignment;  ///< the source token, from 0, that each of `ids` attends to most; with `align`
  double score = 0;                     ///< sum of the tokens' log-probabilities, end token included
  double value = 0;                     ///< what a beam is ranked by: the score after penalties
  bool finished = true;                 ///< ended by itself; false: a limit cut it off
};

/// What gets the candidates of a step.
using Steps = std::function<bool(const std::vector<tformer_candidate>&)>;

/// The outputs of each line, best first.
using Outputs = std::vector<std::vector<Output>>;

namespace detail {

inline Owned<tformer_options> options(const Options& values) {
  Owned<tformer_options> made(tformer_options_new());
  if (!made) throw std::bad_alloc();
  for (const auto& [name, value] : values) check(tformer_options_set(made.get(), whole(name), whole(value)));
  return made;
}

inline tformer_text text(const std::string& text) { return {text.data(), text.size()}; }

inline std::vector<tformer_text> texts(const std::vector<std::string>& lines) {
  std::vector<tformer_text> all;
  for (const std::string& line : lines) all.push_back(text(line));
  return all;
}

inline Outputs outputs(const tformer_results* results) {
  Outputs lines(tformer_results_lines(results));
  for (std::size_t i = 0; i < lines.size(); ++i) {
    for (std::size_t k = 0; k < tformer_results_outputs(results, i); ++k) {
      const tformer_output* it = tformer_results_output(results, i, k);
      Output output{std::string(it->text, it->text_size), {it->ids, it->ids + it->ids_size}, {}, it->score, it->value,
                    it->finished != 0};
      if (it->alignment) output.alignment.assign(it->alignment, it->alignment + it->ids_size);
      lines[i].push_back(std::move(output));
    }
  }
  return lines;
}

}  // namespace detail

/// An open bundle. Any number of threads may make translators of it.
class Model {
 public:
  explicit Model(const std::string& folder, const Options& options = {}) {
    tformer_model* model = nullptr;
    check(tformer_model_open(detail::whole(folder), detail::options(options).get(), &model));
    model_.reset(model);
  }
  /// The same of files that are no folder; `name` stands for it in messages. What `files` throws comes out of this.
  explicit Model(Files files, const Options& options = {}, const std::string& name = "memory") {
    const auto set = detail::options(options);
    detail::Reading(std::move(files)).check(name, [&](const tformer_files* it) {
      tformer_model* model = nullptr;
      const tformer_status status = tformer_model_open_files(it, set.get(), &model);
      model_.reset(model);
      return status;
    });
  }
  std::string variant() const { return tformer_model_variant(model_.get()); }
  /// Why it runs slower than it could, if its translators have found a reason; else empty.
  std::string warning() const { return tformer_model_warning(model_.get()); }
  std::size_t source_tokens() const { return tformer_model_source_tokens(model_.get()); }
  std::size_t target_tokens() const { return tformer_model_target_tokens(model_.get()); }
  std::vector<std::int32_t> source_ids(const std::string& text) const { return ids(tformer_source_ids, text); }
  std::vector<std::int32_t> target_ids(const std::string& text) const { return ids(tformer_target_ids, text); }
  /// The id of an entry of the target vocabulary.
  std::int32_t target_entry(const std::string& entry) const {
    std::int32_t id = -1;
    check(tformer_target_entry(model_.get(), detail::text(entry), &id));
    return id;
  }
  /// The text of target ids. Not `ended`: without what further ids may change, so that what a growing output adds to it
  /// can be shown at once.
  std::string target_text(const std::vector<std::int32_t>& from, bool ended = true) const {
    tformer_text found{};
    check(tformer_target_text(model_.get(), {from.data(), from.size()}, ended ? 1 : 0, &found));
    const std::unique_ptr<tformer_text, void (*)(tformer_text*)> freed(&found, tformer_text_free);
    return {found.data, found.size};
  }
  tformer_model* get() const { return model_.get(); }

 private:
  detail::Owned<tformer_model> model_;

  std::vector<std::int32_t> ids(tformer_status (*of)(const tformer_model*, tformer_text, tformer_ids*),
                                const std::string& text) const {
    tformer_ids found{};
    check(of(model_.get(), detail::text(text), &found));
    const std::unique_ptr<tformer_ids, void (*)(tformer_ids*)> freed(&found, tformer_ids_free);
    return {found.data, found.data + found.size};
  }
};

/// For one thread at a time; `cancel` may be called from another.
class Translator {
 public:
  explicit Translator(const Model& model, const Options& options = {}) {
    tformer_translator* translator = nullptr;
    check(tformer_translator_new(model.get(), detail::options(options).get(), &translator));
    translator_.reset(translator);
  }

  /// `call` gets the candidates of each step, until it is replaced, which it may do itself; empty: none does. Returning
  /// false stops the running call; so does an exception, which that call rethrows.
  void on_step(Steps call) {
    if (!stepped_) stepped_ = std::make_unique<Stepped>();
    stepped_->call = call ? std::make_shared<const Steps>(std::move(call)) : nullptr;
    const auto step = [](void* it, const tformer_candidate* candidates, std::size_t count) {
      auto& own = *static_cast<Stepped*>(it);
      const auto running = own.call;  // it may replace itself
      try {
        return !running || (*running)({candidates, candidates + count}) ? 0 : 1;
      } catch (...) {
        own.thrown = std::current_exception();
        return 1;
      }
    };
    tformer_on_step(translator_.get(), stepped_->call ? +step : nullptr, stepped_.get());
  }

  /// Throws the error of the first bad line.
  Outputs translate(const std::vector<std::string>& lines, const std::vector<std::string>& prefixes = {},
                    std::uint64_t first = 0) {
    Outputs found;
    check(translate_to(found, lines, prefixes, first));
    return found;
  }

  /// The same without throwing for a bad line: the status says so, and `found` has the outputs of all lines before it.
  tformer_status translate_to(Outputs& found, const std::vector<std::string>& lines,
                              const std::vector<std::string>& prefixes = {}, std::uint64_t first = 0) {
    if (!prefixes.empty() && prefixes.size() != lines.size()) throw std::invalid_argument("give one prefix a line");
    const std::vector<tformer_text> from = detail::texts(lines), begins = detail::texts(prefixes);
    tformer_results* results = nullptr;
    const tformer_text* begin = begins.empty() ? nullptr : begins.data();
    const tformer_status status =
        tformer_translate(translator_.get(), from.data(), begin, from.size(), first, &results);
    const detail::Owned<tformer_results> freed(results);
    rethrow();
    found = detail::outputs(results);
    return status;
  }

  /// For sources given as the ids that the model sees.
  Outputs generate(const std::vector<std::vector<std::int32_t>>& sources, std::uint64_t first = 0) {
    Outputs found;
    check(generate_to(found, sources, first));
    return found;
  }

  /// The same without throwing for a bad source: the status says so, and `found` has the outputs of all before it.
  tformer_status generate_to(Outputs& found, const std::vector<std::vector<std::int32_t>>& sources,
                             std::uint64_t first = 0) {
    std::vector<tformer_ids> ids;
    for (const auto& source : sources) ids.push_back({source.data(), source.size()});
    tformer_results* results = nullptr;
    const tformer_status status = tformer_generate(translator_.get(), ids.data(), ids.size(), first, &results);
    const detail::Owned<tformer_results> freed(results);
    rethrow();
    found = detail::outputs(results);
    return status;
  }

  /// Translate one line; `write` gets its text piece by piece. Returning false stops the call; so does an exception,
  /// which is rethrown. An empty `write` throws std::invalid_argument.
  Output stream(const std::string& line, const std::function<bool(const std::string&)>& write,
                const std::string& prefix = "", std::uint64_t number = 0) {
    if (!write) throw std::invalid_argument("write is empty: give a function");
    struct User {
      const std::function<bool(const std::string&)>& write;
      std::exception_ptr thrown;
    } user{write, nullptr};
    const auto call = [](void* it, const char* piece, std::size_t size) {
      auto& own = *static_cast<User*>(it);
      try {
        return own.write(std::string(piece, size)) ? 0 : 1;
      } catch (...) {
        own.thrown = std::current_exception();
        return 1;
      }
    };
    tformer_results* results = nullptr;
    const tformer_status status =
        tformer_stream(translator_.get(), detail::text(line), detail::text(prefix), number, call, &user, &results);
    const detail::Owned<tformer_results> freed(results);
    if (user.thrown) std::rethrow_exception(user.thrown);
    rethrow();
    check(status);
    return detail::outputs(results)[0][0];
  }

  /// The log-probability of every token of each target, end token included. Throws the error of the first bad line.
  std::vector<std::vector<double>> score(const std::vector<std::string>& sources,
                                         const std::vector<std::string>& targets, std::uint64_t first = 0) {
    std::vector<std::vector<double>> scores;
    check(score_to(scores, sources, targets, first));
    return scores;
  }

  /// The same without throwing for a bad line: the status says so, and `found` has the scores of the lines before it.
  tformer_status score_to(std::vector<std::vector<double>>& found, const std::vector<std::string>& sources,
                          const std::vector<std::string>& targets, std::uint64_t first = 0) {
    if (sources.size() != targets.size()) throw std::invalid_argument("give one target a source");
    const std::vector<tformer_text> from = detail::texts(sources), to = detail::texts(targets);
    tformer_results* results = nullptr;
    const tformer_status status =
        tformer_score(translator_.get(), from.data(), to.data(), from.size(), first, &results);
    const detail::Owned<tformer_results> freed(results);
    found.clear();
    for (std::size_t i = 0; i < tformer_results_lines(results); ++i) {
      const double* each = tformer_results_scores(results, i);
      found.emplace_back(each, each + tformer_results_output(results, i, 0)->ids_size);
    }
    return status;
  }

  /// Allow only these outputs from now on; none: allow any.
  void allow(const std::vector<std::string>& lines) {
    const std::vector<tformer_text> outputs = detail::texts(lines);
    check(tformer_allow(translator_.get(), outputs.data(), outputs.size()));
  }

  /// Outputs per line, and whether they have alignments, by the bundle's options and these.
  std::size_t n_best() const { return tformer_translator_n_best(translator_.get()); }
  bool aligns() const { return tformer_translator_aligns(translator_.get()) != 0; }

  /// Stop the call that is running in another thread.
  void cancel() { tformer_cancel(translator_.get()); }
  tformer_translator* get() const { return translator_.get(); }

 private:
  struct Stepped {
    std::shared_ptr<const Steps> call;
    std::exception_ptr thrown;
  };
  std::unique_ptr<Stepped> stepped_;  // in one place, also where the translator is moved
  detail::Owned<tformer_translator> translator_;

  void rethrow() {
    if (stepped_ && stepped_->thrown) std::rethrow_exception(std::exchange(stepped_->thrown, nullptr));
  }
};

/// A line that has ended.
struct Served {
  std::uint64_t number = 0;
  std::vector<Output> outputs;         ///< best first; empty if the line failed
  tformer_status status = TFORMER_OK;  ///< why it failed,
  std::string message = {};            ///< in words
};

/// Continuous batching: lines join and leave a running batch. Thread-safe; steps run one at a time.
class Serving {
 public:
  explicit Serving(const Model& model, const Options& options = {}) {
    tformer_serving* serving = nullptr;
    check(tformer_serving_new(model.get(), detail::options(options).get(), &serving));
    serving_.reset(serving);
  }

  /// Let a line join before the next step with room for it. `options`: its own decoding options, over those of all.
  void admit(const std::string& line, std::uint64_t number, const Options& options = {},
             const std::string& prefix = "") {
    check(tformer_admit(serving_.get(), detail::text(line), detail::text(prefix), detail::options(options).get(),
                        number));
  }

  /// Run one step for all running lines. Returns how many are running or wait to join.
  std::size_t step() {
    std::size_t lines = 0;
    check(tformer_step(serving_.get(), &lines));
    return lines;
  }

  /// Lines that have ended since the last call. If memory is full, no line is lost: the others come with the next call,
  /// and one whose outputs cannot be copied has the status TFORMER_NO_MEMORY.
  std::vector<Served> take() {
    std::vector<Served> all;
    for (;;) {
      try {
        all.emplace_back();  // before the library hands a line over
      } catch (const std::bad_alloc&) {
        if (all.empty()) throw;
        return all;
      }
      Served& line = all.back();
      tformer_results* results = nullptr;
      line.status = tformer_take(serving_.get(), &line.number, &results);
      const detail::Owned<tformer_results> freed(results);
      if (!results) {
        const tformer_status status = line.status;
        all.pop_back();
        if (all.empty()) check(status);  // else the next call says it again
        return all;
      }
      try {
        if (line.status != TFORMER_OK) line.message = tformer_error();
        else line.outputs = std::move(detail::outputs(results)[0]);
      } catch (const std::bad_alloc&) {
        line.status = TFORMER_NO_MEMORY;
        line.message = "no memory left";  // so short that it needs none
      }
    }
  }

  /// Cancel a line.
  void retire(std::uint64_t number) { check(tformer_retire(serving_.get(), number)); }
  tformer_serving* get() const { return serving_.get(); }

 private:
  detail::Owned<tformer_serving> serving_;
};

}  // namespace api
}  // namespace tformer
