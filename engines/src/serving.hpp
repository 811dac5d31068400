// Lines that come one by one and share steps: each joins those on their way, and leaves when it has ended.
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

/// What became of a line: one line of outputs, or what was wrong with it.
struct Served {
  std::int64_t number;
  Results results;
};

/// Any thread may admit, retire and take lines while another steps; steps are taken one at a time.
class Serving {
 public:
  /// Throws Error, also where no sentence can join others.
  Serving(std::shared_ptr<const OpenModel> model, const Settings& settings);

  /// Let a line join before the next step that has room for it; `asked`: its own decoding options, over those of all. Its
  /// number is what draws and messages depend on, and what it is known by until it is taken. Throws Error for a line
  /// that cannot be translated.
  void admit(std::string_view line, std::string_view prefix, const Settings* asked, std::int64_t number);
  /// The next token of every line on its way. How many are on their way or wait to join.
  std::size_t step();
  /// Hand over a line that has ended, in the order in which they ended; false: there is none. One for which `use` throws
  /// stays.
  bool take(const std::function<void(Served&)>& use);
  /// Give up a line; nothing comes of it any more.
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
  std::mutex step_lock_;  // of what follows
  Lines on_their_way_;
  ContinuousBatch running_;
  std::mutex lock_;  // of what follows; never held while the engine runs
  Lines waiting_;
  std::set<std::int64_t> known_;    // numbers of lines that nobody has taken
  std::set<std::int64_t> retired_;  // of those on their way that are given up
  std::list<Served> ended_;

  static std::exception_ptr error_of(const Line& line);
  void leave_out();
  bool is_retired(const Line& line);
  void let_join();
  bool joins(const std::vector<Search*>& searches, bool alone);
  std::size_t hand_over();
  Served served(Line& line) const;
};

}  // namespace tformer
