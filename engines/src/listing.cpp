#include "listing.hpp"

#include "errors.hpp"

namespace tformer {

std::vector<VariantInfo> variants_about(const Bundle& bundle) {
  std::vector<VariantInfo> all;
  for (const std::string& name : bundle.variants()) {
    const Recipe& recipe = bundle.recipe(name);
    VariantInfo made;
    made.name = name.empty() ? "fp32" : name;
    const bool native = recipe.target == "native";
    made.backend = native || recipe.target == "trt" ? recipe.target : "ort";
    made.precision = recipe.precision;
    made.limits = recipe.limits;
    made.is_default = name == bundle.chosen("");
    made.attention = native || recipe.attention;
    made.shortlist = bundle.manifest().contains("shortlist") &&
                     (native || (bundle.lists("short_rows", name) && bundle.lists("short_step", name)));
    all.push_back(std::move(made));
  }
  return all;
}

Json decoding_of(const Bundle& bundle) {
  Json decoding = bundle.manifest().value("decoding", Json::object());
  try {
    options_of(decoding);
  } catch (const Error& error) {
    throw Error(Status::bundle, bundle.directory().string() + "/manifest.json is damaged: " + error.what());
  }
  return decoding;
}

std::vector<OptionInfo> options_about(const Bundle& bundle) { return options_about(options_of(decoding_of(bundle))); }

}  // namespace tformer
