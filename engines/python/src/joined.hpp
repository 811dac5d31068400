// Continuous batching for Python: searches that share an engine's steps, and join and leave between them.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <memory>
#include <utility>
#include <vector>

#include "decode/running.hpp"
#include "engines.hpp"
#include "errors.hpp"

namespace tformer::python {

namespace nb = nanobind;

/// Of each source its outputs: ids, end token or None, score, value, alignment.
inline nb::list listed(const std::vector<std::vector<Hypothesis>>& found) {
  nb::list lines;
  for (const auto& each : found) {
    nb::list outputs;
    for (const Hypothesis& it : each) {
      nb::object end = nb::none();
      if (it.finished) end = nb::cast(it.end_id);
      outputs.append(nb::make_tuple(it.ids, end, it.score, it.value, it.alignment));
    }
    lines.append(std::move(outputs));
  }
  return lines;
}

/// A search on its way, and all that it reads.
class Joined {
 public:
  /// `on_token` gets each token of the first source that a search of one row chooses. Throws Error.
  Joined(std::shared_ptr<Engine> engine, Batch batch, DecodeOptions options, const Trie* allowed, nb::object on_token)
      : engine_(std::move(engine)), batch_(std::move(batch)), options_(std::move(options)), on_token_(std::move(on_token)) {
    hooks_.allowed = allowed;
    if (!on_token_.is_none()) {
      hooks_.on_step = [this](const std::vector<Candidate>& chosen) {
        if (chosen.empty() || chosen[0].token < 0) return;
        const nb::gil_scoped_acquire held;
        try {
          on_token_(chosen[0].token);
        } catch (const nb::python_error& error) {
          thrown_ = nb::borrow(error.value());
          throw Error(Status::cancelled, "on_token failed");
        }
      };
    }
    search_ = make_search(*engine_, batch_, options_, hooks_);
  }
  Joined(const Joined&) = delete;
  Joined& operator=(const Joined&) = delete;

  Search* search() const { return search_.get(); }
  bool running() const { return search_ != nullptr; }
  const std::shared_ptr<Engine>& engine() const { return engine_; }
  /// End the search: with its outputs, or with the exception being handled.
  void finish() noexcept {
    try {
      if (!error_) found_ = search_->results();
    } catch (...) {
      error_ = std::current_exception();
    }
    search_ = nullptr;
    engine_ = nullptr;
    if (on_token_.is_none()) return;
    const nb::gil_scoped_acquire held;
    on_token_ = nb::none();  // whose owner may own this search
  }
  /// Note the exception being handled.
  void fail() { error_ = std::current_exception(); }
  /// End it without outputs.
  void stop() {
    error_ = std::make_exception_ptr(Error(Status::cancelled, "the search was removed from its batch"));
    search_->stop();
  }
  /// Throws the error that ended it.
  nb::list outputs() const {
    if (running()) throw Error(Status::usage, "the search is on its way: step until it has ended");
    if (thrown_.is_valid()) {
      PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(thrown_.ptr())), thrown_.ptr());
      throw nb::python_error();
    }
    if (error_) std::rethrow_exception(error_);
    return listed(found_);
  }

  /// For Python's collector: what this owns may own it.
  static int traverse(PyObject* self, visitproc visit, void* arg) {
    Py_VISIT(Py_TYPE(self));
    if (!nb::inst_ready(self)) return 0;
    const Joined* const own = nb::inst_ptr<Joined>(self);
    Py_VISIT(own->on_token_.ptr());
    Py_VISIT(own->thrown_.ptr());
    return 0;
  }
  static int clear(PyObject* self) {
    Joined* const own = nb::inst_ptr<Joined>(self);
    own->on_token_ = nb::none();
    own->thrown_ = nb::object();
    return 0;
  }

 private:
  std::shared_ptr<Engine> engine_;
  Batch batch_;
  DecodeOptions options_;
  nb::object on_token_, thrown_;  ///< thrown_: by on_token_
  Hooks hooks_;
  std::unique_ptr<Search> search_;  // null: it has ended
  std::exception_ptr error_;
  std::vector<std::vector<Hypothesis>> found_;
};

/// Searches that run on an engine. One call at a time; other threads of Python run meanwhile.
class Running {
 public:
  explicit Running(std::shared_ptr<Engine> engine) : engine_(std::move(engine)), batch_(*engine_) {
    if (engine_->admits()) engine_->prepare_to_admit();
    batch_.failed = [this](const Search* search) {
      for (const auto& each : joined_) {
        if (each->search() == search) each->fail();
      }
    };
  }
  Running(const Running&) = delete;
  Running& operator=(const Running&) = delete;

  const std::shared_ptr<Engine>& engine() const { return engine_; }
  /// Let searches begin with the next step. Throws Error; those that run go on, unless the state is lost.
  void add(const std::vector<std::shared_ptr<Joined>>& searches) {
    call([&] {
      std::vector<Search*> joining;
      for (const auto& each : searches) {
        const bool new_here = each->running() && std::find(joined_.begin(), joined_.end(), each) == joined_.end();
        if (!new_here || each->engine() != engine_) {
          throw Error(Status::usage, "a search joins once, and the batch that it was made for");
        }
        joining.push_back(each->search());
      }
      joined_.reserve(joined_.size() + searches.size());  // so that nothing fails once the batch has them
      batch_.join(joining);
      joined_.insert(joined_.end(), searches.begin(), searches.end());
    });
  }
  /// Run one step. Throws Error, after which none runs.
  void step() {
    call([&] {
      if (!joined_.empty()) batch_.step();
    });
  }
  /// Stop a search, if it runs. Throws Error, after which none runs.
  void remove(const std::shared_ptr<Joined>& search) {
    call([&] {
      if (std::find(joined_.begin(), joined_.end(), search) == joined_.end()) return;
      batch_.remove(search->search());
      search->stop();
    });
  }

 private:
  std::shared_ptr<Engine> engine_;
  ContinuousBatch batch_;
  std::vector<std::shared_ptr<Joined>> joined_;
  std::atomic<bool> busy_{false};

  /// Do what changes the batch, then let go of the searches that have ended.
  template <typename Work>
  void call(const Work& work) {
    if (busy_.exchange(true)) throw Error(Status::usage, "the batch is in a call: wait until it has ended");
    const nb::gil_scoped_release others;
    try {
      work();
    } catch (...) {
      tidy();
      throw;
    }
    tidy();
  }
  void tidy() noexcept {
    const auto ended = [](const std::shared_ptr<Joined>& each) {
      if (!each->search()->done()) return false;
      each->finish();
      return true;
    };
    joined_.erase(std::remove_if(joined_.begin(), joined_.end(), ended), joined_.end());
    busy_ = false;
  }
};

}  // namespace tformer::python
