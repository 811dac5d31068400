// Which instruction sets this build knows and this machine has.
#include "kernels/sets.hpp"

namespace tformer::kernels {
namespace {

struct Set {
  const Kernels* kernels;
  const char* missing;  // what this machine lacks; null: nothing
};

/// Best first.
const std::vector<Set>& sets() {
  static const std::vector<Set> all{{&portable, nullptr}};
  return all;
}

}  // namespace

std::vector<std::string> names() {
  std::vector<std::string> found;
  for (const Set& set : sets()) found.emplace_back(set.kernels->name);
  return found;
}

const Kernels* named(const std::string& name) {
  for (const Set& set : sets()) {
    if (name == set.kernels->name) return set.missing ? nullptr : set.kernels;
  }
  return nullptr;
}

std::string refusal(const std::string& name) {
  std::string known;
  for (const Set& set : sets()) {
    if (name == set.kernels->name) return "kernels '" + name + "' need " + set.missing + ", which this machine lacks";
    known += (known.empty() ? "" : ", ") + std::string(set.kernels->name);
  }
  return "no kernels are called '" + name + "': " + known;
}

const Kernels& best() {
  for (const Set& set : sets()) {
    if (!set.missing) return *set.kernels;
  }
  return portable;
}

}  // namespace tformer::kernels
