#include "decode/options.hpp"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <limits>
#include <variant>

#include "bundle/files.hpp"
#include "errors.hpp"

namespace tformer {
namespace {

using nlohmann::json;
using Member = std::variant<std::int64_t DecodeOptions::*, double DecodeOptions::*, bool DecodeOptions::*,
                            std::string DecodeOptions::*, std::vector<std::int64_t> DecodeOptions::*>;

struct Field {
  const char* name;
  Member member;
};

const std::array<Field, 26> fields{{
    {"max_tokens", &DecodeOptions::max_tokens},
    {"min_tokens", &DecodeOptions::min_tokens},
    {"max_ratio", &DecodeOptions::max_ratio},
    {"min_ratio", &DecodeOptions::min_ratio},
    {"n_best", &DecodeOptions::n_best},
    {"beams", &DecodeOptions::beams},
    {"length_norm", &DecodeOptions::length_norm},
    {"length_penalty", &DecodeOptions::length_penalty},
    {"coverage_penalty", &DecodeOptions::coverage_penalty},
    {"stop", &DecodeOptions::stop},
    {"patience", &DecodeOptions::patience},
    {"sampling", &DecodeOptions::sampling},
    {"temperature", &DecodeOptions::temperature},
    {"top_k", &DecodeOptions::top_k},
    {"top_p", &DecodeOptions::top_p},
    {"min_p", &DecodeOptions::min_p},
    {"seed", &DecodeOptions::seed},
    {"repetition_penalty", &DecodeOptions::repetition_penalty},
    {"no_repeat_ngram", &DecodeOptions::no_repeat_ngram},
    {"suppress", &DecodeOptions::suppress},
    {"end_ids", &DecodeOptions::end_ids},
    {"endless", &DecodeOptions::endless},
    {"first_ids", &DecodeOptions::first_ids},
    {"first_adds_zero", &DecodeOptions::first_adds_zero},
    {"forced_end", &DecodeOptions::forced_end},
    {"align", &DecodeOptions::align},
}};

constexpr std::int64_t count_end = std::int64_t{1} << 31;  // counts are less than this
constexpr double float_most = 1e300;
const std::vector<std::string> of_search{"length_norm", "length_penalty", "coverage_penalty", "stop", "patience"};
const std::vector<std::string> of_sampling{"temperature", "top_k", "top_p", "min_p", "seed"};

}  // namespace

std::vector<std::string> option_names() {
  std::vector<std::string> names;
  for (const Field& field : fields) names.emplace_back(field.name);
  return names;
}

namespace {

/// A number as Python shows it.
std::string shown(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value > 0 ? "inf" : "-inf";
  std::array<char, 64> text{};
  const double size = std::abs(value);
  const auto format = size != 0 && (size < 1e-4 || size >= 1e16) ? std::chars_format::scientific
                                                                 : std::chars_format::fixed;
  const auto end = std::to_chars(text.data(), text.data() + text.size(), value, format).ptr;
  const std::string made(text.data(), end);
  return made.find_first_of(".e") == std::string::npos ? made + ".0" : made;
}

std::string shown(const DecodeOptions& options, const Field& field) {
  return std::visit(
      [&](auto member) -> std::string {
        const auto& value = options.*member;
        using Type = std::decay_t<decltype(value)>;
        if constexpr (std::is_same_v<Type, std::string>) return value;
        else if constexpr (std::is_same_v<Type, double>) return shown(value);
        else if constexpr (std::is_same_v<Type, bool>) return value ? "True" : "False";
        else if constexpr (std::is_same_v<Type, std::int64_t>) return std::to_string(value);
        else return json(value).dump();
      },
      field.member);
}

const Field* find(const std::string& name) {
  const auto found = std::find_if(fields.begin(), fields.end(), [&](const Field& field) { return field.name == name; });
  return found == fields.end() ? nullptr : found;
}

const Field& field_of(const std::string& name) {
  if (const Field* field = find(name)) return *field;
  throw Error(Status::usage, unknown("key of [decoding]", name, option_names()));
}

void require(const DecodeOptions& options, const std::string& name, bool holds, const std::string& rule) {
  if (holds) return;
  throw Error(Status::usage, name + "=" + shown(options, *find(name)) + ": must be " + rule);
}

double number(const DecodeOptions& options, const char* name) {
  const Member& member = find(name)->member;
  if (const auto* whole = std::get_if<std::int64_t DecodeOptions::*>(&member)) {
    return static_cast<double>(options.*(*whole));
  }
  return options.*std::get<double DecodeOptions::*>(member);
}

void check_choice(const std::string& name, const std::string& value, const std::vector<std::string>& valid) {
  if (std::find(valid.begin(), valid.end(), value) != valid.end()) return;
  throw Error(Status::usage, unknown(name, value, valid));
}

void check_ranges(const DecodeOptions& options) {
  for (const Field& field : fields) {
    const auto* member = std::get_if<double DecodeOptions::*>(&field.member);
    require(options, field.name, !member || std::isfinite(options.*(*member)), "a finite number");
  }
  const auto each = [&](std::initializer_list<const char*> names, const auto& holds, const std::string& rule) {
    for (const char* name : names) require(options, name, holds(number(options, name)), rule);
  };
  each({"max_tokens", "n_best", "beams"}, [](double x) { return x >= 1; }, "at least 1");
  each({"max_tokens", "min_tokens", "n_best", "beams", "top_k", "no_repeat_ngram"},
       [](double x) { return x < static_cast<double>(count_end); }, "less than " + std::to_string(count_end));
  each({"min_tokens", "max_ratio", "min_ratio", "top_k", "no_repeat_ngram", "coverage_penalty"},
       [](double x) { return x >= 0; }, "at least 0");
  each({"max_ratio", "min_ratio"}, [](double x) { return x <= float_most; }, "at most 1e+300");
  each({"coverage_penalty", "patience"}, [](double x) { return x <= 1e6; }, "at most 1e+06");
  each({"temperature", "repetition_penalty"}, [](double x) { return 1e-3 <= x && x <= 1e3; }, "between 0.001 and 1000");
  each({"length_penalty"}, [](double x) { return std::abs(x) <= 10; }, "between -10 and 10");
  each({"top_p"}, [](double x) { return 0 < x && x <= 1; }, "above 0 and at most 1");
  each({"min_p"}, [](double x) { return 0 <= x && x < 1; }, "at least 0 and less than 1");
  require(options, "seed", options.seed >= 0, "at least 0 and less than 9223372036854775808");
}

/// Set a field by its value. Throws Error for another type.
void set(DecodeOptions& options, const Field& field, const json& value) {
  const auto wrong = [&](const std::string& rule) {
    throw Error(Status::usage, std::string(field.name) + "=" + value.dump() + ": must be " + rule);
  };
  std::visit(
      [&](auto member) {
        using Type = std::decay_t<decltype(options.*member)>;
        if constexpr (std::is_same_v<Type, std::string>) {
          if (!value.is_string()) wrong("of type str");
          options.*member = value.get<std::string>();
        } else if constexpr (std::is_same_v<Type, bool>) {
          if (!value.is_boolean()) wrong("of type bool");
          options.*member = value.get<bool>();
        } else if constexpr (std::is_same_v<Type, double>) {
          if (!value.is_number()) wrong("of type float");
          options.*member = value.get<double>();
        } else if constexpr (std::is_same_v<Type, std::int64_t>) {
          if (!value.is_number_integer()) wrong("of type int");
          if (value.is_number_unsigned() &&
              value.get<std::uint64_t>() > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) {
            const bool is_seed = field.name == std::string_view("seed");
            wrong(is_seed ? "at least 0 and less than 9223372036854775808" : "less than " + std::to_string(count_end));
          }
          options.*member = value.get<std::int64_t>();
        } else {
          const auto is_whole = [](const json& each) { return each.is_number_integer(); };
          if (!value.is_array() || !std::all_of(value.begin(), value.end(), is_whole)) wrong("a list of whole numbers");
          options.*member = value.get<std::vector<std::int64_t>>();
        }
      },
      field.member);
}

}  // namespace

void DecodeOptions::check() const {
  check_choice("length_norm", length_norm, {"power", "gnmt"});
  check_choice("stop", stop, {"count", "estimate", "exact"});
  check_ranges(*this);
  const double half = 0.5 / static_cast<double>(beams);
  require(*this, "patience", patience * static_cast<double>(beams) >= 0.5, "at least " + shown(half));
  require(*this, "min_tokens", min_tokens <= max_tokens, "at most max_tokens=" + std::to_string(max_tokens));
  const auto least = static_cast<std::int64_t>(first_ids.size()) + (forced_end && !endless ? 1 : 0);
  require(*this, "max_tokens", max_tokens >= least,
          "at least " + std::to_string(least) + ", for first_ids and the forced end");
  if (sampling) {
    require(*this, "beams", beams == 1, "1 with sampling: n_best is the number of samples");
  } else {
    require(*this, "n_best", n_best <= beams, "at most beams=" + std::to_string(beams) + ", or used with sampling");
  }
  const DecodeOptions usual;
  for (const std::string& name : sampling ? of_search : of_sampling) {
    const std::string value = shown(usual, *find(name));
    const std::string rule = value + (sampling ? " with sampling" : " without sampling");
    require(*this, name, shown(*this, *find(name)) == value, rule);
  }
  if (stop != "count") require(*this, "patience", patience == 1, "1 unless stop is 'count'");
}

std::vector<std::int32_t> token_ids(const std::vector<std::int64_t>& ids) {
  constexpr std::int64_t least = -1, most = std::numeric_limits<std::int32_t>::max();  // no vocabulary has them
  std::vector<std::int32_t> found;
  for (const std::int64_t id : ids) found.push_back(static_cast<std::int32_t>(std::clamp(id, least, most)));
  return found;
}

std::vector<std::int32_t> DecodeOptions::ends(std::int32_t eos_id) const {
  if (endless) return {};
  return end_ids.empty() ? std::vector<std::int32_t>{eos_id} : token_ids(end_ids);
}

DecodeOptions options_of(const json& values) {
  if (!values.is_object()) throw Error(Status::usage, "[decoding]: must be a table, got " + values.dump());
  DecodeOptions options;
  for (const auto& [name, value] : values.items()) field_of(name);
  for (const Field& field : fields) {
    if (values.contains(field.name)) set(options, field, values.at(field.name));
  }
  options.check();
  return options;
}

namespace {

/// A number of a text, which may have white space around it.
template <typename Number>
Number parsed(const std::string& where, const std::string& text, const char* rule) {
  constexpr const char* space = " \t\n\v\f\r";
  std::size_t first = std::min(text.find_first_not_of(space), text.size());
  const std::size_t last = text.find_last_not_of(space);
  if (text.compare(first, 1, "+") == 0 && text.compare(first + 1, 1, "-") != 0) ++first;
  const char* const begin = text.data() + first;
  const char* const stop = last == std::string::npos ? begin : text.data() + last + 1;
  Number value = 0;
  const auto [end, problem] = std::from_chars(begin, stop, value);
  if (problem == std::errc() && end == stop) return value;
  throw Error(Status::usage, where + "=" + text.substr(0, 60) + ": must be " + rule);
}

}  // namespace

json option_value(const std::string& name, const std::string& text) {
  const Field& field = field_of(name);
  const std::string where = "decoding." + name;
  const auto whole = [&](const std::string& part) { return parsed<std::int64_t>(where, part, "a whole number"); };
  if (std::holds_alternative<std::int64_t DecodeOptions::*>(field.member)) return whole(text);
  if (std::holds_alternative<double DecodeOptions::*>(field.member)) return parsed<double>(where, text, "a number");
  if (std::holds_alternative<std::string DecodeOptions::*>(field.member)) return text;
  if (std::holds_alternative<bool DecodeOptions::*>(field.member)) {
    std::string low = text;
    std::transform(low.begin(), low.end(), low.begin(), [](char c) { return c >= 'A' && c <= 'Z' ? c + 32 : c; });
    if (low == "true" || low == "false") return low == "true";
    throw Error(Status::usage, where + "=" + text.substr(0, 60) + ": must be true or false");
  }
  json ids = json::array();
  for (std::size_t start = 0; start <= text.size();) {
    const std::size_t end = std::min(text.find(',', start), text.size());
    ids.push_back(whole(text.substr(start, end - start)));
    start = end + 1;
  }
  return ids;
}

DecodeOptions over_defaults(const json& defaults, const json& asked) {
  const bool draws = asked.contains("sampling") && asked.at("sampling") == true;
  const json& beams = asked.contains("beams") ? asked : defaults;
  const bool ranked = !draws && beams.contains("beams") && beams.at("beams") != 1;
  json kept = asked;
  for (const auto& [name, value] : defaults.items()) {
    const bool of_beam = std::find(of_search.begin(), of_search.end(), name) != of_search.end() || name == "beams" ||
                         name == "n_best";
    if (!kept.contains(name) && (ranked || !of_beam)) kept[name] = value;
  }
  return options_of(kept);
}

}  // namespace tformer
