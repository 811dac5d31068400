// What transformers adds to a tokenizer: added tokens, and spaces that are removed from outputs.
#include <algorithm>
#include <map>
#include <unordered_map>
#include <utility>
#include <variant>

#include "errors.hpp"
#include "text/kinds.hpp"
#include "text/unicode.hpp"

namespace tformer {
namespace {

/// A part of a text, or an added token in it.
using Part = std::variant<std::u32string, std::int32_t>;
using Parts = std::vector<Part>;
using Normalizer = std::function<std::string(const std::string&)>;

/// Replacements of transformers in outputs, in this order.
constexpr std::pair<std::string_view, std::string_view> cleaned[] = {
    {" .", "."},     {" ?", "?"},   {" !", "!"},   {" ,", ","},     {" ' ", "'"},
    {" n't", "n't"}, {" 'm", "'m"}, {" 's", "'s"}, {" 've", "'ve"}, {" 're", "'re"},
};

/// Finds texts in another: from the left, the longest first.
class Matches {
 public:
  void add(const std::u32string& text, const AddedToken& token) {
    if (text.empty() || !tokens_.try_emplace(text, token).second) return;
    std::vector<std::u32string>& same = by_first_[text[0]];
    same.push_back(text);
    std::stable_sort(same.begin(), same.end(), [](const auto& a, const auto& b) { return a.size() > b.size(); });
  }

  /// Parts of a text, as in `tokenizers`.
  Parts split(const std::u32string& text) const {
    Parts parts;
    std::size_t at = 0;
    for (const auto& [first, last] : found_in(text)) {
      std::size_t start = first, end = last;
      const AddedToken& token = tokens_.at(text.substr(start, end - start));
      const bool inside = (start > 0 && is_word(text[start - 1])) || (end < text.size() && is_word(text[end]));
      if (token.single_word && inside) continue;
      while (token.lstrip && start > at && is_white(text[start - 1])) --start;
      while (token.rstrip && end < text.size() && is_white(text[end])) ++end;
      if (at < start) parts.emplace_back(text.substr(at, start - at));
      parts.emplace_back(token.id);
      at = end;
    }
    if (at < text.size()) parts.emplace_back(text.substr(at));
    return parts;
  }

  /// The same as by slow tokenizers: a token that is not a single word joins the part beside it.
  Parts split_by_python(const std::u32string& text) const {
    std::vector<std::u32string> parts;
    std::size_t at = 0;
    for (const auto& [start, end] : found_in(text)) {
      if (at < start) parts.push_back(text.substr(at, start - at));
      parts.push_back(text.substr(start, end - start));
      at = end;
    }
    if (at < text.size()) parts.push_back(text.substr(at));
    for (std::size_t i = 0; i < parts.size(); ++i) {
      const auto token = tokens_.find(parts[i]);
      if (token == tokens_.end()) continue;
      const std::u32string left = i > 0 ? parts[i - 1] : U"", right = i + 1 < parts.size() ? parts[i + 1] : U"";
      if (token->second.rstrip && !right.empty()) {
        std::u32string& next = parts[i + 1];
        next.erase(next.begin(), std::find_if_not(next.begin(), next.end(), is_space));
      }
      if (token->second.lstrip && !left.empty()) {
        std::u32string& before = parts[i - 1];
        before.erase(std::find_if_not(before.rbegin(), before.rend(), is_space).base(), before.end());
      }
      if (!token->second.single_word) continue;
      if (!left.empty() && left.back() != U' ') {
        parts[i - 1] += std::exchange(parts[i], U"");
      } else if (!right.empty() && right.front() != U' ') {
        parts[i + 1].insert(0, std::exchange(parts[i], U""));
      }
    }
    Parts made;
    for (std::u32string& part : parts) {
      const auto token = tokens_.find(part);
      if (token != tokens_.end()) made.emplace_back(token->second.id);
      else if (!part.empty()) made.emplace_back(std::move(part));
    }
    return made;
  }

 private:
  std::vector<std::pair<std::size_t, std::size_t>> found_in(const std::u32string& text) const {
    std::vector<std::pair<std::size_t, std::size_t>> found;
    for (std::size_t i = 0; i < text.size();) {
      const auto same = by_first_.find(text[i]);
      std::size_t length = 0;
      if (same != by_first_.end()) {
        for (const std::u32string& token : same->second) {
          if (length == 0 && text.compare(i, token.size(), token) == 0) length = token.size();
        }
      }
      if (length > 0) found.emplace_back(i, i + length);
      i += std::max<std::size_t>(length, 1);
    }
    return found;
  }

  std::map<std::u32string, AddedToken> tokens_;
  std::unordered_map<char32_t, std::vector<std::u32string>> by_first_;  ///< longer ones first
};

class Wrapped final : public Tokenizer {
 public:
  Wrapped(std::unique_ptr<Tokenizer> inner, Around around, const std::string& model)
      : Tokenizer(inner->specials), inner_(std::move(inner)), around_(std::move(around)) {
    if (around_.normalize && !model.empty()) characters_ = normalizer_of(model);
    for (const AddedToken& token : around_.tokens) {
      if (token.id < 0 || token.id >= inner_->size() || specials.contains(token.id)) {
        throw Error(Status::bundle,
                    "the added token " + std::to_string(token.id) + " is not an entry that text can give");
      }
      const std::u32string text = characters(inner_->entry(token.id));
      if (around_.python || !token.normalized) plain_.add(text, token);
      else later_.add(normal(text), token);
      if (!token.piece && !around_.python) only_.push_back(token.id);
    }
    std::sort(only_.begin(), only_.end());
    const std::int32_t space = inner_->id_of("\xE2\x96\x81");
    edge_ = space < 0 ? specials.unk : space;
  }

  std::int32_t size() const override { return inner_->size(); }
  std::int32_t id_of(const std::string& entry) const override { return inner_->id_of(entry); }
  std::string entry(std::int32_t id) const override { return inner_->entry(id); }

  Ids encode(std::string_view text) const override {
    Ids ids;
    for (const Part& part : parts(characters(text))) {
      if (std::holds_alternative<std::int32_t>(part)) {
        ids.push_back(std::get<std::int32_t>(part));
        continue;
      }
      const auto& own = std::get<std::u32string>(part);
      for (const std::int32_t id : inner_->encode(utf8(own))) {
        ids.push_back(std::binary_search(only_.begin(), only_.end(), id) ? specials.unk : id);
      }
      if (around_.edges && own.back() == U' ') ids.push_back(edge_);
    }
    return ids;
  }

  std::string decode(const Ids& ids) const override {
    std::string text = inner_->decode(ids);
    if (!around_.clean_up) return text;
    for (const auto& [old, by] : cleaned) text = replaced(text, old, by);
    return text;
  }

  std::size_t settled(const std::string& line) const override {
    if (!around_.clean_up) return line.size();
    const std::size_t space = line.rfind(' ');  // later spaces may be removed
    return space == std::string::npos ? 0 : space;
  }

 private:
  std::u32string normal(const std::u32string& text) const {
    std::u32string made = characters_ ? characters(characters_(utf8(text))) : text;
    if (!around_.edges) return made;
    const auto both = [](char32_t a, char32_t b) { return a == U' ' && b == U' '; };
    made.erase(std::unique(made.begin(), made.end(), both), made.end());
    return made;
  }

  Parts parts(const std::u32string& text) const {
    if (around_.python) return plain_.split_by_python(text);
    Parts made;
    for (Part& part : plain_.split(text)) {
      if (std::holds_alternative<std::int32_t>(part)) {
        made.push_back(std::move(part));
        continue;
      }
      for (Part& inner : later_.split(normal(std::get<std::u32string>(part)))) made.push_back(std::move(inner));
    }
    return made;
  }

  std::unique_ptr<Tokenizer> inner_;
  Around around_;
  Normalizer characters_;
  Matches plain_, later_;
  Ids only_;  ///< ids that only added tokens produce
  std::int32_t edge_;
};

}  // namespace

std::unique_ptr<Tokenizer> make_wrapped(std::unique_ptr<Tokenizer> inner, Around around, const std::string& model) {
  return std::make_unique<Wrapped>(std::move(inner), std::move(around), model);
}

}  // namespace tformer
