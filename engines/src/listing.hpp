// What a bundle says of itself, for who chooses a variant or options before opening a model.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "bundle/bundle.hpp"
#include "decode/options.hpp"

namespace tformer {

/// A set of graphs, or a program; its name as options have it.
struct VariantInfo {
  std::string name, backend, precision;
  Limits limits;
  bool is_default = false, attention = false, shortlist = false;
};

/// The standard graphs first, then by name.
std::vector<VariantInfo> variants_about(const Bundle& bundle);

/// All decoding options with the bundle's own defaults. Throws Error.
std::vector<OptionInfo> options_about(const Bundle& bundle);

/// The bundle's own decoding options. Throws Error.
Json decoding_of(const Bundle& bundle);

}  // namespace tformer
