#include "decode/history.hpp"

namespace tformer {

void History::look(const std::vector<float>& attention, std::size_t rows) {
  attention_.push_back(attention);
  widths_.push_back(attention.size() / rows);
}

void History::add(const std::vector<std::int32_t>& parents, const std::vector<std::int32_t>& tokens) {
  begins_.push_back(parents_.size());
  parents_.insert(parents_.end(), parents.begin(), parents.end());
  tokens_.insert(tokens_.end(), tokens.begin(), tokens.end());
}

void History::written(std::size_t row, std::vector<std::int32_t>& tokens) const {
  tokens.resize(steps());
  for (std::size_t step = steps(); step-- > 0;) {
    const std::size_t place = begins_[step] + row;
    tokens[step] = tokens_[place];
    row = static_cast<std::size_t>(parents_[place]);
  }
}

std::vector<const float*> History::looks(std::size_t row) const {
  std::vector<const float*> found(attention_.size());
  for (std::size_t step = attention_.size(); step-- > 0;) {
    found[step] = attention_[step].data() + row * widths_[step];
    if (step > 0) row = static_cast<std::size_t>(parents_[begins_[step - 1] + row]);
  }
  return found;
}

}  // namespace tformer
