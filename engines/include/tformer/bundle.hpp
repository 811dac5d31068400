// What tformer.hpp has beside models: errors, the files of bundles, what they list, the log. Include tformer.hpp instead.
#pragma once

#include <cstddef>
#include <exception>
#include <functional>
#include <memory>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "tformer.h"

namespace tformer {
inline namespace api {  // so that these names are not those of the library's own classes, which a static build links

/// A call failed: what is wrong, where, and how to fix it.
class Failure : public std::runtime_error {
 public:
  explicit Failure(tformer_status status) : std::runtime_error(tformer_error()), status_(status) {}
  tformer_status status() const { return status_; }

 private:
  tformer_status status_;
};

inline void check(tformer_status status) {
  if (status != TFORMER_OK) throw Failure(status);
}

namespace detail {

struct Free {
  void operator()(tformer_options* it) const { tformer_options_free(it); }
  void operator()(tformer_bundle* it) const { tformer_bundle_close(it); }
  void operator()(tformer_model* it) const { tformer_model_close(it); }
  void operator()(tformer_translator* it) const { tformer_translator_free(it); }
  void operator()(tformer_serving* it) const { tformer_serving_free(it); }
  void operator()(tformer_results* it) const { tformer_results_free(it); }
};

template <typename Handle>
using Owned = std::unique_ptr<Handle, Free>;

/// A text for C, which a zero byte would cut short.
inline const char* whole(const std::string& text) {
  if (text.find('\0') == std::string::npos) return text.c_str();
  throw std::invalid_argument("a folder, or an option's name or value, has a zero byte: leave it out");
}

}  // namespace detail

/// The bytes of a file.
struct File {
  File(std::string bytes) : File(std::make_shared<const std::string>(std::move(bytes))) {}  // so that texts are files
  /// Bytes that stay as they are while `owner` lives; without one, as long as what was opened.
  File(const void* bytes, std::size_t count, std::shared_ptr<const void> keeper = nullptr)
      : data(bytes), size(count), owner(std::move(keeper)) {}

  const void* data;
  std::size_t size;
  std::shared_ptr<const void> owner;

 private:
  explicit File(const std::shared_ptr<const std::string>& text) : File(text->data(), text->size(), text) {}
};

/// Gives the bytes of a bundle's file, such as manifest.json or native-int8/weights.data; none: there is no such file. It
/// is called, one call at a time, and kept as long as tformer_files in tformer.h says.
using Files = std::function<std::optional<File>(const std::string& name)>;

namespace detail {

/// Files as C has them, and what one of its calls has thrown.
class Reading {
 public:
  explicit Reading(Files files) : own_(std::make_shared<Own>()) {
    if (!files) throw std::invalid_argument("files is empty: give a function");
    own_->files = std::move(files);
  }

  /// Calls `open` with the files, and throws what went wrong.
  template <typename Open>
  void check(const std::string& name, const Open& open) const {
    const char* const shown = whole(name);
    const tformer_files files{shown, read, release, close, new std::shared_ptr<Own>(own_)};
    const tformer_status status = open(&files);
    const std::exception_ptr thrown = std::exchange(own_->thrown, nullptr);
    if (status != TFORMER_OK && thrown) std::rethrow_exception(thrown);
    api::check(status);
  }

 private:
  using Owner = std::shared_ptr<const void>;
  struct Own {
    Files files;
    std::exception_ptr thrown;
  };
  std::shared_ptr<Own> own_;

  static tformer_status read(void* user, const char* name, tformer_content* content) {
    Own& own = **static_cast<std::shared_ptr<Own>*>(user);
    try {
      const std::optional<File> found = own.files(name);
      if (!found) return TFORMER_MISSING;
      *content = {found->data, found->size, found->owner ? new Owner(found->owner) : nullptr};
      return TFORMER_OK;
    } catch (const std::bad_alloc&) {
      return TFORMER_NO_MEMORY;
    } catch (...) {
      own.thrown = std::current_exception();
      return TFORMER_INTERNAL;
    }
  }
  static void release(void*, const tformer_content* content) { delete static_cast<Owner*>(content->handle); }
  static void close(void* user) { delete static_cast<std::shared_ptr<Own>*>(user); }
};

}  // namespace detail

/// A set of graphs, or a program, in a bundle. Fields as in tformer_variant.
struct Variant {
  std::string name, backend, precision;
  std::size_t source_tokens = 0, target_tokens = 0, beams = 0;
  bool is_default = false, attention = false, shortlist = false;
};

/// A decoding option. Fields as in tformer_option.
struct OptionInfo {
  std::string name, type, value, values, help;
  double least = 0, most = 0;
};

/// What a bundle says of itself. No model is opened.
class Bundle {
 public:
  explicit Bundle(const std::string& folder) {
    const tformer_files files{detail::whole(folder), nullptr, nullptr, nullptr, nullptr};
    check(open(&files));
  }
  explicit Bundle(Files files, const std::string& name = "memory") {
    detail::Reading(std::move(files)).check(name, [this](const tformer_files* it) { return open(it); });
  }

  std::vector<Variant> variants() const {
    std::vector<Variant> all;
    while (const tformer_variant* it = tformer_bundle_variant(bundle_.get(), all.size())) {
      all.push_back({it->name, it->backend, it->precision, it->source_tokens, it->target_tokens, it->beams,
                     it->is_default != 0, it->attention != 0, it->shortlist != 0});
    }
    return all;
  }
  /// Decoding options with the bundle's defaults.
  std::vector<OptionInfo> options() const { return options(bundle_.get()); }
  /// Those with the library's.
  static std::vector<OptionInfo> all_options() { return options(nullptr); }

 private:
  detail::Owned<tformer_bundle> bundle_;

  tformer_status open(const tformer_files* files) {
    tformer_bundle* bundle = nullptr;
    const tformer_status status = tformer_bundle_open(files, &bundle);
    bundle_.reset(bundle);
    return status;
  }
  static std::vector<OptionInfo> options(const tformer_bundle* bundle) {
    std::vector<OptionInfo> all;
    while (const tformer_option* it = tformer_bundle_option(bundle, all.size())) {
      all.push_back({it->name, it->type, it->value, it->values, it->help, it->least, it->most});
    }
    return all;
  }
};

inline std::string version() { return tformer_version(); }

/// Tell `log` what the library decides by itself, in the whole process; empty: no longer. Threads may call it at the same
/// time; what it throws is dropped. See tformer_on_log.
using Log = std::function<void(tformer_level level, const std::string& message)>;
inline void on_log(Log log) {
  if (!log) return check(tformer_on_log(nullptr, nullptr, nullptr));
  const auto call = [](void* own, tformer_level level, const char* message) {
    try {
      (*static_cast<Log*>(own))(level, message);
    } catch (...) {
    }
  };
  check(tformer_on_log(call, new Log(std::move(log)), [](void* own) { delete static_cast<Log*>(own); }));
}

/// The CPUs that this process may use.
inline std::size_t cores() { return tformer_cores(); }

}  // namespace api
}  // namespace tformer
