#include "translator.hpp"

#include <algorithm>

#include "decode/rules.hpp"
#include "decode/search.hpp"
#include "errors.hpp"
#include "log.hpp"
#include "spec.hpp"
#include "text/unicode.hpp"

namespace tformer {
namespace {

std::string line_of(std::int64_t number) { return "line " + std::to_string(number); }

}  // namespace

Translator::Translator(std::shared_ptr<const OpenModel> model, const Settings& settings)
    : model_(std::move(model)), options_(over_defaults(model_->decoding(), settings.decoding)),
      batch_tokens_(static_cast<std::size_t>(settings.batch_tokens ? settings.batch_tokens
                                                                   : model_->backend().batch_tokens())),
      workers_(static_cast<std::size_t>(settings.workers)),
      max_line_bytes_(static_cast<std::size_t>(settings.max_line_bytes)) {
  limits().check_asked(settings.decoding.value("max_tokens", std::int64_t{0}),
                       settings.decoding.value("beams", std::int64_t{0}));
  for (std::size_t i = 0; i < workers_; ++i) engines_.push_back(model_->backend().make_engine());
  if (!settings.decoding.empty()) check_options(engine(), options_);  // a bundle's own: at the first request
}

void Translator::allow(const std::vector<std::string_view>& outputs) {
  std::vector<std::vector<std::int32_t>> found;
  for (const std::string_view text : outputs) {
    found.push_back(wanted(text, "allowed, " + line_of(static_cast<std::int64_t>(found.size()) + 1)));
  }
  allowed_ = found.empty() ? nullptr : std::make_unique<const Trie>(found);
}

void Translator::check_line(std::string_view text, const std::string& where) const {
  if (text.size() > max_line_bytes_) {
    throw Error(Status::text, where + ": longer than " + std::to_string(max_line_bytes_) +
                                  " bytes: split it, or raise max_line_bytes");
  }
  const std::string_view problem = utf8_problem(text);
  if (!problem.empty()) throw Error(Status::text, where + ": not UTF-8 (" + std::string(problem) + "): convert it");
}

std::vector<std::int32_t> Translator::source(std::string_view text, std::int64_t number) const {
  check_line(text, line_of(number));
  const std::string_view inner = stripped(text);
  std::vector<std::int32_t> ids = model_->tokenizers().source_ids(inner);
  check_source(ids, number);
  if (inner.empty()) ids.clear();
  return ids;
}

std::vector<std::int32_t> Translator::target(std::string_view text, std::int64_t number) const {
  check_line(text, line_of(number));
  std::vector<std::int32_t> ids = token_ids(options_.first_ids);
  const std::vector<std::int32_t> own = model_->tokenizers().target_ids(stripped(text));
  ids.insert(ids.end(), own.begin(), own.end());
  if (static_cast<std::int64_t>(ids.size()) > limits().tgt_tokens) {
    throw Error(Status::limit, line_of(number) + ": a target of " + std::to_string(ids.size()) +
                                   " tokens exceeds the limit of " + std::to_string(limits().tgt_tokens) +
                                   ": split the line" + (limits().hint.empty() ? "" : ", or " + limits().hint));
  }
  return ids;
}

/// Token ids of a text that an output must contain. Throws Error for what the vocabulary lacks.
std::vector<std::int32_t> Translator::wanted(std::string_view text, const std::string& where) const {
  check_line(text, where);
  const Tokenizer& tokenizer = *model_->tokenizers().target;
  const std::int32_t unk = tokenizer.specials.unk;
  const auto lacks = [&](std::string_view part) {
    const Ids ids = tokenizer.encode(part);
    return std::find(ids.begin(), ids.end(), unk) != ids.end();
  };
  Ids ids = tokenizer.encode(text);
  if (std::find(ids.begin(), ids.end(), unk) == ids.end()) return ids;
  std::string_view lacking = text;
  for (const std::string_view word : split(text)) {
    if (lacks(word)) {
      lacking = word;
      break;
    }
  }
  const std::string shown = utf8(characters(lacking).substr(0, 40));
  throw Error(Status::text, where + ": '" + shown + "' is not in the vocabulary, so that no output can have it: "
                                                    "write it otherwise");
}

/// Token ids of a prefix. Throws Error.
std::vector<std::int32_t> Translator::prefix_ids(std::string_view text, const std::string& where,
                                                 const DecodeOptions& options) const {
  Ids ids = wanted(text, where);
  const Ids ends = options.ends(sizes().eos_id);
  if (std::find_first_of(ids.begin(), ids.end(), ends.begin(), ends.end()) != ids.end()) {
    throw Error(Status::limit, where + ": " + spec::end_is_forced);
  }
  return ids;
}

void Translator::check_source(const std::vector<std::int32_t>& ids, std::int64_t number) const {
  if (static_cast<std::int64_t>(ids.size()) > limits().src_tokens) {
    throw Error(Status::limit, line_of(number) + ": a source of " + std::to_string(ids.size()) +
                                   " tokens exceeds the limit of " + std::to_string(limits().src_tokens) +
                                   ": split the line, or " +
                                   limits().or_else(spec::longer_sources));
  }
  for (const std::int32_t id : ids) {
    if (id < 0 || id >= sizes().src_vocab) {
      throw Error(Status::limit, "source " + std::to_string(number) + ": token id " + std::to_string(id) +
                                     " is outside the source vocabulary of " + std::to_string(sizes().src_vocab));
    }
  }
}

Translator::Requests Translator::requests(const std::vector<std::string_view>& lines,
                                          const std::vector<std::string_view>& prefixes, std::int64_t first,
                                          const DecodeOptions& options) const {
  if (!prefixes.empty() && prefixes.size() != lines.size()) {
    throw Error(Status::usage, std::to_string(lines.size()) + " sources, " + std::to_string(prefixes.size()) +
                                   " prefixes: give one a line, empty for none");
  }
  Requests asked;
  try {
    for (std::size_t i = 0; i < lines.size(); ++i) {
      stop_if(&cancelled_);
      const std::int64_t number = first + static_cast<std::int64_t>(i) + 1;
      std::vector<std::int32_t> begin;
      if (!prefixes.empty()) begin = prefix_ids(prefixes[i], line_of(number) + ", prefix", options);
      std::vector<std::int32_t> ids = source(lines[i], number);
      if (const std::size_t forced = options.first_ids.size() + begin.size(); forced && !ids.empty()) {
        check_forced(forced, longest_output(options, limits().tgt_tokens, ids.size()), options, line_of(number) + ": ");
      }
      if (!prefixes.empty()) asked.prefixes.push_back(std::move(begin));
      asked.sources.push_back(std::move(ids));
    }
  } catch (const Error&) {
    asked.error = std::current_exception();
  }
  return asked;
}

Results Translator::translate(const std::vector<std::string_view>& lines,
                              const std::vector<std::string_view>& prefixes, std::int64_t first) {
  cancelled_ = false;
  return run(requests(lines, prefixes, first, options_), first);
}

Results Translator::generate(const std::vector<std::vector<std::int32_t>>& sources, std::int64_t first) {
  cancelled_ = false;
  Requests asked;
  try {
    for (const std::vector<std::int32_t>& ids : sources) {
      check_source(ids, first + static_cast<std::int64_t>(asked.sources.size()) + 1);
      asked.sources.push_back(ids);
    }
  } catch (const Error&) {
    asked.error = std::current_exception();
  }
  return run(asked, first);
}

/// The most of so many requests that one batch may have, so that every worker has some.
std::size_t Translator::share(std::size_t count) const {
  return std::max<std::size_t>(1, (count + workers_ - 1) / workers_);
}

/// Results of all requests before the first bad one.
Results Translator::run(const Requests& asked, std::int64_t first) {
  const std::size_t count = asked.sources.size();
  std::vector<std::size_t> lengths;
  for (const std::vector<std::int32_t>& source : asked.sources) lengths.push_back(source.size());
  const auto budget = batch_tokens_ / static_cast<std::size_t>(options_.rows());
  const std::int64_t tokens = std::min(options_.max_tokens, limits().tgt_tokens);
  const auto batches = length_batches(lengths, budget, [&](std::size_t longest_source) {
    return std::min(limits().sentences(options_.rows(), longest_source, tokens), share(count));
  });
  log(Level::debug, [&] {
    return std::to_string(count) + " lines in " + std::to_string(batches.size()) + " batches of at most " +
           std::to_string(budget) + " padded source tokens, " + std::to_string(std::min(workers_, batches.size())) +
           " at a time";
  });
  std::vector<std::vector<Output>> found(count);
  std::vector<std::exception_ptr> failed(count);
  for (std::size_t i = 0; i < count; ++i) {
    if (lengths[i] == 0) {
      found[i].resize(1);
      found[i][0].found.finished = true;
    }
  }
  Results results;
  results.error = asked.error;
  try {
    side_by_side(batches.size(), workers_, [&](std::size_t worker, std::size_t item) {
      decode_batch(asked, batches[item], first, worker, found, failed);
    });
  } catch (...) {
    results.error = std::current_exception();
  }
  for (std::size_t i = 0; i < count; ++i) {
    if (failed[i]) results.error = failed[i];
    if (found[i].empty()) break;
    results.lines.push_back(std::move(found[i]));
  }
  return results;
}

/// Decode a batch. Where a request has NaN or infinite log-probabilities, only the requests before it are decoded.
void Translator::decode_batch(const Requests& asked, std::vector<std::size_t> indices, std::int64_t first,
                              std::size_t worker, std::vector<std::vector<Output>>& found,
                              std::vector<std::exception_ptr>& failed) {
  Hooks hooks;
  hooks.allowed = allowed_.get();
  hooks.cancel = &cancelled_;
  while (!indices.empty()) {
    Batch batch = make_batch(asked.sources, indices, sizes().pad_id, first);
    for (const std::size_t i : indices) {
      if (!asked.prefixes.empty()) batch.prefixes.push_back(asked.prefixes[i]);
    }
    if (on_step) {
      hooks.on_step = [&](const std::vector<Candidate>& candidates) {
        std::vector<Candidate> numbered = candidates;
        for (Candidate& each : numbered) {
          each.sentence = static_cast<std::int32_t>(indices[static_cast<std::size_t>(each.sentence)]);
        }
        const std::lock_guard<std::mutex> held(callback_lock_);
        stop_if(&cancelled_);
        if (!on_step(numbered)) cancelled_ = true;
        stop_if(&cancelled_);
      };
    }
    try {
      std::vector<std::vector<Hypothesis>> hypotheses = decode(*engines_[worker], batch, options_, hooks);
      for (std::size_t row = 0; row < indices.size(); ++row) {
        std::vector<Output> outputs;
        for (Hypothesis& each : hypotheses[row]) outputs.push_back(output(std::move(each)));
        found[indices[row]] = std::move(outputs);
      }
      return;
    } catch (const NotNumbers& error) {
      const auto bad = static_cast<std::size_t>(static_cast<std::int64_t>(error.request) - first);
      if (bad >= failed.size()) throw;
      failed[bad] = std::current_exception();
      indices.erase(std::remove_if(indices.begin(), indices.end(), [bad](std::size_t i) { return i >= bad; }),
                    indices.end());
    }
  }
}

Output Translator::output(Hypothesis hypothesis) const {
  std::string text = model_->tokenizers().target->decode(hypothesis.ids);
  return {std::move(text), std::move(hypothesis)};
}

Results Translator::stream(std::string_view line, std::string_view prefix, std::int64_t number,
                           const std::function<bool(std::string_view)>& write) {
  if (options_.rows() > 1 || !(options_.greedy() || options_.sampling)) {
    throw Error(Status::usage,
                "streaming shows one output as it grows: use beams=1, n_best=1, no stop and no patience");
  }
  const std::vector<std::int32_t> ends = options_.ends(sizes().eos_id);
  std::vector<std::int32_t> ids;
  std::string written;
  const auto show = [&](const std::string& text) {
    if (text.size() <= written.size()) return true;
    const bool goes_on = write(std::string_view(text).substr(written.size()));
    written = text;
    return goes_on;
  };
  const auto others = std::move(on_step);
  on_step = [&](const std::vector<Candidate>& candidates) {
    const std::int32_t token = candidates.empty() ? -1 : candidates[0].token;
    if (token < 0 || std::find(ends.begin(), ends.end(), token) != ends.end()) return !others || others(candidates);
    ids.push_back(token);
    return (!others || others(candidates)) && show(model_->tokenizers().settled_text(ids));
  };
  Results results;
  try {
    std::vector<std::string_view> prefixes;
    if (!prefix.empty()) prefixes.push_back(prefix);
    results = translate({line}, prefixes, number);
  } catch (...) {
    on_step = others;
    throw;
  }
  on_step = others;
  if (!results.lines.empty() && !show(results.lines[0][0].text)) {
    results.error = std::make_exception_ptr(Error(Status::cancelled, "the callback stopped the call"));
  }
  return results;
}

/// Ids of sources and targets, up to the first bad line.
Translator::Requests Translator::pairs(const std::vector<std::string_view>& sources,
                                       const std::vector<std::string_view>& targets, std::int64_t first) const {
  Requests asked;
  try {
    for (std::size_t i = 0; i < sources.size(); ++i) {
      stop_if(&cancelled_);
      const std::int64_t number = first + static_cast<std::int64_t>(i) + 1;
      check_line(sources[i], line_of(number));
      std::vector<std::int32_t> ids = model_->tokenizers().source_ids(stripped(sources[i]));
      check_source(ids, number);
      if (ids.empty()) throw Error(Status::text, line_of(number) + ": " + spec::empty_source);  // sources without ends
      asked.targets.push_back(target(targets[i], number));
      asked.sources.push_back(std::move(ids));
    }
  } catch (const Error&) {
    asked.error = std::current_exception();
  }
  return asked;
}

Results Translator::score(const std::vector<std::string_view>& sources, const std::vector<std::string_view>& targets,
                          std::int64_t first) {
  cancelled_ = false;
  if (sources.size() != targets.size()) {
    throw Error(Status::usage, std::to_string(sources.size()) + " sources, " + std::to_string(targets.size()) +
                                   " targets: give one a line");
  }
  Requests asked = pairs(sources, targets, first);
  const std::size_t count = asked.sources.size();
  std::vector<std::size_t> longest;
  for (std::size_t i = 0; i < count; ++i) longest.push_back(std::max(asked.sources[i].size(), asked.targets[i].size()));
  const auto batches = length_batches(longest, batch_tokens_, [&](std::size_t length) {
    return std::min(limits().sentences(1, length, static_cast<std::int64_t>(length)), share(count));
  });
  std::vector<std::vector<double>> scores(count);
  Results results;
  results.error = asked.error;
  try {
    side_by_side(batches.size(), workers_, [&](std::size_t worker, std::size_t item) {
      const std::vector<std::size_t>& indices = batches[item];
      std::vector<std::vector<std::int32_t>> ids;
      for (const std::size_t i : indices) ids.push_back(asked.targets[i]);
      std::vector<std::vector<double>> found = tformer::score(
          *engines_[worker], make_batch(asked.sources, indices, sizes().pad_id, first), ids, &cancelled_);
      for (std::size_t row = 0; row < indices.size(); ++row) scores[indices[row]] = std::move(found[row]);
    });
  } catch (...) {
    results.error = std::current_exception();
  }
  for (std::size_t i = 0; i < count && !scores[i].empty(); ++i) {
    Output given;
    for (const double each : scores[i]) given.found.score += each;
    given.found.value = given.found.score;
    given.found.ids = std::move(asked.targets[i]);
    given.found.finished = true;
    given.text = std::string(stripped(targets[i]));
    results.lines.emplace_back().push_back(std::move(given));
    results.scores.push_back(std::move(scores[i]));
  }
  return results;
}

}  // namespace tformer
