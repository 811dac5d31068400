// Continuous batching: lines join the running batch before any step, and leave it when they have ended.
#pragma once

#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <set>
#include <string_view>
#include <vector>

#include "decode/running.hpp"
#include "translator.hpp"

namespace tformer {

/// The result of a line: its outputs, or the error.
struct Served {
  std::int64_t number;
  Results results;
};

/// Any thread may admit, retire and take lines while another steps; steps are taken one at a time.
class Serving {
 public:
  /// Throws Error, also where the variant does not allow sentences to join a running batch.
  Serving(std::shared_ptr<const OpenModel> model, const Settings& settings);

  /// Let a line join before the next step with room for it. `asked`: its own decoding options, over those of all. Its
  /// number seeds its samples, stands in messages, and names the line until it is taken. Throws Error for a line
  /// that cannot be translated.
  void admit(std::string_view line, std::string_view prefix, const Settings* asked, std::int64_t number);
  /// Run one step for all running lines. Returns how many lines are running or wait to join.
  std::size_t step();
  /// Pass the line that ended first to `use`; false: there is none. If `use` throws, the line
  /// stays.
  bool take(const std::function<void(Served&)>& use);
  /// Cancel a line; it gets no result.
  void retire(std::int64_t number);

 private:
  struct Line {
    std::int64_t number = 0;
    DecodeOptions options;
    Batch batch;
    Hooks hooks;
    std::unique_ptr<Search> search;  // null: the line is empty
    std::exception_ptr error;
  };
  using Lines = std::list<std::unique_ptr<Line>>;

  std::shared_ptr<const OpenModel> model_;
  Json decoding_;
  Translator translator_;
  std::mutex step_lock_;  // protects what follows
  Lines on_their_way_;
  ContinuousBatch running_;
  std::mutex lock_;  // protects what follows; never held while the engine runs
  Lines waiting_;
  std::set<std::int64_t> known_;    // numbers of lines that have not been taken
  std::set<std::int64_t> retired_;  // numbers of running lines that are cancelled
  std::list<Served> ended_;

  static std::exception_ptr error_of(const Line& line);
  void leave_out();
  bool is_retired(const Line& line);
  bool has_room(const Line& line, std::size_t sentences) const;
  void let_join();
  bool joins(const std::vector<Search*>& searches, bool alone);
  std::size_t hand_over();
  Served served(Line& line) const;
};

}  // namespace tformer
