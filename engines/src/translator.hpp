// Translates lines of text: tokenize, sort into batches by length, decode, restore the order.
#pragma once

#include <atomic>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "batches.hpp"
#include "decode/decode.hpp"
#include "open_model.hpp"

namespace tformer {

/// One output of a request.
struct Output {
  std::string text;
  Hypothesis found;
};

/// The results of a call.
struct Results {
  std::vector<std::vector<Output>> lines;   ///< outputs of each line before the first bad one, best first
  std::vector<std::vector<double>> scores;  ///< what `score` returns
  std::exception_ptr error;                 ///< the error of the bad line; null: all are good
};

/// For one thread at a time.
class Translator {
 public:
  /// Throws Error.
  Translator(std::shared_ptr<const OpenModel> model, const Settings& settings);

  void allow(const std::vector<std::string_view>& outputs);
  /// Called with each step's candidates, whose `sentence` is the request's number; returning false stops the call.
  std::function<bool(const std::vector<Candidate>&)> on_step;
  /// Stop the call that is running in another thread.
  void cancel() { cancelled_ = true; }

  /// `prefixes`: how each output begins, if given. `first`: number of the first line, from 0; that behind the last must
  /// be a number too. Throws Error for arguments that do not fit each other.
  Results translate(const std::vector<std::string_view>& lines, const std::vector<std::string_view>& prefixes,
                    std::int64_t first);
  /// For sources given as the ids that the encoder sees.
  Results generate(const std::vector<std::vector<std::int32_t>>& sources, std::int64_t first);
  /// Translate one line; `write` gets its text piece by piece; returning false stops the call.
  Results stream(std::string_view line, std::string_view prefix, std::int64_t number,
                 const std::function<bool(std::string_view)>& write);
  /// The log-probability of every token of each target, up to the first bad line, or the first that was not scored
  /// because a batch failed.
  Results score(const std::vector<std::string_view>& sources, const std::vector<std::string_view>& targets,
                std::int64_t first);

  /// Ids of all sources before the first bad one, how each output begins or what it is, and what is wrong with the bad one.
  struct Requests {
    std::vector<std::vector<std::int32_t>> sources, prefixes, targets;
    std::exception_ptr error;
  };

  /// Tokenize lines and prefixes, up to the first bad line.
  Requests requests(const std::vector<std::string_view>& lines, const std::vector<std::string_view>& prefixes,
                    std::int64_t first, const DecodeOptions& options) const;
  Output output(Hypothesis hypothesis) const;
  const DecodeOptions& options() const { return options_; }
  /// The first worker's engine, for calls that run one batch.
  Engine& engine() const { return *engines_[0]; }

 private:
  std::shared_ptr<const OpenModel> model_;
  DecodeOptions options_;
  std::size_t batch_tokens_, workers_, max_line_bytes_;
  std::unique_ptr<const Trie> allowed_;
  std::vector<std::unique_ptr<Engine>> engines_;  // one for each worker
  std::atomic<bool> cancelled_{false};
  std::mutex callback_lock_;

  const Model& sizes() const { return model_->backend().model(); }
  const Limits& limits() const { return model_->backend().limits(); }
  void check_line(std::string_view text, const std::string& where) const;
  std::vector<std::int32_t> source(std::string_view text, std::int64_t number) const;
  std::vector<std::int32_t> target(std::string_view text, std::int64_t number) const;
  std::vector<std::int32_t> wanted(std::string_view text, const std::string& where) const;
  std::vector<std::int32_t> prefix_ids(std::string_view text, const std::string& where,
                                       const DecodeOptions& options) const;
  void check_source(const std::vector<std::int32_t>& ids, std::int64_t number) const;
  Requests pairs(const std::vector<std::string_view>& sources, const std::vector<std::string_view>& targets,
                 std::int64_t first) const;
  std::size_t share(std::size_t count) const;
  Results run(const Requests& asked, std::int64_t first);
  void decode_batch(const Requests& asked, std::vector<std::size_t> indices, std::int64_t first, std::size_t worker,
                    std::vector<std::vector<Output>>& found, std::vector<std::exception_ptr>& failed);
};

}  // namespace tformer
