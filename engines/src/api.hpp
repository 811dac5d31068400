// What the files of the C API share.
#pragma once

#include <memory>
#include <string>

#include "errors.hpp"
#include "open_model.hpp"
#include "settings.hpp"
#include "tformer/tformer.h"

struct tformer_options {
  tformer::Settings settings;
};

struct tformer_model {
  std::shared_ptr<const tformer::OpenModel> open;
};

namespace tformer {

/// The status of the exception being handled, whose message is stored for tformer_error.
tformer_status status_of_exception() noexcept;

template <typename Work>
tformer_status guarded(const Work& work) noexcept {
  try {
    work();
    return TFORMER_OK;
  } catch (...) {
    return status_of_exception();
  }
}

template <typename Pointer>
void require(Pointer pointer, const char* name) {
  if (!pointer) throw Error(Status::usage, std::string(name) + " is null: give one");
}

}  // namespace tformer
