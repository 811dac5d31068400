// A search over a table, for tests/test_cpp_decoding.py. A case is a line of JSON. The search asks for the rows of the
// table that it needs by lines {"source": ids, "output": ids}; the answer is float32: V log-probabilities, then the
// attention to each source token. The last line of a case is what was found. float64 are shown as their bits.
#include <algorithm>
#include <cstring>
#include <iostream>
#include <map>
#include <numeric>
#include <stdexcept>

#include "decode/running.hpp"
#include "errors.hpp"

using nlohmann::json;
using tformer::Scores;

namespace {

using Ids = std::vector<std::int32_t>;

struct TableState final : tformer::State {
  std::vector<Ids> sources, outputs;  // of every sentence, of every row
  std::vector<char> began;            // of every sentence
  std::size_t rows = 1, width = 0;
  bool gone = false;

  bool lost() const override { return gone; }
};

void require(bool holds, const char* what) {
  if (!holds) throw std::logic_error(what);
}

class TableEngine final : public tformer::Engine {
 public:
  explicit TableEngine(const json& given) : lists_(given.at("lists")) {
    model_.src_vocab = 60;
    model_.tgt_vocab = given.at("vocab");
    model_.pad_id = 1;
    model_.eos_id = given.at("eos");
    model_.start_id = 0;
    limits_ = {64, 16, given.at("positions"), 4096};
  }

  const tformer::ModelInfo& model() const override { return model_; }
  const tformer::Limits& limits() const override { return limits_; }
  bool attention() const override { return true; }

  std::unique_ptr<tformer::State> encode(const Ids& src_ids, const Ids& src_lengths,
                                         const tformer::Outlook&) override {
    auto state = std::make_unique<TableState>();
    admit(*state, src_ids, src_lengths, {});
    return state;
  }

  bool admits() const override { return true; }

  void admit(tformer::State& opaque, const Ids& src_ids, const Ids& src_lengths, const tformer::Outlook&) override {
    auto& state = static_cast<TableState&>(opaque);
    state.gone = fault == "admit, lost";
    fail_if("admit");
    const std::size_t width = src_ids.size() / src_lengths.size();
    for (std::size_t b = 0; b < src_lengths.size(); ++b) {
      const auto begin = src_ids.begin() + static_cast<std::ptrdiff_t>(b * width);
      state.sources.emplace_back(begin, begin + src_lengths[b]);
    }
    state.outputs.resize(state.sources.size() * state.rows);
    state.began.resize(state.sources.size(), 0);
    state.width = std::max(state.width, width);
  }

  std::int64_t best(std::int64_t beams, const tformer::State&) const override {
    return lists_ ? std::min<std::int64_t>(2 * beams - 1, model_.tgt_vocab) : 0;
  }

  void step(const Ids& tokens, tformer::State& opaque, bool full, bool attention, Scores& scores) override {
    auto& state = static_cast<TableState&>(opaque);
    fail_if("step");
    require(tokens.size() == state.outputs.size(), "one token a row");
    asked.push_back(full);
    const auto vocab = static_cast<std::size_t>(model_.tgt_vocab);
    const auto beams = static_cast<std::int64_t>(state.rows);
    const auto k = static_cast<std::size_t>(std::max<std::int64_t>(1, best(beams, state)));
    scores.best = static_cast<std::int64_t>(k);
    scores.ids.clear();
    scores.scores.clear();
    if (full) scores.log_probs.clear();  // else what an earlier step left stays: nobody may read it
    scores.attention.assign(attention ? tokens.size() * state.width : 0, 0.0F);
    for (std::size_t i = 0; i < tokens.size(); ++i) {
      if (state.began[i / state.rows]) state.outputs[i].push_back(tokens[i]);
      else require(tokens[i] == model_.start_id, "begins with the start token");
      const Ids& source = state.sources[i / state.rows];
      const std::vector<float>& row = table(source, state.outputs[i]);
      Ids ids(vocab);
      std::iota(ids.begin(), ids.end(), 0);
      const auto value = [&row](std::int32_t id) { return row[static_cast<std::size_t>(id)]; };
      std::stable_sort(ids.begin(), ids.end(), [&](std::int32_t a, std::int32_t b) { return value(a) > value(b); });
      for (std::size_t n = 0; n < k; ++n) {
        scores.ids.push_back(ids[n]);
        scores.scores.push_back(value(ids[n]));
      }
      const auto looks = row.begin() + static_cast<std::ptrdiff_t>(vocab);
      if (full) scores.log_probs.insert(scores.log_probs.end(), row.begin(), looks);
      const auto place = static_cast<std::ptrdiff_t>(i * state.width);
      if (attention) std::copy(looks, row.end(), scores.attention.begin() + place);
    }
    state.began.assign(state.began.size(), 1);
  }

  void reorder(tformer::State& opaque, const Ids& parents, const Ids& sentences) override {
    auto& state = static_cast<TableState&>(opaque);
    fail_if("reorder");
    const std::size_t rows = parents.size() / sentences.size();
    std::vector<Ids> sources, outputs;
    std::vector<char> began;
    for (const std::int32_t sentence : sentences) {
      sources.push_back(state.sources[static_cast<std::size_t>(sentence)]);
      began.push_back(state.began[static_cast<std::size_t>(sentence)]);
    }
    for (std::size_t i = 0; i < parents.size(); ++i) {
      const auto parent = static_cast<std::size_t>(parents[i]);
      require(parent / state.rows == static_cast<std::size_t>(sentences[i / rows]), "a row moved to another sentence");
      outputs.push_back(state.outputs[parent]);
    }
    state.sources = std::move(sources);
    state.outputs = std::move(outputs);
    state.began = std::move(began);
    state.rows = rows;
  }

  std::vector<std::vector<float>> cross_keys_values(const tformer::State&) const override { return {}; }

  std::vector<bool> asked;
  std::string fault;  ///< the next call that fails, and what else is wrong then

 private:
  void fail_if(const std::string& call) {
    if (fault.compare(0, call.size(), call) != 0) return;
    fault.clear();
    throw tformer::Error(tformer::Status::engine, "the engine stopped");
  }

  const std::vector<float>& table(const Ids& source, const Ids& output) {
    const auto [found, added] = table_.try_emplace({source, output});
    if (added) {
      std::cout << json{{"source", source}, {"output", output}}.dump() << std::endl;
      std::vector<float> row(static_cast<std::size_t>(model_.tgt_vocab) + source.size());
      std::cin.read(reinterpret_cast<char*>(row.data()), static_cast<std::streamsize>(row.size() * sizeof(float)));
      require(static_cast<bool>(std::cin), "the table ended");
      found->second = std::move(row);
    }
    return found->second;
  }

  tformer::ModelInfo model_;
  tformer::Limits limits_;
  bool lists_;
  std::map<std::pair<Ids, Ids>, std::vector<float>> table_;
};

std::uint64_t bits(double value) {
  std::uint64_t found = 0;
  std::memcpy(&found, &value, sizeof found);
  return found;
}

json shown(const std::vector<std::vector<tformer::Hypothesis>>& found) {
  json all = json::array();
  for (const auto& outputs : found) {
    json sentence = json::array();
    for (const auto& h : outputs) {
      sentence.push_back({h.ids, bits(h.score), h.finished, bits(h.value), h.alignment, h.end_id});
    }
    all.push_back(sentence);
  }
  return all;
}

tformer::Batch batch_of(const json& given) {
  tformer::Batch batch;
  const auto sources = given.at("sources").get<std::vector<Ids>>();
  std::size_t width = 0;
  for (const Ids& source : sources) width = std::max(width, source.size());
  for (Ids source : sources) {
    batch.src_lengths.push_back(static_cast<std::int32_t>(source.size()));
    source.resize(width, 1);
    batch.src_ids.insert(batch.src_ids.end(), source.begin(), source.end());
  }
  batch.numbers = given.at("numbers").get<std::vector<std::int64_t>>();
  batch.prefixes = given.at("prefixes").get<std::vector<Ids>>();
  return batch;
}

struct Request {
  tformer::DecodeOptions options;
  tformer::Batch batch;
  std::unique_ptr<tformer::Trie> allowed;
  tformer::Hooks hooks;
  std::unique_ptr<tformer::Search> search;
};

std::vector<Request> requests_of(const json& given, const TableEngine& engine) {
  std::vector<Request> requests(given.at("requests").size());
  for (std::size_t i = 0; i < requests.size(); ++i) {
    const json& asked = given["requests"][i];
    Request& own = requests[i];
    own.options = tformer::over_defaults(json::object(), asked.at("options"));
    own.batch = batch_of(asked);
    own.hooks.strict = false;
    if (!asked.at("allowed").is_null()) {
      own.allowed = std::make_unique<tformer::Trie>(asked["allowed"].get<std::vector<Ids>>());
      own.hooks.allowed = own.allowed.get();
    }
    own.search = tformer::make_search(engine, own.batch, own.options, own.hooks);
  }
  return requests;
}

/// Searches that join each other: `requests`, each before the step that `begins` says. Those that `retire` names, with a
/// step, leave before that step and find nothing.
json joined(const json& given) {
  TableEngine engine(given);
  tformer::ContinuousBatch running(engine);
  const std::vector<Request> requests = requests_of(given, engine);
  const auto begins = given.at("begins").get<std::vector<std::size_t>>();
  const auto retire = given.at("retire").get<std::map<std::string, std::size_t>>();
  for (std::size_t step = 0; step <= *std::max_element(begins.begin(), begins.end()) || !running.searches().empty();
       ++step) {
    for (const auto& [number, when] : retire) {
      if (when == step) running.remove(requests.at(std::stoul(number)).search.get());
    }
    std::vector<tformer::Search*> joining;
    for (std::size_t i = 0; i < requests.size(); ++i) {
      if (begins[i] == step) joining.push_back(requests[i].search.get());
    }
    running.join(joining);
    if (!running.searches().empty()) running.step();
  }
  json found = json::array();
  for (const Request& each : requests) found.push_back(each.search->done() ? shown(each.search->results()) : json());
  return {{"found", found}};
}

/// The first of `requests` have taken a step when the engine's `fault` meets the last one, which joins; in `reorder` the
/// first one, which leaves. Then the last one joins, once more. Finds the error of each, or its outputs.
json interrupted(const json& given) {
  TableEngine engine(given);
  tformer::ContinuousBatch running(engine);
  const std::vector<Request> requests = requests_of(given, engine);
  json found(requests.size(), json());
  running.failed = [&](const tformer::Search* search) {
    for (std::size_t i = 0; i < requests.size(); ++i) {
      if (requests[i].search.get() != search) continue;
      try {
        throw;
      } catch (const std::exception& error) {
        found[i] = error.what();
      }
    }
  };
  for (std::size_t i = 0; i + 1 < requests.size(); ++i) running.join({requests[i].search.get()});
  running.step();
  engine.fault = given["fault"];
  std::string thrown;
  try {
    if (engine.fault == "reorder") running.remove(requests[0].search.get());
    else if (engine.fault == "step") running.step();
    else running.join({requests.back().search.get()});
  } catch (const tformer::Error& error) {
    thrown = error.what();
  }
  running.join({requests.back().search.get()});
  while (!running.searches().empty()) running.step();
  for (std::size_t i = 0; i < requests.size(); ++i) {
    if (found[i].is_null() && requests[i].search->done()) found[i] = shown(requests[i].search->results());
  }
  return {{"thrown", thrown}, {"found", found}};
}

json answer(const json& given) {
  if (given.contains("fault")) return interrupted(given);
  if (given.contains("requests")) return joined(given);
  if (given.contains("setting")) return {{"value", tformer::option_value(given["setting"][0], given["setting"][1])}};
  const tformer::DecodeOptions options =
      tformer::over_defaults(given.value("defaults", json::object()), given.at("options"));
  if (!given.contains("sources")) {
    return {{"beams", options.beams}, {"n_best", options.n_best}, {"stop", options.stop}};
  }
  TableEngine engine(given);
  const tformer::Batch batch = batch_of(given);
  if (given.contains("targets")) {
    json all = json::array();
    for (const auto& values : tformer::score(engine, batch, given["targets"].get<std::vector<Ids>>())) {
      json sentence = json::array();
      for (const double value : values) sentence.push_back(bits(value));
      all.push_back(sentence);
    }
    return {{"scores", all}};
  }
  json steps = json::array();
  std::atomic<bool> cancel = false;
  const std::size_t last = given.value("steps", std::size_t{0});  // the caller wants no more; 0: all
  tformer::Hooks hooks;
  hooks.cancel = &cancel;
  hooks.strict = given.at("strict");
  const tformer::Trie allowed(given.at("allowed").is_null() ? std::vector<Ids>{}
                                                            : given["allowed"].get<std::vector<Ids>>());
  if (!given.at("allowed").is_null()) hooks.allowed = &allowed;
  hooks.on_step = [&](const std::vector<tformer::Candidate>& found) {
    json step = json::array();
    for (const auto& one : found) {
      step.push_back({one.sentence, one.row, one.token, bits(one.value), bits(one.score), one.rank});
    }
    steps.push_back(step);
    if (steps.size() == last) cancel = true;
  };
  const json found = shown(tformer::decode(engine, batch, options, hooks));
  return {{"found", found}, {"steps", steps}, {"asked", engine.asked}};
}

}  // namespace

int main() {
  for (std::string line; std::getline(std::cin, line);) {
    json said;
    try {
      said = answer(json::parse(line));
    } catch (const tformer::Error& error) {
      said = {{"error", error.what()}, {"status", static_cast<int>(error.status)}};
    } catch (const std::exception& error) {
      said = {{"fault", error.what()}};
    }
    std::cout << said.dump() << std::endl;
  }
  return 0;
}
