#include "serving.hpp"

#include <algorithm>

#include "errors.hpp"

namespace tformer {
namespace {

/// All lines share the steps of one engine, so that others would lie idle.
Settings with_one_worker(Settings settings) {
  settings.workers = 1;
  return settings;
}

}  // namespace

Serving::Serving(std::shared_ptr<const OpenModel> model, const Settings& settings)
    : model_(std::move(model)), decoding_(settings.decoding), translator_(model_, with_one_worker(settings)),
      running_(translator_.engine()) {
  if (!translator_.engine().admits()) throw cannot_join();
  translator_.engine().prepare_to_admit();
  running_.failed = [this](const Search* search) {
    const auto line = std::find_if(on_their_way_.begin(), on_their_way_.end(),
                                   [search](const auto& each) { return each->search.get() == search; });
    if (line != on_their_way_.end()) (*line)->error = error_of(**line);
  };
}

void Serving::admit(std::string_view text, std::string_view prefix, const Settings* asked, std::int64_t number) {
  Lines made;
  made.push_back(std::make_unique<Line>());
  Line* const line = made.back().get();
  line->number = number;
  line->options = translator_.options();
  if (asked) {
    if (!asked->last_model_option.empty()) {
      throw Error(Status::usage, asked->last_model_option +
                                     " is not an option of one line: set it for the model or for all lines");
    }
    Json decoding = decoding_;
    decoding.update(asked->decoding);
    line->options = over_defaults(model_->decoding(), decoding);
  }
  std::vector<std::string_view> prefixes;
  if (!prefix.empty()) prefixes.push_back(prefix);
  const Translator::Requests found = translator_.requests({text}, prefixes, number - 1, line->options);
  if (found.error) std::rethrow_exception(found.error);
  if (!found.sources[0].empty()) {  // no model sees an empty line
    line->batch = make_batch(found.sources, {0}, model_->backend().model().pad_id, number);
    line->batch.prefixes = found.prefixes;
    line->search = make_search(translator_.engine(), line->batch, line->options, line->hooks);
  }
  std::list<Served> ended;
  if (!line->search) ended.push_back(served(*line));
  const std::lock_guard<std::mutex> held(lock_);
  if (!known_.insert(number).second) {
    throw Error(Status::usage, "line " + std::to_string(number) + " is known already: give each a number of its own");
  }
  if (ended.empty()) waiting_.splice(waiting_.end(), made);
  else ended_.splice(ended_.end(), ended);
}

void Serving::retire(std::int64_t number) {
  const std::lock_guard<std::mutex> held(lock_);
  if (known_.count(number) == 0) return;
  const auto waits = [number](const auto& line) { return line->number == number; };
  const auto ended = [number](const Served& line) { return line.number == number; };
  if (const auto it = std::find_if(waiting_.begin(), waiting_.end(), waits); it != waiting_.end()) {
    waiting_.erase(it);
  } else if (const auto it2 = std::find_if(ended_.begin(), ended_.end(), ended); it2 != ended_.end()) {
    ended_.erase(it2);
  } else {
    retired_.insert(number);
  }
  known_.erase(number);
}

bool Serving::take(const std::function<void(Served&)>& use) {
  const std::lock_guard<std::mutex> held(lock_);
  if (ended_.empty()) return false;
  use(ended_.front());
  known_.erase(ended_.front().number);
  ended_.pop_front();
  return true;
}

std::size_t Serving::step() {
  const std::lock_guard<std::mutex> alone(step_lock_);
  try {
    leave_out();
    let_join();
    if (!running_.searches().empty()) running_.step();
  } catch (...) {  // the engine failed, or memory is full: no line can continue
    running_.clear();
    for (const auto& line : on_their_way_) {
      if (!line->search->done()) line->error = std::current_exception();
      line->search->stop();
    }
  }
  return hand_over();
}

/// The exception being handled, with the number that the line was admitted with.
std::exception_ptr Serving::error_of(const Line& line) {
  try {
    throw;
  } catch (const NotNumbers& error) {
    return std::make_exception_ptr(
        Error(Status::not_numbers, "line " + std::to_string(line.number) + ": " + error.reason));
  } catch (...) {
    return std::current_exception();
  }
}

/// Remove cancelled lines.
void Serving::leave_out() {
  for (auto line = on_their_way_.begin(); line != on_their_way_.end();) {
    if (!is_retired(**line)) {
      ++line;
      continue;
    }
    running_.remove((*line)->search.get());
    const std::lock_guard<std::mutex> held(lock_);
    retired_.erase((*line)->number);
    line = on_their_way_.erase(line);
  }
}

bool Serving::is_retired(const Line& line) {
  const std::lock_guard<std::mutex> held(lock_);
  return retired_.count(line.number) > 0;
}

/// Whether a batch of so many sentences, or plans for it, can have a line beside those on their way.
bool Serving::has_room(const Line& line, std::size_t sentences) const {
  const Limits& limits = translator_.engine().limits();
  std::int64_t rows = line.options.rows(), tokens = line.options.max_tokens;
  std::size_t longest = line.batch.width();
  for (const auto& each : on_their_way_) {
    if (each->search->done()) continue;
    rows = std::max(rows, each->options.rows());
    tokens = std::max(tokens, each->options.max_tokens);
    longest = std::max(longest, each->batch.width());
  }
  return sentences < limits.sentences(rows, longest, std::min(tokens, limits.tgt_tokens));
}

/// Let waiting lines join, as many as there is room for.
void Serving::let_join() {
  std::vector<Search*> joining;
  {
    const std::lock_guard<std::mutex> held(lock_);
    // A number that was cancelled and is used again waits until the line that had it is gone.
    while (!waiting_.empty() && retired_.count(waiting_.front()->number) == 0 &&
           has_room(*waiting_.front(), running_.sentences() + joining.size())) {
      joining.push_back(waiting_.front()->search.get());
      on_their_way_.splice(on_their_way_.end(), waiting_, waiting_.begin());
    }
  }
  if (joins(joining, joining.size() == 1)) return;
  for (Search* const search : joining) joins({search}, true);  // perhaps only some of them fail
}

/// Whether lines have joined. If not, the running ones continue, or have failed; `alone`: so has the one that joins.
bool Serving::joins(const std::vector<Search*>& searches, bool alone) {
  try {
    running_.join(searches);
  } catch (...) {
    if (!alone) return false;
    for (const auto& line : on_their_way_) {
      if (line->search.get() != searches[0]) continue;
      line->error = std::current_exception();
      line->search->stop();
    }
  }
  return true;
}

/// Make ended lines available to `take`; returns how many are left.
std::size_t Serving::hand_over() {
  const std::lock_guard<std::mutex> held(lock_);
  for (auto line = on_their_way_.begin(); line != on_their_way_.end();) {
    const bool over = (*line)->search->done();
    if (over && retired_.erase((*line)->number) == 0) {
      ended_.emplace_back();  // before the results are moved, as this may throw
      ended_.back() = served(**line);
    }
    line = over ? on_their_way_.erase(line) : std::next(line);
  }
  return on_their_way_.size() + waiting_.size();
}

Served Serving::served(Line& line) const {
  Served found{line.number, {}};
  found.results.error = line.error;
  if (line.error) return found;
  try {
    std::vector<Output>& outputs = found.results.lines.emplace_back();
    if (line.search) {
      std::vector<std::vector<Hypothesis>> all = line.search->results();
      for (Hypothesis& each : all[0]) outputs.push_back(translator_.output(std::move(each)));
    } else {
      outputs.resize(1);
      outputs[0].found.finished = true;
    }
  } catch (...) {
    found.results.lines.clear();
    found.results.error = std::current_exception();
  }
  return found;
}

}  // namespace tformer
