// The engine of `tformer check --backend cpp`: tformer-engine BUNDLE VARIANT THREADS SHORTLIST ONNXRUNTIME
// where ONNXRUNTIME is its file, empty for the one that is found.
//
// Requests come on standard input, replies go to standard output, in words of 4 bytes of this machine. An array is its
// number of words, in 8 bytes, and these. A request is three arrays at least: call and state, states that nobody uses
// any more, what the call takes. A reply is a status and arrays; where the status is not 0, one array with a text that
// is filled up with spaces. Before the first request there is one reply: limits, whether there is attention and
// whether sentences can join others, version.
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <new>
#include <string>

#include "decode/decode.hpp"
#include "errors.hpp"
#include "backend.hpp"
#include "ort/graphs.hpp"

namespace {

using tformer::Status;
using Ints = std::vector<std::int32_t>;
enum Call : std::int32_t { encode, step, reorder, cross, best, search, admit };

/// What is written as it is.
struct Words {
  const void* data = nullptr;
  std::size_t count = 0;
};

template <typename Value>
Words words(const std::vector<Value>& values) {
  static_assert(sizeof(Value) == 4);
  return {values.data(), values.size()};
}

/// A text as words.
Ints packed(std::string text) {
  text.resize((text.size() + 3) / 4 * 4, ' ');
  Ints found(text.size() / 4);
  std::memcpy(found.data(), text.data(), text.size());
  return found;
}

void append(Ints& values, double number) {
  std::int32_t halves[2];
  static_assert(sizeof halves == sizeof number);
  std::memcpy(halves, &number, sizeof number);
  values.insert(values.end(), {halves[0], halves[1]});
}

/// The other end of the pipe. A request that ends in its middle ends the program: nobody is there to answer.
class Pipe {
 public:
  explicit Pipe(std::FILE* out) : out_(out) {}

  bool read(Ints& array) {
    std::uint64_t count = 0;
    if (std::fread(&count, sizeof count, 1, stdin) != 1) return false;
    array.resize(count);
    return std::fread(array.data(), sizeof(std::int32_t), array.size(), stdin) == array.size();
  }
  Ints next() {
    Ints array;
    if (!read(array)) std::exit(1);
    return array;
  }
  void reply(Status status, const std::vector<Words>& arrays) {
    const auto word = static_cast<std::int32_t>(status);
    std::fwrite(&word, sizeof word, 1, out_);
    for (const Words& array : arrays) {
      const std::uint64_t count = array.count;
      std::fwrite(&count, sizeof count, 1, out_);
      if (count) std::fwrite(array.data, 4, array.count, out_);
    }
    if (std::fflush(out_) != 0) std::exit(1);
  }

 private:
  std::FILE* out_;
};

/// One engine, and the states that it has been asked for.
class Server {
 public:
  Server(Pipe& pipe, std::unique_ptr<tformer::Engine> engine) : pipe_(pipe), engine_(std::move(engine)) {}

  /// Read what a call takes, and only then do it: what throws has read all.
  void answer(Call call, std::int32_t number) {
    switch (call) {
      case encode: return encode_sources();
      case step: return take_step(number);
      case reorder: return move_rows(number);
      case cross: return show_cross(number);
      case best: return say_best(number);
      case search: return decode();
      case admit: return admit_sources(number);
    }
    throw tformer::Error(Status::internal, "there is no call " + std::to_string(call));
  }
  void release(const Ints& numbers) {
    for (const std::int32_t number : numbers) states_.erase(number);
  }

 private:
  Pipe& pipe_;
  std::unique_ptr<tformer::Engine> engine_;
  std::map<std::int32_t, std::unique_ptr<tformer::State>> states_;
  std::int32_t made_ = 0;
  tformer::Scores scores_;

  tformer::State& state(std::int32_t number) {
    const auto found = states_.find(number);
    if (found == states_.end()) throw tformer::Error(Status::internal, "no state " + std::to_string(number));
    return *found->second;
  }

  tformer::Outlook next_outlook() {
    const Ints sizes = pipe_.next(), counts = pipe_.next(), required = pipe_.next();
    tformer::Outlook outlook{sizes.at(0), sizes.at(1), {}};
    auto from = required.begin();
    for (const std::int32_t count : counts) {
      outlook.required.emplace_back(from, from + count);
      from += count;
    }
    return outlook;
  }

  void encode_sources() {
    const Ints ids = pipe_.next(), lengths = pipe_.next();
    states_[made_] = engine_->encode(ids, lengths, next_outlook());
    const Ints number = {made_++};
    pipe_.reply(Status::ok, {words(number)});
  }

  void admit_sources(std::int32_t number) {
    const Ints ids = pipe_.next(), lengths = pipe_.next();
    const tformer::Outlook outlook = next_outlook();
    engine_->admit(state(number), ids, lengths, outlook);
    pipe_.reply(Status::ok, {});
  }

  void take_step(std::int32_t number) {
    const Ints tokens = pipe_.next(), asked = pipe_.next();
    engine_->step(tokens, state(number), asked.at(0) != 0, asked.at(1) != 0, scores_);
    const Ints count = {static_cast<std::int32_t>(scores_.best)};
    pipe_.reply(Status::ok, {words(count), words(scores_.ids), words(scores_.scores), words(scores_.log_probs),
                             words(scores_.attention)});
  }

  void move_rows(std::int32_t number) {
    const Ints parents = pipe_.next(), sentences = pipe_.next();
    engine_->reorder(state(number), parents, sentences);
    pipe_.reply(Status::ok, {});
  }

  void show_cross(std::int32_t number) {
    const auto found = engine_->cross_keys_values(state(number));
    std::vector<Words> arrays;
    for (const std::vector<float>& values : found) arrays.push_back(words(values));
    pipe_.reply(Status::ok, arrays);
  }

  void say_best(std::int32_t number) {
    const Ints beams = pipe_.next();
    const Ints count = {static_cast<std::int32_t>(engine_->best(beams.at(0), state(number)))};
    pipe_.reply(Status::ok, {words(count)});
  }

  /// The library's own search. Of every output: how many ids, its end token or -1, score, value, the ids.
  void decode() {
    tformer::Batch batch;
    batch.src_ids = pipe_.next();
    batch.src_lengths = pipe_.next();
    const Ints numbers = pipe_.next(), options = pipe_.next();
    batch.numbers.assign(numbers.begin(), numbers.end());
    const std::string text(reinterpret_cast<const char*>(options.data()), options.size() * sizeof(std::int32_t));
    tformer::Hooks hooks;
    hooks.strict = false;
    Ints counts, outputs;
    for (const auto& found :
         tformer::decode(*engine_, batch, tformer::options_of(nlohmann::json::parse(text)), hooks)) {
      counts.push_back(static_cast<std::int32_t>(found.size()));
      for (const tformer::Hypothesis& output : found) {
        outputs.push_back(static_cast<std::int32_t>(output.ids.size()));
        outputs.push_back(output.finished ? output.end_id : -1);
        append(outputs, output.score);
        append(outputs, output.value);
        outputs.insert(outputs.end(), output.ids.begin(), output.ids.end());
      }
    }
    pipe_.reply(Status::ok, {words(counts), words(outputs)});
  }
};

/// Does some work; where it throws, says so.
template <typename Work>
bool done(Pipe& pipe, const Work& work) {
  Status status = Status::internal;
  std::string said;
  try {
    work();
    return true;
  } catch (const tformer::Error& error) {
    status = error.status;
    said = error.what();
  } catch (const std::bad_alloc&) {
    status = Status::no_memory;
    said = "there is no memory left: use smaller batches";
  } catch (const std::exception& error) {
    said = std::string("internal fault: ") + error.what() + ": please report it";
  }
  const Ints text = packed(said);
  pipe.reply(status, {words(text)});
  return false;
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 6) {
    std::fputs("usage: tformer-engine BUNDLE VARIANT THREADS SHORTLIST ONNXRUNTIME; run by tformer check\n", stderr);
    return 2;
  }
  std::signal(SIGINT, SIG_IGN);  // Ctrl-C is the parent's to handle
  Pipe pipe(::fdopen(::dup(STDOUT_FILENO), "wb"));
  ::dup2(STDERR_FILENO, STDOUT_FILENO);  // what a library prints is no reply
  std::unique_ptr<Server> server;
  const bool open = done(pipe, [&] {
    tformer::OpenOptions options;
    options.variant = arguments[2];
    options.threads = std::atoi(arguments[3]);
    options.shortlist = std::string(arguments[4]) == "1";
    options.onnxruntime = arguments[5];
    const auto bundle = std::make_shared<const tformer::Bundle>(tformer::Bundle::open(arguments[1], true));
    auto engine = tformer::open_backend(bundle, options)->make_engine();
    const tformer::Limits& most = engine->limits();
    Ints limits;
    for (const std::int64_t size : {most.batch, most.src_tokens, most.tgt_tokens, most.beams}) {
      limits.push_back(static_cast<std::int32_t>(size));
    }
    const Ints abilities = {engine->attention(), engine->admits()}, version = packed(TFORMER_VERSION);
    server = std::make_unique<Server>(pipe, std::move(engine));
    pipe.reply(Status::ok, {words(limits), words(abilities), words(version)});
  });
  if (!open) return 1;
  for (Ints call; pipe.read(call);) {
    server->release(pipe.next());
    done(pipe, [&] { server->answer(static_cast<Call>(call.at(0)), call.at(1)); });
  }
  return 0;
}
