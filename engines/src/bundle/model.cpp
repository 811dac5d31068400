#include "bundle/model.hpp"

#include <algorithm>
#include <stdexcept>

#include "bundle/schema_text.hpp"

namespace tformer {
namespace {

/// From model.json: keys, defaults of `model` and `recipe` (null: none), choices, largest sizes.
const Json& specification(const char* part) {
  static const Json all = Json::parse(model_text);
  return all[part];
}

std::vector<std::string> keys_of(const Json& table) {
  std::vector<std::string> keys;
  for (const auto& [key, unused] : table.items()) keys.push_back(key);
  return keys;
}

/// Defaults, overwritten by values. Throws std::invalid_argument for an unknown key and for a value of another type.
Json filled(const Json& values, const Json& defaults, const std::string& where) {
  if (!values.is_object()) throw std::invalid_argument("[" + where + "]: must be a table");
  Json all = defaults;
  for (const auto& [key, value] : values.items()) {
    if (!defaults.contains(key)) {
      throw std::invalid_argument(unknown("key of [" + where + "]", key, keys_of(defaults)));
    }
    const Json& usual = defaults[key];
    const bool whole = usual.is_null() || usual.is_number_integer();
    const bool fits = whole ? value.is_number_integer()
                            : usual.is_number() ? value.is_number() : value.type() == usual.type();
    if (!fits) {
      const char* kind = whole ? "int" : usual.is_number() ? "float" : usual.is_boolean() ? "bool" : usual.type_name();
      throw std::invalid_argument(where + "." + key + ": must be of type " + kind);
    }
    all[key] = value;
  }
  const Json choices = specification("choices").value(where, Json::object());
  for (const auto& [key, valid] : choices.items()) {
    const std::vector<std::string> names = valid;
    const std::string name = all[key];
    if (std::find(names.begin(), names.end(), name) == names.end()) throw std::invalid_argument(unknown(key, name, names));
  }
  return all;
}

/// A size of the model. Throws std::invalid_argument.
std::int64_t within(const Json& values, const char* name, std::int64_t least) {
  const Json& value = values[name];
  const Json& sizes = specification("most");
  const std::int64_t most = sizes[sizes.contains(name) ? name : "d_model"];
  const std::string shown = std::string("model.") + name + "=" + value.dump().substr(0, 40);
  if (!value.is_number_integer() || value < least) {
    throw std::invalid_argument(shown + ": must be at least " + std::to_string(least));
  }
  if (value > most) throw std::invalid_argument(shown + ": must be at most " + std::to_string(most));
  return value.get<std::int64_t>();
}

Json filled_model(const Json& values) {
  Json all = filled(values, specification("model"), "model");
  if (all["start_id"] == -1) all["start_id"] = all["bos_id"];
  return all;
}

Json filled_recipe(const Json& values) {
  Json all = filled(values, specification("recipe"), "recipe");
  Json axes = filled(all["axes"], specification("axes"), "axes");
  for (auto& [name, axis] : axes.items()) axis = filled(axis, specification("axes")[name], "axes." + name);
  all["axes"] = axes;
  return all;
}

/// Whether two tables agree on the keys that both have.
bool agree(const Json& one, const Json& other) {
  if (!one.is_object() || !other.is_object()) return one == other;
  for (const auto& [key, value] : one.items()) {
    if (other.contains(key) && !agree(value, other[key])) return false;
  }
  return true;
}

}  // namespace

Model model_of(const Json& values) {
  const Json all = filled_model(values);
  Model model;
  model.src_vocab = static_cast<std::int32_t>(within(all, "src_vocab", 1));
  model.tgt_vocab = static_cast<std::int32_t>(within(all, "tgt_vocab", 1));
  within(all, "max_positions", 1);
  model.d_model = within(all, "d_model", 1);
  model.encoder_d_model = within(all, "encoder_d_model", 0);
  if (!model.encoder_d_model) model.encoder_d_model = model.d_model;
  model.heads = within(all, "heads", 1);
  model.head_dim = within(all, "head_dim", 0);
  model.decoder_layers = within(all, "decoder_layers", 1);
  model.output_bias = all["output_bias"];
  model.recurrent = all["decoder_cell"] == "ssru";
  if (!model.head_dim && model.d_model % model.heads == 0) model.head_dim = model.d_model / model.heads;
  if (!model.head_dim) {
    throw std::invalid_argument("model.heads=" + std::to_string(model.heads) + " does not divide model.d_model=" +
                                std::to_string(model.d_model) + ": or set head_dim");
  }
  const std::int32_t smallest = std::min(model.src_vocab, model.tgt_vocab);
  for (const char* name : {"pad_id", "bos_id", "eos_id", "start_id"}) {
    if (!all[name].is_number_integer() || all[name] < 0 || all[name] >= smallest) {
      throw std::invalid_argument(std::string("model.") + name + "=" + all[name].dump().substr(0, 40) +
                                  " is outside the vocabulary of " + std::to_string(smallest));
    }
  }
  model.pad_id = all["pad_id"];
  model.bos_id = all["bos_id"];
  model.eos_id = all["eos_id"];
  model.start_id = all["start_id"];
  return model;
}

Recipe recipe_of(const Json& values) {
  const Json all = filled_recipe(values);
  Recipe recipe;
  recipe.target = all["target"];
  recipe.precision = all["precision"];
  recipe.cache_precision = all["cache_precision"];
  if (recipe.cache_precision != "fp32" && recipe.target != "native") {
    throw std::invalid_argument("cache_precision=" + recipe.cache_precision + ": needs target = 'native'");
  }
  recipe.group_size = all["group_size"];
  recipe.top_k = all["top_k"];
  recipe.attention = all["attention"];
  recipe.memory = all["memory"];
  if (recipe.top_k < 0) {
    throw std::invalid_argument("top_k=" + std::to_string(recipe.top_k) + ": must be at least 0");
  }
  const std::string cache = recipe.target == "onnx" ? "growing" : "static";
  if (all["cache"] != cache) {
    throw std::invalid_argument("cache=" + all["cache"].get<std::string>() + ": must be " + cache + " with target=" +
                                recipe.target);
  }
  for (const auto& [name, axis] : all["axes"].items()) {
    const bool open = axis["max"] == 0;
    const bool ordered = axis["min"] >= 0 && axis["min"] <= axis["opt"] && (open || axis["opt"] <= axis["max"]);
    if (!ordered || axis["max"] > std::int64_t{1} << 31) {
      throw std::invalid_argument("axis " + name + " " + axis.dump() + ": must be min <= opt <= max");
    }
  }
  const Json& axes = all["axes"];
  recipe.limits.batch = axes["batch"]["max"];
  recipe.limits.beams = axes["beams"]["max"];
  recipe.limits.src_tokens = axes["src_len"]["max"];
  recipe.limits.tgt_tokens = axes["past_len"]["max"].get<std::int64_t>() + 1;
  return recipe;
}

bool same_model(const Json& one, const Json& other) { return filled_model(one) == filled_model(other); }

bool same_recipe(const Json& one, const Json& other) {
  Json a = filled_recipe(one), b = filled_recipe(other);
  for (const char* part : {"tolerance", "plans"}) {
    if (!agree(a[part], b[part])) return false;
    a.erase(part);
    b.erase(part);
  }
  return a == b;
}

}  // namespace tformer
