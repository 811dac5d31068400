#include "bundle/schema.hpp"

#include <algorithm>
#include <cmath>
#include <map>
#include <mutex>
#include <set>
#include <stdexcept>

#include "bundle/schema_text.hpp"
#include "text/regex.hpp"

namespace tformer {
namespace {

using Json = nlohmann::json;
constexpr std::size_t longest_matched = 4096;  // bytes; no name is longer
const std::set<std::string> keywords = {
    "$ref", "$schema", "additionalProperties", "anyOf", "const", "definitions", "description", "else", "enum", "if",
    "items", "maxItems", "maxLength", "maximum", "minItems", "minLength", "minimum", "pattern", "properties",
    "propertyNames", "required", "then", "title", "type"};

/// Throws std::logic_error for a keyword that is not implemented here, since what it asks for would not be checked.
void require_known(const Json& schema) {
  if (!schema.is_object()) return;
  for (const auto& [keyword, rule] : schema.items()) {
    if (!keywords.count(keyword)) throw std::logic_error("schema: unknown keyword " + keyword);
    if (keyword == "const" || keyword == "enum") continue;
    if (keyword == "properties" || keyword == "definitions" || keyword == "anyOf") {
      for (const Json& part : rule) require_known(part);
    } else {
      require_known(rule);
    }
  }
}

Json parsed(const char* text) {
  Json schema = Json::parse(text);
  require_known(schema);
  return schema;
}

/// A compiled pattern. Parsed JSON has no unpaired surrogates, so ranges that exclude them are dropped.
const Regex& expression(const std::string& pattern) {
  static std::map<std::string, Regex> known;
  static std::mutex lock;
  const std::lock_guard<std::mutex> held(lock);
  const auto found = known.find(pattern);
  if (found != known.end()) return found->second;
  std::string read = pattern;
  static const std::string halves = "\\ud800-\\udfff";
  for (std::size_t at; (at = read.find(halves)) != std::string::npos;) read.erase(at, halves.size());
  if (!read.empty() && read.back() == '$') read.replace(read.size() - 1, 1, "\\z");  // not before a line feed
  return known.emplace(pattern, read).first->second;
}

bool matches(const std::string& text, const std::string& pattern) {
  return text.size() <= longest_matched && !expression(pattern).find_all(text).empty();
}

bool has_type(const Json& value, const std::string& type) {
  if (type == "object") return value.is_object();
  if (type == "array") return value.is_array();
  if (type == "string") return value.is_string();
  if (type == "boolean") return value.is_boolean();
  if (type == "null") return value.is_null();
  if (type == "number") return value.is_number();
  if (type == "integer") {
    return value.is_number_integer() || (value.is_number_float() && std::trunc(value.get<double>()) == value);
  }
  throw std::logic_error("schema: unknown type " + type);
}

/// Checks one value at a path such as `model.d_model`; `wrong` is the first problem.
class Checker {
 public:
  explicit Checker(const Json& root) : root_(root) {}
  std::string wrong;

  bool check(const Json& value, const Json& schema, const std::string& at) {
    if (schema.contains("$ref")) {
      const std::string name = schema["$ref"].get<std::string>().substr(std::string("#/definitions/").size());
      return check(value, root_["definitions"].at(name), at);
    }
    for (const auto& [keyword, rule] : schema.items()) {
      if (!keyword_holds(value, schema, keyword, rule, at)) return false;
    }
    return true;
  }

 private:
  const Json& root_;

  bool fail(const std::string& at, const std::string& what) {
    wrong = (at.empty() ? "the manifest" : at.substr(0, 200)) + " " + what;
    return false;
  }

  bool keyword_holds(const Json& value, const Json& schema, const std::string& keyword, const Json& rule,
                     const std::string& at) {
    if (keyword == "type") return type(value, rule, at);
    if (keyword == "const") return value == rule || fail(at, "must be " + rule.dump());
    if (keyword == "enum") return one_of(value, rule, at);
    if (keyword == "if") return condition(value, schema, rule, at);
    if (keyword == "anyOf") return any_of(value, rule, at);
    if (value.is_object()) return object(value, schema, keyword, rule, at);
    if (value.is_array()) return array(value, keyword, rule, at);
    if (value.is_string()) return text(value.get_ref<const std::string&>(), keyword, rule, at);
    if (value.is_number()) return number(value.get<double>(), keyword, rule, at);
    return true;
  }

  bool type(const Json& value, const Json& rule, const std::string& at) {
    for (const Json& each : rule.is_array() ? rule : Json::array({rule})) {
      if (has_type(value, each)) return true;
    }
    return fail(at, "must be " + (rule.is_array() ? "of one of the types " + rule.dump() : rule.get<std::string>()));
  }

  bool one_of(const Json& value, const Json& rule, const std::string& at) {
    for (const Json& each : rule) {
      if (value == each) return true;
    }
    return fail(at, "must be one of " + rule.dump());
  }

  bool condition(const Json& value, const Json& schema, const Json& rule, const std::string& at) {
    Checker silent(root_);
    const char* branch = silent.check(value, rule, at) ? "then" : "else";
    return !schema.contains(branch) || check(value, schema[branch], at);
  }

  bool any_of(const Json& value, const Json& rule, const std::string& at) {
    for (const Json& each : rule) {
      Checker silent(root_);
      if (silent.check(value, each, at)) return true;
    }
    return fail(at, "cannot be validated by any definition");
  }

  bool object(const Json& value, const Json& schema, const std::string& keyword, const Json& rule,
              const std::string& at) {
    const auto inside = [&at](const std::string& name) { return at.empty() ? name : at + "." + name; };
    if (keyword == "required") {
      for (const Json& name : rule) {
        if (!value.contains(name.get<std::string>())) return fail(inside(name), "is missing");
      }
    } else if (keyword == "properties") {
      for (const auto& [name, each] : rule.items()) {
        if (value.contains(name) && !check(value[name], each, inside(name))) return false;
      }
    } else if (keyword == "additionalProperties") {
      return additional(value, schema, rule, at);
    } else if (keyword == "propertyNames") {
      for (const auto& [name, each] : value.items()) {
        if (!matches(name, rule["pattern"])) {
          return fail(at, "has the name '" + name.substr(0, 80) + "', which no file or part of it can have");
        }
      }
    }
    return true;
  }

  bool additional(const Json& value, const Json& schema, const Json& rule, const std::string& at) {
    const Json known = schema.value("properties", Json::object());
    for (const auto& [name, each] : value.items()) {
      if (known.contains(name)) continue;
      const std::string inside = at.empty() ? name : at + "." + name;
      if (rule.is_boolean() && !rule.get<bool>()) return fail(inside, "is not known");
      if (rule.is_object() && !check(each, rule, inside)) return false;
    }
    return true;
  }

  bool array(const Json& value, const std::string& keyword, const Json& rule, const std::string& at) {
    if (keyword == "minItems" && value.size() < rule.get<std::size_t>()) {
      return fail(at, "must contain at least " + rule.dump() + " items");
    }
    if (keyword == "maxItems" && value.size() > rule.get<std::size_t>()) {
      return fail(at, "must contain less than or equal to " + rule.dump() + " items");
    }
    if (keyword == "items") {
      for (std::size_t i = 0; i < value.size(); ++i) {
        if (!check(value[i], rule, at + "[" + std::to_string(i) + "]")) return false;
      }
    }
    return true;
  }

  bool text(const std::string& value, const std::string& keyword, const Json& rule, const std::string& at) {
    if (keyword == "pattern" && !matches(value, rule)) {
      return fail(at, "must match pattern " + rule.get<std::string>());
    }
    const auto is_first = [](char byte) { return (static_cast<unsigned char>(byte) & 0xC0) != 0x80; };
    const auto length = static_cast<std::size_t>(std::count_if(value.begin(), value.end(), is_first));  // characters
    if (keyword == "minLength" && length < rule.get<std::size_t>()) {
      return fail(at, "must be longer than or equal to " + rule.dump() + " characters");
    }
    if (keyword == "maxLength" && length > rule.get<std::size_t>()) {
      return fail(at, "must be shorter than or equal to " + rule.dump() + " characters");
    }
    return true;
  }

  bool number(double value, const std::string& keyword, const Json& rule, const std::string& at) {
    if (keyword == "minimum" && value < rule.get<double>()) {
      return fail(at, "must be bigger than or equal to " + rule.dump());
    }
    if (keyword == "maximum" && value > rule.get<double>()) {
      return fail(at, "must be smaller than or equal to " + rule.dump());
    }
    return true;
  }
};

}  // namespace

std::string schema_error(const Json& value, const Json& schema) {
  Checker checker(schema);
  checker.check(value, schema, "");
  return checker.wrong;
}

const Json& bundle_schema() {
  static const Json schema = parsed(bundle_schema_text);
  return schema;
}

const Json& plans_schema() {
  static const Json schema = parsed(plans_schema_text);
  return schema;
}

}  // namespace tformer
