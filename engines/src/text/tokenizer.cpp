#include "text/tokenizer.hpp"

#include <algorithm>

#include "bundle/files.hpp"
#include "errors.hpp"
#include "text/kinds.hpp"
#include "text/unicode.hpp"

namespace tformer {
namespace {

using nlohmann::json;
namespace fs = std::filesystem;

/// A list of texts in a JSON file.
std::vector<std::string> strings(const Folder& folder, const std::string& name, const char* key) {
  const json file = read_json(folder, name, tokenizer_bytes);
  const json* found = file.is_object() && file.contains(key) ? &file.at(key) : nullptr;
  const auto is_text = [](const json& each) { return each.is_string(); };
  if (!found || !found->is_array() || !std::all_of(found->begin(), found->end(), is_text)) {
    throw Error(Status::bundle, std::string("it has no list of texts called '") + key + "'");
  }
  return found->get<std::vector<std::string>>();
}

/// Lines that are each ended by a line feed.
std::vector<std::string> lines(const std::string& content) {
  if (const auto problem = utf8_problem(content); !problem.empty()) {
    throw Error(Status::bundle, "not UTF-8: " + std::string(problem));
  }
  std::vector<std::string> found;
  std::size_t start = 0;
  for (std::size_t end; (end = content.find('\n', start)) != std::string::npos; start = end + 1) {
    found.push_back(content.substr(start, end - start));
  }
  return found;
}

Specials specials_of(const json& description) {
  Specials found;
  const auto given = description.find("specials");
  if (given == description.end()) return found;
  found.pad = given->value("pad", found.pad);
  found.bos = given->value("bos", found.bos);
  found.eos = given->value("eos", found.eos);
  found.unk = given->value("unk", found.unk);
  found.others = given->value("others", Ids{});
  return found;
}

Around around_of(const json& description) {
  Around found;
  for (const json& each : description.value("tokens", json::array())) {
    const auto is = [&each](const char* key) { return each.value(key, false); };
    found.tokens.push_back({each.at("id").get<std::int32_t>(), is("lstrip"), is("rstrip"), is("single_word"),
                            is("normalized"), is("piece")});
  }
  found.python = description.value("python", false);
  found.normalize = description.value("normalize", false);
  found.edges = description.value("edges", false);
  found.clean_up = description.value("clean_up", false);
  return found;
}

std::unique_ptr<Tokenizer> make(const json& description, const Folder& folder, const std::string& name,
                                const std::string& content) {
  const auto kind = description.value("kind", std::string());
  const Specials specials = specials_of(description);
  if (kind == "transformers") {
    json inner = description;
    inner["kind"] = description.at("of");
    const bool model = fs::path(name).extension() == ".model";
    auto made = inner["kind"] == kind ? nullptr : make(inner, folder, name, content);
    return made ? make_wrapped(std::move(made), around_of(description.at("around")), model ? content : "") : nullptr;
  }
  if (kind == "sentencepiece") return make_sentencepiece(content, specials);
  if (kind == "pieces") {
    return make_pieces(content, strings(folder, description.at("entries"), "entries"), specials);
  }
  if (kind == "words") {
    auto words = fs::path(name).extension() == ".json" ? strings(folder, name, "entries") : lines(content);
    const std::vector<std::string> ours{"<unk>", "<pad>", "<bos>", "<eos>"};
    if (!description.contains("specials") &&
        (words.size() < ours.size() || !std::equal(ours.begin(), ours.end(), words.begin()))) {
      throw Error(Status::bundle, "a word list must begin with <unk> <pad> <bos> <eos>");
    }
    WordsHow how;
    const auto text_of = [&](const char* key) {
      const auto found = description.find(key);
      return found == description.end() || found->is_null() ? std::nullopt
                                                             : std::optional(found->get<std::string>());
    };
    how.language = text_of("language").value_or("");
    how.regex = text_of("regex");
    how.lower = description.value("lower", false);
    return make_words(std::move(words), specials, how);
  }
  if (kind == "byte-bpe" || kind == "bpe") {
    BpeFile file{strings(folder, name, "entries"), strings(folder, name, "merges")};
    if (kind == "byte-bpe") return make_byte_bpe(std::move(file), specials, description.value("space", false));
    return make_word_bpe(std::move(file), specials, description.value("inner", std::string("@@")),
                         description.value("final", std::string()));
  }
  return nullptr;
}

}  // namespace

bool Specials::contains(std::int32_t id) const {
  return id == pad || id == bos || id == eos || id == unk ||
         std::find(others.begin(), others.end(), id) != others.end();
}

bool Specials::hides(std::int32_t id) const {
  return ((id == pad || id == bos || id == eos) && id != unk) ||
         std::find(others.begin(), others.end(), id) != others.end();
}

Vocabulary::Vocabulary(std::vector<std::string> entries, const Specials& specials)
    : entries_(std::move(entries)), unk_(specials.unk) {
  Ids special = specials.others;
  special.insert(special.end(), {specials.pad, specials.bos, specials.eos, specials.unk});
  for (const std::int32_t id : special) {
    if (id < -1 || id >= size()) {
      throw Error(Status::bundle, "a vocabulary of " + std::to_string(size()) + " entries has no special token " +
                                      std::to_string(id));
    }
  }
  ids_.reserve(entries_.size());
  for (std::int32_t id = 0; id < size(); ++id) {
    if (!specials.contains(id)) ids_.insert_or_assign(entry(id), id);
  }
}

std::int32_t Vocabulary::id(const std::string& entry) const {
  const auto found = ids_.find(entry);
  return found == ids_.end() ? unk_ : found->second;
}

std::int32_t Vocabulary::first(const std::string& entry) const {
  const auto found = std::find(entries_.begin(), entries_.end(), entry);
  return found == entries_.end() ? -1 : static_cast<std::int32_t>(found - entries_.begin());
}

std::vector<std::string_view> Vocabulary::shown(const Ids& ids, const Specials& specials) const {
  std::vector<std::string_view> found;
  for (const std::int32_t id : ids) {
    if (id >= 0 && id < size() && !specials.hides(id)) found.push_back(entry(id));
  }
  return found;
}

Ids Tokenizers::source_ids(std::string_view text) const {
  Ids ids = prefix;
  const Ids own = source->encode(text);
  ids.insert(ids.end(), own.begin(), own.end());
  ids.insert(ids.end(), suffix.begin(), suffix.end());
  return ids;
}

Ids Tokenizers::target_ids(std::string_view text) const {
  Ids ids = target->encode(text);
  ids.push_back(target->specials.eos);
  return ids;
}

std::string Tokenizers::settled_text(const Ids& ids) const {
  static const std::string incomplete = "\xEF\xBF\xBD";  // U+FFFD
  std::string text = target->decode(ids);
  const auto ends = [&text] {
    return text.size() >= incomplete.size() &&
           text.compare(text.size() - incomplete.size(), incomplete.size(), incomplete) == 0;
  };
  while (ends()) text.resize(text.size() - incomplete.size());
  text.resize(target->settled(text));
  return text;
}

std::shared_ptr<const Tokenizer> make_tokenizer(const json& description, const Folder& folder) {
  const auto name = description.value("file", std::string());
  const std::string content = read_bytes(folder, name, tokenizer_bytes);
  std::string problem;
  try {
    if (auto made = make(description, folder, name, content)) return made;
  } catch (const json::exception& error) {
    problem = error.what();
  } catch (const Error& error) {
    problem = error.what();
  }
  const std::string path = (folder.path() / name).string();
  if (!problem.empty()) {
    throw Error(Status::bundle, path + " is damaged (" + problem + "): copy or make the folder again");
  }
  throw Error(Status::bundle, path + ": unknown tokenizer kind '" + description.value("kind", std::string()) + "'");
}

Tokenizers make_tokenizers(const json& description, const Folder& folder) {
  try {
    json source = description.at("source");
    const json& target = description.at("target");
    Tokenizers made;
    made.prefix = source.value("prefix", Ids{});
    const auto suffix = source.find("suffix");
    const bool has_suffix = suffix != source.end() && !suffix->is_null();
    if (has_suffix) made.suffix = suffix->get<Ids>();
    source.erase("prefix");
    source.erase("suffix");
    made.source = make_tokenizer(source, folder);
    made.target = target == source ? made.source : make_tokenizer(target, folder);
    if (!has_suffix) made.suffix = {made.source->specials.eos};
    return made;
  } catch (const json::exception& error) {
    throw Error(Status::bundle, "the description of the tokenizers is damaged (" + std::string(error.what()) +
                                    "): copy or make the folder again");
  }
}

}  // namespace tformer
