// Word-level tokenizers: split at white space, or by a regular expression.
#include "errors.hpp"
#include "text/kinds.hpp"
#include "text/regex.hpp"
#include "text/unicode.hpp"

namespace tformer {
namespace {

class Words final : public Tokenizer {
 public:
  Words(std::vector<std::string> words, Specials special, const WordsHow& how)
      : Tokenizer(std::move(special)), words_(std::move(words), specials), how_(how) {
    if (how.regex) regex_ = word_expression(*how.regex);
  }

  std::int32_t size() const override { return words_.size(); }
  std::string entry(std::int32_t id) const override { return words_.entry(id); }

  std::int32_t id_of(const std::string& entry) const override {
    std::int32_t found = -1;  // a special entry if there is one, else the last of equal ones
    for (std::int32_t id = 0; id < size(); ++id) {
      if (words_.entry(id) != entry) continue;
      if (found < 0 || specials.contains(id) || !specials.contains(found)) found = id;
    }
    return found;
  }

  Ids encode(std::string_view text) const override {
    if (!regex_ && !how_.language.empty()) {
      throw Error(Status::missing, "this bundle's text is split by spaCy's rules for '" + how_.language +
                                       "', and C++ has no spaCy rules: give token ids, or translate with Python");
    }
    const std::string low = how_.lower ? lower(text) : std::string();
    if (how_.lower) text = low;
    Ids ids;
    for (const std::string_view word : regex_ ? regex_->find_all(text) : split(text)) {
      ids.push_back(words_.id(std::string(word)));
    }
    return ids;
  }

  std::string decode(const Ids& ids) const override {
    std::string text;
    bool first = true;
    for (const std::string_view word : words_.shown(ids, specials)) {
      if (!first && !regex_) text += ' ';
      text += word;
      first = false;
    }
    return text;
  }

 private:
  Vocabulary words_;
  WordsHow how_;
  std::unique_ptr<const Regex> regex_;
};

}  // namespace

std::unique_ptr<Tokenizer> make_words(std::vector<std::string> words, Specials specials, const WordsHow& how) {
  return std::make_unique<Words>(std::move(words), std::move(specials), how);
}

}  // namespace tformer
