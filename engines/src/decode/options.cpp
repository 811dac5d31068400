#include "decode/options.hpp"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <limits>
#include <sstream>
#include <string_view>
#include <variant>

#include "bundle/files.hpp"
#include "errors.hpp"

namespace tformer {
namespace {

using nlohmann::json;
using Ids = std::vector<std::int64_t>;
using Member = std::variant<std::int64_t DecodeOptions::*, double DecodeOptions::*, bool DecodeOptions::*,
                            std::string DecodeOptions::*, Ids DecodeOptions::*, std::vector<Ids> DecodeOptions::*>;

/// A range of numbers; `above`, `below`: without its lower, its upper end.
template <typename Number>
struct Bounds {
  Number low, high;
  bool above, below;

  bool hold(Number value) const {
    return (above ? value > low : value >= low) && (below ? value < high : value <= high);
  }
};

struct Field {
  const char* name;
  Member member;
  std::string_view of;       ///< search or sampling, if only that reads it
  std::string_view choices;  ///< separated by spaces
  std::variant<Bounds<std::int64_t>, Bounds<double>> bounds;  ///< a whole number's are whole, as a double rounds them
  const char* rule;  ///< what `bounds` are; empty: any number
  const char* kind;  ///< what its type is called
  const char* help;
};

const std::vector<Field> fields{
#define TFORMER_OPTION(type, name, value, of, choices, bounds, rule, kind, help) \
  {#name, &DecodeOptions::name, of, choices, bounds, rule, kind, help},
#include "decode/options.inc"
#undef TFORMER_OPTION
};

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
  return found == fields.end() ? nullptr : &*found;
}

const Field& field_of(const std::string& name) {
  if (const Field* field = find(name)) return *field;
  throw Error(Status::usage, unknown("key of [decoding]", name, option_names()));
}

void require(const DecodeOptions& options, const std::string& name, bool holds, const std::string& rule) {
  if (holds) return;
  throw Error(Status::usage, name + "=" + shown(options, *find(name)) + ": must be " + rule);
}

void check_choice(const DecodeOptions& options, const Field& field) {
  std::istringstream words{std::string(field.choices)};
  std::vector<std::string> valid;
  for (std::string word; words >> word;) valid.push_back(word);
  const std::string& value = options.*std::get<std::string DecodeOptions::*>(field.member);
  if (std::find(valid.begin(), valid.end(), value) == valid.end()) throw Error(Status::usage, unknown(field.name, value, valid));
}

/// Check each option by itself.
void check_each(const DecodeOptions& options) {
  for (const Field& field : fields) {
    if (!field.choices.empty()) check_choice(options, field);
    if (const auto* member = std::get_if<double DecodeOptions::*>(&field.member)) {
      require(options, field.name, std::isfinite(options.*(*member)), "a finite number");
    }
  }
  for (const Field& field : fields) {
    const auto check = [&](auto member) {
      using Type = std::decay_t<decltype(options.*member)>;
      if constexpr (std::is_same_v<Type, double> || std::is_same_v<Type, std::int64_t>) {
        require(options, field.name, std::get<Bounds<Type>>(field.bounds).hold(options.*member), field.rule);
      }
    };
    std::visit(check, field.member);
  }
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
            wrong(field.rule);
          }
          options.*member = value.get<std::int64_t>();
        } else {
          const auto is_whole = [](const json& each) { return each.is_number_integer(); };
          const auto is_list = [&](const json& each) {
            return each.is_array() && std::all_of(each.begin(), each.end(), is_whole);
          };
          constexpr bool nested = std::is_same_v<Type, std::vector<Ids>>;
          const bool fits = nested ? value.is_array() && std::all_of(value.begin(), value.end(), is_list) : is_list(value);
          if (!fits) wrong(nested ? "a list of lists of whole numbers" : "a list of whole numbers");
          options.*member = value.get<Type>();
        }
      },
      field.member);
}

}  // namespace

void DecodeOptions::check() const {
  check_each(*this);
  const bool none_empty = std::none_of(bad_words.begin(), bad_words.end(), [](const Ids& ids) { return ids.empty(); });
  require(*this, "bad_words", none_empty, "sequences of one token id at least");
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
  for (const Field& field : fields) {
    if (field.of != (sampling ? "search" : "sampling")) continue;
    const std::string value = shown(usual, field);
    const std::string rule = value + (sampling ? " with sampling" : " without sampling");
    require(*this, field.name, shown(*this, field) == value, rule);
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
  const auto parts = [](const std::string& joined, char between, const auto& read) {
    json found = json::array();
    for (std::size_t start = 0; !joined.empty() && start <= joined.size();) {
      const std::size_t end = std::min(joined.find(between, start), joined.size());
      found.push_back(read(joined.substr(start, end - start)));
      start = end + 1;
    }
    return found;
  };
  const auto ids = [&](const std::string& part) { return parts(part, ',', whole); };
  return std::holds_alternative<Ids DecodeOptions::*>(field.member) ? ids(text) : parts(text, '/', ids);
}

namespace {

/// A value as `option_value` takes it.
std::string written(const DecodeOptions& options, const Field& field) {
  const auto joined = [](const Ids& ids) {
    std::string text;
    for (const std::int64_t id : ids) text += (text.empty() ? "" : ",") + std::to_string(id);
    return text;
  };
  if (const auto* flag = std::get_if<bool DecodeOptions::*>(&field.member)) return options.*(*flag) ? "true" : "false";
  if (const auto* ids = std::get_if<Ids DecodeOptions::*>(&field.member)) return joined(options.*(*ids));
  if (const auto* lists = std::get_if<std::vector<Ids> DecodeOptions::*>(&field.member)) {
    std::string text;
    for (const Ids& each : options.*(*lists)) text += (text.empty() ? "" : "/") + joined(each);
    return text;
  }
  return shown(options, field);
}

}  // namespace

std::vector<OptionInfo> options_about(const DecodeOptions& defaults) {
  std::vector<OptionInfo> all;
  for (const Field& field : fields) {
    OptionInfo made{field.name, field.kind, written(defaults, field), field.rule, field.help};
    std::istringstream words{std::string(field.choices)};
    for (std::string word; words >> word;) made.values += (made.values.empty() ? "" : ", ") + word;
    const bool number = std::holds_alternative<std::int64_t DecodeOptions::*>(field.member) ||
                        std::holds_alternative<double DecodeOptions::*>(field.member);
    if (number) {
      std::visit(
          [&made](const auto& bounds) {
            made.least = static_cast<double>(bounds.low);
            made.most = static_cast<double>(bounds.high);
          },
          field.bounds);
    }
    all.push_back(std::move(made));
  }
  return all;
}

DecodeOptions over_defaults(const json& defaults, const json& asked) {
  const bool draws = asked.contains("sampling") && asked.at("sampling") == true;
  const json& beams = asked.contains("beams") ? asked : defaults;
  const bool ranked = !draws && beams.contains("beams") && beams.at("beams") != 1;
  json kept = asked;
  for (const auto& [name, value] : defaults.items()) {
    const Field* field = find(name);
    const bool of_beam = name == "beams" || name == "n_best" || (field && field->of == "search");
    if (!kept.contains(name) && (ranked || !of_beam)) kept[name] = value;
  }
  return options_of(kept);
}

}  // namespace tformer
