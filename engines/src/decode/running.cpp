#include "decode/running.hpp"

#include <algorithm>

namespace tformer {
namespace {

/// Append rows (B, K), their last column repeated up to `width`.
template <typename Value>
void add_widened(std::vector<std::int32_t>& all, std::size_t sentences, std::size_t rows, std::size_t width,
                 const Value& value) {
  for (std::size_t b = 0; b < sentences; ++b) {
    for (std::size_t k = 0; k < width; ++k) all.push_back(value(b * rows + std::min(k, rows - 1)));
  }
}

/// What is announced of one more search; its `required` are left to the caller.
void add_outlook(const Outlook& asked, Outlook& all) {
  all.beams = std::max(all.beams, asked.beams);
  all.tokens = std::max(all.tokens, asked.tokens);
  if (asked.end_id != all.end_id) all.end_id = -1;
  all.drawn |= asked.drawn;
}

/// Sentences of a batch, `count` * `size` values each, from one array to another with as many rows of a sentence or fewer.
template <typename Value>
void copy_rows(const std::vector<Value>& from, std::size_t first, std::size_t sentences, std::size_t width,
               std::size_t rows, std::size_t size, std::vector<Value>& to) {
  to.resize(sentences * rows * size);
  for (std::size_t b = 0; b < sentences; ++b) {
    std::copy_n(from.begin() + static_cast<std::ptrdiff_t>((first + b) * width * size), rows * size,
                to.begin() + static_cast<std::ptrdiff_t>(b * rows * size));
  }
}

}  // namespace

std::size_t ContinuousBatch::sentences() const {
  std::size_t count = 0;
  for (const Search* search : searches_) count += search->count();
  return count;
}

void ContinuousBatch::join(const std::vector<Search*>& searches) {
  if (searches.empty()) return;
  std::size_t widest = 0;
  for (const Search* search : searches) widest = std::max(widest, search->batch().width());
  std::vector<std::int32_t> ids, lengths;
  Outlook outlook = searches[0]->outlook();
  for (const Search* search : searches) {
    const Batch& batch = search->batch();
    const std::size_t width = batch.width();
    for (std::size_t b = 0; b < batch.src_lengths.size(); ++b) {
      const auto own = batch.src_ids.begin() + static_cast<std::ptrdiff_t>(b * width);
      ids.insert(ids.end(), own, own + static_cast<std::ptrdiff_t>(width));
      ids.insert(ids.end(), widest - width, engine_.model().pad_id);
    }
    lengths.insert(lengths.end(), batch.src_lengths.begin(), batch.src_lengths.end());
    if (search == searches[0]) continue;
    const Outlook asked = search->outlook();
    add_outlook(asked, outlook);
    outlook.required.insert(outlook.required.end(), asked.required.begin(), asked.required.end());
  }
  for (const Search* search : searches_) add_outlook(search->outlook(), outlook);
  searches_.reserve(searches_.size() + searches.size());  // so that nothing fails once the engine has them
  if (searches_.empty()) {
    state_ = engine_.encode(ids, lengths, outlook);
    width_ = 1;
  } else {
    try {
      engine_.admit(*state_, ids, lengths, outlook);
    } catch (...) {
      if (state_->lost()) fail();
      throw;
    }
  }
  searches_.insert(searches_.end(), searches.begin(), searches.end());
}

/// End all searches with the exception being handled.
void ContinuousBatch::fail() {
  for (Search* const search : searches_) {
    if (failed && !search->done()) failed(search);
    search->stop();
  }
  clear();
}

/// Change the state; an exception ends all searches.
template <typename Work>
void ContinuousBatch::run(const Work& work) {
  try {
    work();
  } catch (...) {
    fail();
    throw;
  }
  if (searches_.empty()) state_ = nullptr;
}

void ContinuousBatch::step() {
  run([this] {
    if (searches_.size() == 1 && searches_[0]->width() == width_) step_alone(*searches_[0]);
    else step_together();
  });
}

void ContinuousBatch::take(Search& search, const Scores& scores, bool full) {
  try {
    search.take(scores, full);
  } catch (const std::exception&) {
    if (!failed) throw;
    failed(&search);
    search.stop();
  }
}

void ContinuousBatch::step_alone(Search& search) {
  const bool full = search.needs_all(*state_);
  engine_.step(search.tokens(), *state_, full, search.attention(), scores_);
  take(search, scores_, full);
  width_ = search.width();
  if (search.done()) searches_.clear();
  else if (search.rows_moved()) engine_.reorder(*state_, search.parents(), search.kept());
}

void ContinuousBatch::step_together() {
  struct Part {
    std::size_t first, sentences, rows;  // of the current step
    bool full;
  };
  std::vector<Part> parts;
  std::size_t first = 0;
  bool full = false, attention = false;
  tokens_.clear();
  for (const Search* search : searches_) {
    const Part part{first, search->count(), search->width(), search->needs_all(*state_)};
    const auto token = [search](std::size_t row) { return search->tokens()[row]; };
    add_widened(tokens_, part.sentences, part.rows, width_, token);
    full |= part.full;
    attention |= search->attention();
    first += part.sentences;
    parts.push_back(part);
  }
  engine_.step(tokens_, *state_, full, attention, scores_);
  const std::size_t before = width_, best = static_cast<std::size_t>(scores_.best);
  const auto vocab = static_cast<std::size_t>(engine_.model().tgt_vocab);
  own_.best = scores_.best;
  width_ = 1;
  bool moved = false;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const Part& part = parts[i];
    const auto copy = [&](const auto& from, std::size_t size, auto& to) {
      copy_rows(from, part.first, part.sentences, before, part.rows, size, to);
    };
    copy(scores_.ids, best, own_.ids);
    copy(scores_.scores, best, own_.scores);
    if (part.full) copy(scores_.log_probs, vocab, own_.log_probs);
    if (attention) copy(scores_.attention, scores_.attention.size() / (first * before), own_.attention);
    take(*searches_[i], own_, part.full);
    width_ = std::max(width_, searches_[i]->width());
    moved |= searches_[i]->rows_moved();
  }
  parents_.clear();
  kept_.clear();
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const Part& part = parts[i];
    const Search& search = *searches_[i];
    const auto parent = [&](std::size_t row) {
      const auto own = static_cast<std::size_t>(search.parents()[row]);
      return static_cast<std::int32_t>((part.first + own / part.rows) * before + own % part.rows);
    };
    add_widened(parents_, search.count(), search.width(), width_, parent);
    for (const std::int32_t b : search.kept()) kept_.push_back(static_cast<std::int32_t>(part.first) + b);
  }
  searches_.erase(std::remove_if(searches_.begin(), searches_.end(), [](const Search* it) { return it->done(); }),
                  searches_.end());
  if (!searches_.empty() && (moved || width_ != before)) engine_.reorder(*state_, parents_, kept_);
}

void ContinuousBatch::remove(const Search* search) {
  const auto found = std::find(searches_.begin(), searches_.end(), search);
  if (found == searches_.end()) return;
  run([&] { take_out(found); });
}

void ContinuousBatch::take_out(std::vector<Search*>::const_iterator leaving) {
  parents_.clear();
  kept_.clear();
  std::int32_t b = 0;
  for (const Search* each : searches_) {
    for (std::size_t i = 0; i < each->count(); ++i, ++b) {
      if (each != *leaving) kept_.push_back(b);
    }
  }
  searches_.erase(leaving);
  const auto before = static_cast<std::int32_t>(width_);
  width_ = 1;  // else who joins before the next step would have rows that nobody needs
  for (const Search* each : searches_) width_ = std::max(width_, each->width());
  for (const std::int32_t sentence : kept_) {
    for (std::int32_t k = 0; k < static_cast<std::int32_t>(width_); ++k) parents_.push_back(sentence * before + k);
  }
  if (!searches_.empty()) engine_.reorder(*state_, parents_, kept_);
}

void ContinuousBatch::clear() {
  searches_.clear();
  state_ = nullptr;
}

}  // namespace tformer
