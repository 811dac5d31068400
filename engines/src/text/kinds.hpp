// The kinds of tokenizers, made of what their files hold. All throw Error for files that are damaged.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "text/tokenizer.hpp"

namespace tformer {

struct WordsHow {
  std::string language;              ///< a code of spaCy's; empty: none
  std::optional<std::string> regex;  ///< each match is a word
  bool lower = false;
};

struct BpeFile {
  std::vector<std::string> entries;
  std::vector<std::string> merges;
};

std::unique_ptr<Tokenizer> make_words(std::vector<std::string> words, Specials specials, const WordsHow& how);
std::unique_ptr<Tokenizer> make_sentencepiece(const std::string& model, Specials specials);
std::unique_ptr<Tokenizer> make_pieces(const std::string& model, std::vector<std::string> entries, Specials specials);
/// `space`: a text begins with a space if it does not already.
std::unique_ptr<Tokenizer> make_byte_bpe(BpeFile file, Specials specials, bool space);
/// `inner` is put behind every piece of a word but the last, `final` behind that.
std::unique_ptr<Tokenizer> make_word_bpe(BpeFile file, Specials specials, std::string inner, std::string final);

}  // namespace tformer
