#include "native/reader.hpp"

#include <set>
#include <stdexcept>

#include "native/fields.hpp"
#include "spec.hpp"

namespace tformer::native {
namespace {

constexpr std::int64_t most_summed = 65536;  // products of 8 bits, of up to 255 * 128 each, that fit into a sum of 32

using kernels::lanes;
using kernels::padded;

class Reader {
 public:
  Reader(const Arrays& arrays, const Model& model, const Recipe& recipe, Graph graph)
      : arrays_(arrays), model_(model), recipe_(recipe), graph_(graph), encoder_(graph != Graph::step) {}

  Code read(const Json& graph) {
    for (const Json& width : list_of(graph, "widths")) code_.widths.push_back(whole(width, 1, spec::most_width, "a width"));
    code_.bytes.resize(code_.widths.size(), false);
    written_.resize(code_.widths.size(), false);
    std::size_t number = 0;
    for (const Json& each : list_of(graph, "code")) {
      try {
        code_.instructions.push_back(instruction(each));
      } catch (const std::invalid_argument& error) {
        throw std::invalid_argument("instruction " + std::to_string(number) + " of the " + name() + ": " + error.what());
      }
      ++number;
    }
    check_whole();
    return std::move(code_);
  }

 private:
  const Arrays arrays_;
  const Model& model_;
  const Recipe& recipe_;
  Graph graph_;
  bool encoder_;  // whether it reads sources
  Code code_;
  std::vector<bool> written_;
  std::set<std::int64_t> kept_, self_, cross_;
  bool ended_ = false;

  const char* name() const {
    return graph_ == Graph::encoder ? "encoder" : graph_ == Graph::memory ? "encoder alone" : "step";
  }

  View view(const Json& from, const char* key, bool bytes = false) const {
    const Json& value = member_of(from, key);
    if (!value.is_array() || value.size() != 3) throw std::invalid_argument(std::string(key) + " is no view");
    View found;
    found.value = static_cast<std::int32_t>(whole(value[0], 0, static_cast<std::int64_t>(written_.size()) - 1, key));
    const auto number = static_cast<std::size_t>(found.value);
    found.first = whole(value[1], 0, code_.widths[number], key);
    found.width = whole(value[2], 1, code_.widths[number] - found.first, key);
    if (!written_[number]) throw std::invalid_argument(std::string(key) + " reads what nothing has written");
    if (code_.bytes[number] != bytes) throw std::invalid_argument(std::string(key) + " reads another type");
    if (bytes && (found.first || found.width != code_.widths[number])) {
      throw std::invalid_argument(std::string(key) + " reads a part of 8 bits");
    }
    return found;
  }
  View view_if(const Json& from, const char* key, std::int64_t width) const {
    return from.contains(key) ? of_width(view(from, key), width, key) : View();
  }
  /// Of the whole value that a view is of.
  std::int64_t width_of(const View& view) const { return code_.widths[static_cast<std::size_t>(view.value)]; }
  static View of_width(const View& found, std::int64_t width, const char* key) {
    if (found.width != width) throw std::invalid_argument(std::string(key) + " is of another width");
    return found;
  }

  std::int32_t write(const Json& from, const char* key, std::int64_t width, bool bytes) {
    if (!from.contains(key)) return -1;
    const std::int64_t value = whole(from, key, 0, static_cast<std::int64_t>(written_.size()) - 1);
    const auto number = static_cast<std::size_t>(value);
    if (written_[number]) throw std::invalid_argument(std::string(key) + " is written twice");
    if (code_.widths[number] != width) throw std::invalid_argument(std::string(key) + " is of another width");
    written_[number] = true;
    code_.bytes[number] = bytes;
    return static_cast<std::int32_t>(value);
  }

  void write(const Json& from, Instruction& made, std::int64_t width) {
    made.width = width;
    made.out = write(from, "out", width, false);
    made.rounded = write(from, "rounded", width, true);
    if (made.out < 0 && made.rounded < 0) throw std::invalid_argument("it writes nothing");
    if (made.rounded < 0) return;
    const Json& how = member_of(from, "rounding");
    made.rounding = {positive(how, "step"), static_cast<std::int32_t>(whole(how, "zero", 0, 255)),
                     arrays_.floats_if(how, "shrink", {width})};
    if (how.contains("most")) made.rounding.most = static_cast<std::int32_t>(whole(how, "most", 0, 255));
  }

  kernels::Matrix matrix(const Json& from) const {
    using kernels::Numbers;
    const Json& about = member_of(from, "matrix");
    kernels::Matrix found;
    found.numbers = one_of<Numbers>(about, "kind", {{"fp32", Numbers::fp32}, {"bf16", Numbers::bf16},
                                                    {"int8", Numbers::int8}, {"int4", Numbers::int4}});
    found.outputs = whole(about, "outputs", 1, std::int64_t{1} << 24);
    found.inputs = whole(about, "inputs", 1, most_summed);
    const std::int64_t panels = kernels::panels_of(found), inputs = found.inputs, all = panels * lanes;
    switch (found.numbers) {
      case Numbers::fp32: found.weights = arrays_.floats(about, "data", {panels, inputs, lanes}); break;
      case Numbers::bf16:
        found.weights = arrays_.array<std::uint16_t>(about, "data", "uint16", {panels, padded(inputs, 2) / 2, lanes, 2});
        break;
      case Numbers::int8:
        found.weights = arrays_.array<std::int8_t>(about, "data", "int8", {panels, padded(inputs, 64) / 4, lanes, 4});
        found.scales = arrays_.floats(about, "scales", {all});
        found.sums = arrays_.array<std::int32_t>(about, "sums", "int32", {all});
        break;
      case Numbers::int4: {
        found.group = whole(about, "group", 16, 256);
        if (found.group & (found.group - 1)) throw std::invalid_argument("group is no power of 2");
        const std::int64_t groups = padded(inputs, found.group) / found.group;
        found.weights = arrays_.array<std::uint8_t>(about, "data", "uint8", {panels, groups * found.group / 8, lanes, 4});
        found.scales = arrays_.floats(about, "scales", {panels, groups, lanes});
        break;
      }
    }
    found.bias = arrays_.floats_if(from, "bias", {all});
    return found;
  }

  static kernels::Activation activation(const Json& from) {
    using kernels::Activation;
    return one_of<Activation>(from, "activation",
                              {{"relu", Activation::relu}, {"gelu", Activation::gelu},
                               {"gelu_tanh", Activation::gelu_tanh}, {"gelu_sigmoid", Activation::gelu_sigmoid},
                               {"silu", Activation::silu}});
  }

  Instruction instruction(const Json& from) {
    if (ended_) throw std::invalid_argument("it stands behind the end");
    Instruction made;
    made.op = one_of<Op>(from, "op",
                         {{"embed", Op::embed}, {"norm", Op::norm}, {"round", Op::round}, {"matmul", Op::matmul},
                          {"activate", Op::activate}, {"add", Op::add}, {"multiply", Op::multiply},
                          {"self", Op::self}, {"recur", Op::recur}, {"cross", Op::cross}, {"keep", Op::keep}, {"output", Op::output},
                          {"give", Op::give}});
    switch (made.op) {
      case Op::embed: embed(from, made); break;
      case Op::norm: norm(from, made); break;
      case Op::matmul:
      case Op::output: product(from, made); break;
      case Op::self:
      case Op::cross: attention(from, made); break;
      case Op::recur: recur(from, made); break;
      case Op::keep: keep(from, made); break;
      case Op::give:
        made.x = view(from, "x");
        if (graph_ != Graph::memory) throw std::invalid_argument("only the encoder alone gives numbers");
        ended_ = true;
        break;
      case Op::activate: made.activation = activation(from); [[fallthrough]];
      case Op::round:
        made.x = view(from, "x");
        write(from, made, made.x.width);
        break;
      case Op::add:
      case Op::multiply:
        made.x = view(from, "x");
        made.y = of_width(view(from, "y"), made.x.width, "y");
        write(from, made, made.x.width);
        break;
    }
    return made;
  }

  void embed(const Json& from, Instruction& made) {
    if (member_of(from, "ids") != (encoder_ ? "src_ids" : "tokens")) throw std::invalid_argument("it has no such ids");
    const std::int64_t rows = encoder_ ? model_.src_vocab : model_.tgt_vocab;
    const Arrays::Array table = arrays_.array(from, "table");
    if (table.shape.size() != 2 || table.shape[0] < rows) throw std::invalid_argument("its table is of another shape");
    if (table.dtype == "int8") made.scales = arrays_.floats(from, "scales", {table.shape[0], 1});
    else if (table.dtype != "float32") throw std::invalid_argument("its table is of another type");
    made.table = table.data;
    made.factor = real(from, "factor");
    const std::int64_t width = table.shape[1];
    if (from.contains("positions")) {
      const Arrays::Array places = arrays_.array(from, "positions");
      const std::int64_t most = encoder_ ? recipe_.limits.src_tokens : recipe_.limits.tgt_tokens;
      if (places.dtype != "float32" || places.shape.size() != 2 || places.shape[0] < most || places.shape[1] != width) {
        throw std::invalid_argument("its positions are too few or of another shape");
      }
      made.positions = reinterpret_cast<const float*>(places.data);
    }
    write(from, made, width);
    if (made.rounded >= 0) throw std::invalid_argument("rows of a table are not rounded");
  }

  void norm(const Json& from, Instruction& made) {
    made.x = view(from, "x");
    using kernels::Norm;
    made.norm = one_of<Norm>(from, "kind", {{"layer", Norm::layer}, {"rms", Norm::rms}, {"annotated", Norm::annotated}});
    made.heads = from.contains("heads") ? whole(from, "heads", 1, spec::most_heads) : 1;
    if (made.x.width % made.heads) throw std::invalid_argument("heads do not divide its width");
    made.gain = arrays_.floats(from, "gain", {made.x.width / made.heads});
    made.bias = arrays_.floats_if(from, "bias", {made.x.width / made.heads});
    made.eps = real(from, "eps");
    if (made.eps < 0) throw std::invalid_argument("eps is below 0");
    write(from, made, made.x.width);
  }

  void product(const Json& from, Instruction& made) {
    made.matrix = matrix(from);
    const bool integers = made.matrix.numbers == kernels::Numbers::int8;
    made.x = of_width(view(from, "x", integers), made.matrix.inputs, "x");
    if (integers) {
      made.step = positive(from, "step");
      made.zero = static_cast<std::int32_t>(whole(from, "zero", 0, 255));
    }
    const std::int64_t width = made.matrix.outputs;
    if (made.op == Op::output) {
      if (encoder_ || width != model_.tgt_vocab) throw std::invalid_argument("it has other outputs than tokens");
      ended_ = true;
      return;
    }
    if (from.contains("activation")) made.activation = activation(from);
    made.gate = view_if(from, "gate", width);
    made.residual = view_if(from, "residual", width);
    write(from, made, width);
  }

  void attention(const Json& from, Instruction& made) {
    made.heads = whole(from, "heads", 1, spec::most_heads);
    made.size = whole(from, "size", 1, kernels::largest_head);
    made.scale = real(from, "scale");
    const std::int64_t width = made.heads * made.size;
    made.q = of_width(view(from, "q"), width, "q");
    if (made.op == Op::self) {
      if (!encoder_ && model_.recurrent) throw std::invalid_argument("a step of cells has no self-attention");
      made.k = of_width(view(from, "k"), width, "k");
      made.v = of_width(view(from, "v"), width, "v");
    }
    if (!encoder_) {
      for (const View& each : {made.k, made.v}) {  // the step's kernel knows one distance between rows
        if (each && width_of(each) != width_of(made.q)) {
          throw std::invalid_argument("q, k and v are of values of different widths");
        }
      }
      made.layer = layer(from, made);
      if (!(made.op == Op::self ? self_ : cross_).insert(made.layer).second) {
        throw std::invalid_argument("its layer has come before");
      }
    } else if (made.op == Op::cross) {
      throw std::invalid_argument("an encoder attends to nothing else");
    }
    if (from.contains("bias")) {
      const Arrays::Array bias = arrays_.array(from, "bias");
      const std::int64_t positions = encoder_ ? recipe_.limits.src_tokens : recipe_.limits.tgt_tokens;
      const std::int64_t zero = whole(from, "zero", positions - 1, spec::most_width);
      const std::int64_t least = zero + (encoder_ ? positions : 1) + lanes;  // kernels read so much behind the last
      const bool fits = bias.dtype == "float32" && bias.shape.size() == 2 && bias.shape[0] == made.heads &&
                        bias.shape[1] >= least;
      if (!fits || made.op == Op::cross) throw std::invalid_argument("its bias is of another shape");
      made.bias = reinterpret_cast<const float*>(bias.data) + zero;
      made.bias_stride = bias.shape[1];
    }
    write(from, made, width);
  }

  /// The layer of caches that an instruction uses, which must be of the model's sizes.
  std::int64_t layer(const Json& from, const Instruction& made) const {
    if (made.heads != model_.heads || made.size != model_.head_dim) {
      throw std::invalid_argument("it has other heads than the model");
    }
    return whole(from, "layer", 0, model_.decoder_layers - 1);
  }

  /// A cell: x is its value, y its forget gate before the sigmoid.
  void recur(const Json& from, Instruction& made) {
    if (graph_ != Graph::step || !model_.recurrent) throw std::invalid_argument("only a step of such a model has cells");
    made.layer = whole(from, "layer", 0, model_.decoder_layers - 1);
    made.x = of_width(view(from, "x"), model_.d_model, "x");
    made.y = of_width(view(from, "y"), model_.d_model, "y");
    if (!self_.insert(made.layer).second) throw std::invalid_argument("its layer has come before");
    write(from, made, model_.d_model);
    if (made.out < 0 || made.rounded >= 0) throw std::invalid_argument("what a cell gives is not rounded");
  }

  void keep(const Json& from, Instruction& made) {
    if (graph_ != Graph::encoder) throw std::invalid_argument(std::string("the ") + name() + " keeps nothing");
    made.heads = whole(from, "heads", 1, spec::most_heads);
    made.size = whole(from, "size", 1, kernels::largest_head);
    made.layer = layer(from, made);
    made.k = of_width(view(from, "k"), made.heads * made.size, "k");
    made.v = of_width(view(from, "v"), made.heads * made.size, "v");
    if (!kept_.insert(made.layer).second) throw std::invalid_argument("its layer has come before");
  }

  /// A graph must give all that the engine reads.
  void check_whole() const {
    const auto layers = static_cast<std::size_t>(model_.decoder_layers);
    const bool whole = graph_ == Graph::encoder  ? kept_.size() == layers
                       : graph_ == Graph::memory ? ended_
                                                 : ended_ && self_.size() == layers && cross_.size() == layers;
    if (!whole) throw std::invalid_argument(std::string("the ") + name() + " lacks layers or its end");
  }
};

}  // namespace

Code read_code(const Json& program, const Json& graph, Graph kind, const Content& weights, const Model& model,
               const Recipe& recipe) {
  return Reader(Arrays(program, weights), model, recipe, kind).read(graph);
}

}  // namespace tformer::native
