// The functions that graphs may call. They call the kernels as kernels/*/__init__.py do. Arguments come from a file
// that is not trusted: every function makes the checks that its kernel does not make.
#include <algorithm>
#include <cstring>
#include <optional>

#include "../../../kernels/linear/block_weight.h"
#include "../../../kernels/linear/compressed.h"
#include "../../../kernels/linear/products.h"
#include "graph.h"
#include "kernels.h"

namespace {

void *const NONE = nullptr;

void require_fit(bool holds) { require(holds, "its arguments do not have the expected shapes and types"); }

bool is_of(const Tensor &x, Type type, const Sizes &shape) { return x.type == type && x.shape == shape; }

bool is_integers(const Tensor &x, int64_t rank) { return x.type == Type::int64 && x.rank() == rank; }

// Returns the tensor, after a check of its type and shape. A missing tensor has no address.
Tensor checked_tensor(const Tensor *x, Type type, const Sizes &shape) {
  require_fit(!x || is_of(*x, type, shape));
  return x ? *x : Tensor();
}

Tensor like(const Tensor &x) { return empty(x.type, x.shape); }

// Returns the number of an axis, which may be negative to count from the end.
int64_t axis_of(const Tensor &x, int64_t axis) {
  if (axis < 0) axis += x.rank();
  require(axis >= 0 && axis < x.rank(), "an axis does not exist");
  return axis;
}

// Returns a copy of a part of an axis.
Tensor narrow(const Tensor &x, int64_t axis, int64_t start, int64_t length) {
  const int64_t size = x.shape[axis];
  require(start >= 0 && length > 0 && start <= size && length <= size - start, "a part ends after the end of its tensor");
  Sizes shape = x.shape;
  shape[axis] = length;
  const Tensor out = empty(x.type, shape);
  const int64_t inner = count_of({shape.begin() + axis + 1, shape.end()}) * bytes_of(x.type), outer = count_of({shape.begin(), shape.begin() + axis});
  for (int64_t i = 0; i < outer; ++i) std::memcpy(out.data + i * length * inner, x.data + (i * size + start) * inner, length * inner);
  return out;
}

// Returns rows of a table by their indices.
Tensor rows_of(const Tensor &table, const Tensor &numbers) {
  require_fit(table.rank() > 0 && is_integers(numbers, 1) && numbers.count() > 0);
  Sizes shape = table.shape;
  shape[0] = numbers.shape[0];
  const Tensor out = empty(table.type, shape);
  const int64_t bytes = count_of({shape.begin() + 1, shape.end()}) * bytes_of(table.type);
  for (int64_t i = 0; i < shape[0]; ++i) {
    const int64_t row = numbers.as<int64_t>()[i];
    require(row >= 0 && row < table.shape[0], "row " + std::to_string(row) + " of a table of " + std::to_string(table.shape[0]));
    std::memcpy(out.data + i * bytes, table.data + row * bytes, bytes);
  }
  return out;
}

// ---- aten

void embedding(Step &step) { step.set_result(0, rows_of(step.tensor("weight"), step.tensor("indices"))); }
void index(Step &step) {
  require_fit(step["indices"].list().size() == 1);
  step.set_result(0, rows_of(step.tensor("self"), step.tensor(step["indices"].list()[0])));
}

void unflatten(Step &step) {
  Tensor x = step.tensor("self");
  const int64_t axis = axis_of(x, step["dim"].integer()), size = x.shape[axis];
  Sizes sizes = integers(step["sizes"]);
  if (const auto unknown_size = std::find(sizes.begin(), sizes.end(), -1); unknown_size != sizes.end()) {
    *unknown_size = 1;
    *unknown_size = size / std::max<int64_t>(count_of(sizes), 1);
  }
  require_fit(count_of(sizes) == size);
  x.shape.erase(x.shape.begin() + axis);
  x.shape.insert(x.shape.begin() + axis, sizes.begin(), sizes.end());
  step.set_result(0, x);
}

void flatten(Step &step) {
  Tensor x = step.tensor("self");
  const int64_t first = axis_of(x, step.integer("start_dim", 0)), last = axis_of(x, step.integer("end_dim", -1));
  require_fit(first <= last);
  const int64_t size = count_of({x.shape.begin() + first, x.shape.begin() + last + 1});
  x.shape.erase(x.shape.begin() + first, x.shape.begin() + last);
  x.shape[first] = size;
  step.set_result(0, x);
}

// Returns the axis `dim` of `self` in consecutive parts that cover it. lengths(size) returns their lengths.
template <class Lengths> void set_parts(Step &step, const Lengths &lengths, bool has_axis = true) {
  const Tensor &x = step.tensor("self");
  const int64_t axis = axis_of(x, step.integer("dim", 0));
  int64_t start = 0;
  for (size_t i = 0; const int64_t length : Sizes(lengths(x.shape[axis]))) {
    Tensor part = narrow(x, axis, start, length);
    if (!has_axis) part.shape.erase(part.shape.begin() + axis);
    step.set_result(i++, part), start += length;
  }
  require_fit(start == x.shape[axis]);
}
void unbind(Step &step) { set_parts(step, [&](int64_t) { return Sizes(step.call.outputs.size(), 1); }, false); }
void split_with_sizes(Step &step) { set_parts(step, [&](int64_t) { return integers(step["split_sizes"]); }); }
void chunk(Step &step) {
  const int64_t count = step.call.outputs.size();
  require_fit(count > 0 && step["chunks"].integer() == count);
  set_parts(step, [&](int64_t size) { return Sizes(count, size / count); });
}
void narrow_part(Step &step) {
  const Tensor &x = step.tensor("self");
  step.set_result(0, narrow(x, axis_of(x, step["dim"].integer()), step["start"].integer(), step["length"].integer()));
}

std::vector<float> to_floats(const Tensor &x) {
  std::vector<float> numbers(x.count());
  read_floats(x.data, dtype_of(x.type), 0, x.count(), numbers.data());
  return numbers;
}

// Returns a tensor like x with the results of compute(number of x, index), rounded to its type.
template <class Compute> void set_each(Step &step, const Tensor &x, const Compute &compute) {
  std::vector<float> numbers = to_floats(x);
  for (size_t i = 0; i < numbers.size(); ++i) numbers[i] = compute(numbers[i], i);
  const Tensor out = like(x);
  write_floats(out.data, dtype_of(x.type), 0, x.count(), numbers.data());
  step.set_result(0, out);
}

void relu(Step &step) {
  set_each(step, step.tensor("self"), [](float number, size_t) { return number < 0 ? 0 : number; });  // NaN stays NaN
}

// Combines the numbers of `self` with a number, or with the numbers of a tensor of the same shape.
template <class Combine> void set_combined(Step &step, const Combine &combine) {
  const Tensor &x = step.tensor("self");
  if (!step["other"].is_tensor())
    return set_each(step, x, [&, number = step.number("other", 0)](float left, size_t) { return combine(left, number); });
  const std::vector<float> others = to_floats(checked_tensor(&step.tensor("other"), x.type, x.shape));
  set_each(step, x, [&](float left, size_t i) { return combine(left, others[i]); });
}

void add(Step &step) {
  const Tensor &x = step.tensor("self");
  if (x.type == Type::int64) {  // positions with an offset
    const Tensor out = like(x);
    const uint64_t addend = step["other"].integer();
    for (int64_t i = 0; i < x.count(); ++i) out.as<uint64_t>()[i] = x.as<uint64_t>()[i] + addend;
    return step.set_result(0, out);
  }
  set_combined(step, [](float left, float right) { return left + right; });
}
void mul(Step &step) {
  set_combined(step, [](float left, float right) { return left * right; });
}
void div(Step &step) {
  set_combined(step, [](float left, float right) { return left / right; });
}

// ---- norms, activations and rotary embedding

void normalise(Step &step, const Tensor *addend) {
  const Tensor &x = step.tensor("x"), residual = checked_tensor(addend, x.type, x.shape);
  require_fit(x.count() > 0 && x.rank() > 0);
  const Tensor weight = checked_tensor(&step.tensor("weight"), x.type, {x.last()});
  const Tensor out = like(x), total = addend ? like(x) : Tensor();
  const bool has_offset = step.find("weight_offset");
  call_kernel("rms_norm", x.data, residual.data, weight.data, out.data, total.data, NONE, NONE, false, int64_t{0}, NONE, int64_t{0},
              dtype_of(x.type), x.count() / x.last(), x.last(), step.number("eps", 0), has_offset, step.number("weight_offset", 0));
  step.set_result(0, out);
  if (addend) step.set_result(1, total);
}

void rms_norm(Step &step) { normalise(step, nullptr); }
void add_rms_norm(Step &step) { normalise(step, &step.tensor("residual")); }

void layer_norm(Step &step) {
  const Tensor &x = step.tensor("x"), out = like(x);
  require_fit(x.count() > 0 && x.rank() > 0);
  const Tensor weight = checked_tensor(step.optional("weight"), x.type, {x.last()}), bias = checked_tensor(step.optional("bias"), x.type, {x.last()});
  call_kernel("layer_norm", x.data, weight.data, bias.data, out.data, NONE, NONE, false, int64_t{0}, NONE, int64_t{0}, dtype_of(x.type),
              x.count() / x.last(), x.last(), step.number("eps", 0));
  step.set_result(0, out);
}

void gelu_tanh(Step &step) {
  const Tensor &x = step.tensor("x"), up = checked_tensor(step.optional("up"), x.type, x.shape), out = like(x);
  require_fit(x.rank() == 2 && x.count() > 0);
  call_kernel("gelu", x.data, x.shape[1], up.data, x.shape[1], out.data, dtype_of(x.type), x.shape[0], x.shape[1], true);
  step.set_result(0, out);
}

void swiglu(Step &step) {
  const Tensor &gate = step.tensor("gate"), up = checked_tensor(&step.tensor("up"), gate.type, gate.shape), out = like(gate);
  require_fit(gate.rank() == 2 && gate.count() > 0);
  call_kernel("swiglu", gate.data, up.data, out.data, dtype_of(gate.type), gate.shape[0], gate.shape[1], gate.shape[1], gate.shape[1]);
  step.set_result(0, out);
}

void gated_rms_norm(Step &step) {
  const Tensor &x = step.tensor("x"), gate = checked_tensor(&step.tensor("gate"), x.type, x.shape), out = like(x);
  const int64_t group_size = step["group_size"].integer();
  const bool gates_output = step.find("gates_output") && step["gates_output"].flag();
  require_fit(x.rank() == 2 && x.count() > 0 && group_size > 0 && x.last() % group_size == 0);
  const Tensor weight = checked_tensor(&step.tensor("weight"), x.type, {x.last()});
  call_kernel("gated_rms_norm", x.data, gate.data, weight.data, out.data, dtype_of(x.type), x.shape[0], x.last(), x.last(), x.last(), group_size,
              step.number("eps", 0), gates_output);
  step.set_result(0, out);
}

void take_channels(Step &step) {
  const Tensor &x = step.tensor("x"), &order = step.tensor("order");
  require_fit(x.rank() == 2 && x.count() > 0 && is_integers(order, 1) && order.count() > 0);
  const Tensor out = empty(x.type, {x.shape[0], order.shape[0]});
  for (int64_t i = 0; i < order.shape[0]; ++i) {
    const int64_t channel = order.as<int64_t>()[i];
    require(channel >= 0 && channel < x.shape[1], "channel " + std::to_string(channel) + " of a tensor with " + std::to_string(x.shape[1]));
  }
  call_kernel("take_channels", x.data, x.shape[1], order.data, out.data, bytes_of(x.type), x.shape[0], order.shape[0]);
  step.set_result(0, out);
}

void rope_angles(Step &step) {
  const Tensor positions = step.tensor("positions"), frequencies = step.tensor("frequencies");
  require_fit(is_integers(positions, 1) && frequencies.type == Type::float32 && frequencies.rank() == 1 && positions.count() * frequencies.count() > 0);
  const Type type = step.type("dtype");
  const int64_t num_tokens = positions.shape[0], half = frequencies.shape[0];
  const Tensor cos = empty(type, {num_tokens, half}), sin = empty(type, {num_tokens, half});
  call_kernel("rope_angles", positions.data, frequencies.data, step.number("factor", 1), cos.data, sin.data, dtype_of(type), num_tokens, half);
  step.set_result(0, cos), step.set_result(1, sin);
}

// ---- the cache

int64_t size_of(const PagedVectors &cache_vectors) { return cache_vectors.num_heads * cache_vectors.channels; }

// The new tokens of a step for the cache of a layer.
struct NewTokens {
  PagedVectors keys, values;
  Tensor slots, key, value;
  int64_t count;

  explicit NewTokens(Step &step)
      : keys(step.cache_vectors("key_cache")), values(step.cache_vectors("value_cache")), slots(step.field("slots", SLOTS)), key(step.tensor("key")),
        value(step.tensor("value")), count(slots.shape[0]) {
    for (const auto &[x, cache_vectors] : {std::pair{key, keys}, {value, values}})
      require_fit(dtype_of(x.type) == cache_vectors.dtype && x.shape == Sizes{count, cache_vectors.num_heads, cache_vectors.channels});
  }
};

void kv_store(Step &step) {
  const auto [keys, values, slots, key, value, count] = NewTokens(step);
  call_kernel("kv_store", key.data, value.data, size_of(keys), size_of(values), &keys, &values, slots.data, count);
}

void rope_and_store(Step &step) {
  const auto [keys, values, slots, key, value, count] = NewTokens(step);
  const Tensor &query = step.tensor("query");
  require_fit(query.rank() == 3 && query.type == key.type && query.shape[0] == count && query.shape[2] == keys.channels);
  const Tensor &cos = step.tensor("cos"), sin = checked_tensor(&step.tensor("sin"), key.type, cos.shape);
  require_fit(cos.type == key.type && cos.rank() == 2 && cos.shape[0] == count && cos.shape[1] * 2 <= keys.channels);
  const Tensor query_norm = checked_tensor(step.optional("query_norm"), key.type, {keys.channels});
  const Tensor key_norm = checked_tensor(step.optional("key_norm"), key.type, {keys.channels}), out = like(query);
  const bool is_interleaved = step.find("interleaved") && step["interleaved"].flag();
  call_kernel("rope_and_store", query.data, key.data, value.data, query.shape[1] * query.shape[2], size_of(keys), size_of(values), query.shape[1],
              cos.data, sin.data, cos.shape[1], is_interleaved, query_norm.data, key_norm.data, step.number("eps", 0), out.data,
              &keys, &values, slots.data, count);
  step.set_result(0, out);
}

void paged_attention(Step &step) {
  const PagedVectors keys = step.cache_vectors("key_cache"), values = step.cache_vectors("value_cache");
  const Tensor &tables = step.field("block_tables", BLOCK_TABLES), &lengths = step.field("context_lengths", CONTEXT_LENGTHS);
  const Tensor &starts = step.field("query_starts", step["query_starts"].tensor() == OUTPUT_STARTS ? OUTPUT_STARTS : QUERY_STARTS);
  const Tensor query = step.tensor("query");
  require_fit(query.rank() == 3 && dtype_of(query.type) == keys.dtype && query.shape[2] == keys.channels && query.shape[1] > 0);
  require_fit(keys.dtype == values.dtype && keys.num_heads == values.num_heads && query.shape[1] % keys.num_heads == 0);
  const int64_t num_heads = query.shape[1], window = step.integer("window", 0), chunk = step.integer("chunk", 0);
  require_fit(query.shape[0] == starts.as<int64_t>()[lengths.shape[0]] && window >= 0 && chunk >= 0);
  const Tensor slopes = checked_tensor(step.optional("alibi_slopes"), Type::float32, {num_heads});
  const Tensor sinks = checked_tensor(step.optional("sinks"), Type::float32, {num_heads});
  const Tensor out = empty(query.type, {query.shape[0], num_heads, values.channels});
  call_kernel("paged_attention", query.data, &keys, &values, tables.data, tables.shape[1], starts.data, lengths.data, lengths.shape[0], num_heads,
              step.number("scale", 1), step.number("soft_cap", 0), window, chunk, slopes.data, NONE, sinks.data, out.data);
  step.set_result(0, out);
}

// The state and the new tokens of the only sequence. The slots that it reads and writes are -1 or 0; a state has slot 0.
struct Sequence {
  Tensor states, starts, reads, writes, ends;
  int64_t num_tokens;

  explicit Sequence(Step &step)
      : states(step.state("states")), starts(step.field("query_starts", QUERY_STARTS)), reads(step.field("reads", STATE_READS)),
        writes(step.field("writes", STATE_WRITES)), ends(step.field("ends", STATE_ENDS)), num_tokens(starts.as<int64_t>()[1]) {}
};

void short_conv(Step &step) {
  const auto [states, starts, reads, writes, ends, num_tokens] = Sequence(step);
  const Tensor projected = step.tensor("projected"), weight = step.tensor("weight");
  require_fit(weight.rank() == 2 && projected.rank() == 2 && weight.shape[0] > 1 && weight.shape[1] > 0 && weight.type == states.type);
  const int64_t num_taps = weight.shape[0], channels = weight.shape[1];
  require_fit(is_of(projected, weight.type, {num_tokens, (projected.last() == 3 * channels ? 3 : 1) * channels}) && states.shape == Sizes{1, num_taps - 1, channels});
  const Tensor bias = checked_tensor(step.optional("bias"), weight.type, {channels}), out = empty(weight.type, {num_tokens, channels});
  call_kernel("short_conv", projected.data, weight.data, bias.data, states.data, starts.data, reads.data, writes.data, ends.data, out.data,
              dtype_of(weight.type), projected.last() == 3 * channels, int64_t{1}, num_taps, channels);
  step.set_result(0, out);
}

// The shapes bound head_channels and num_heads before they are multiplied.
void ssd(Step &step) {
  const auto [states, starts, reads, writes, ends, num_tokens] = Sequence(step);
  constexpr int64_t COLUMNS = 32, MAX_ROWS = 256;  // of a panel (kernels/state_panels)
  const int64_t head_channels = step["head_channels"].integer(), group = step["group"].integer();
  require_fit(states.type == Type::float32 && states.rank() == 5 && head_channels > 0 && group > 0);
  const int64_t num_heads = states.shape[1], num_panels = states.shape[2], rows = states.shape[3];
  require_fit(num_heads > 0 && num_panels == (head_channels - 1) / COLUMNS + 1 && rows > 0 && rows <= MAX_ROWS && states.last() == COLUMNS);
  const Tensor xbc = step.tensor("xbc"), dt = checked_tensor(&step.tensor("dt"), xbc.type, {num_tokens, num_heads});
  const int64_t size = num_heads * head_channels, num_groups = xbc.rank() == 2 ? (xbc.last() - size) / (2 * rows) : 0;
  require_fit(num_groups > 0 && (num_heads - 1) / group < num_groups && is_of(xbc, xbc.type, {num_tokens, size + 2 * num_groups * rows}));
  Tensor of_heads[3], out = empty(xbc.type, {num_tokens, size});
  for (size_t i = 0; const char *name : {"dt_bias", "decay_log", "skip"}) of_heads[i++] = checked_tensor(&step.tensor(name), Type::float32, {num_heads});
  call_kernel("ssd", xbc.data, dt.data, of_heads[0].data, of_heads[1].data, of_heads[2].data, states.data, starts.data, reads.data, writes.data,
              ends.data, out.data, dtype_of(xbc.type), int64_t{1}, num_heads, num_groups, rows, head_channels, group, step.number("min_step", 0),
              step.number("max_step", 0));
  step.set_result(0, out);
}

// ---- products

struct Packed {
  const uint8_t *memory = nullptr;
  bool is_compressed = false;
  int64_t num_outputs = 0, num_inputs = 0;
  Format format = {};
};

void check_compressed(const uint8_t *memory, int64_t bytes, const Compressed &layout) {
  const int64_t count = (bytes - layout.exception(0)) / static_cast<int64_t>(sizeof(Exception));
  require_fit(count >= layout.num_tiles && bytes == layout.exception(count));
  std::vector<uint32_t> starts(layout.num_tiles);
  std::memcpy(starts.data(), memory + layout.start(0), starts.size() * sizeof(uint32_t));
  Exception last;
  std::memcpy(&last, memory + layout.exception(count - 1), sizeof last);
  require(*std::max_element(starts.begin(), starts.end()) < count && last.index == std::numeric_limits<uint32_t>::max(),
          "the exceptions of compressed weights have no end");
}

// Checks the properties and the bytes of a weight in ggml's blocks.
void require_blocks(const Format &format, int64_t num_tiles, int64_t num_inputs, int64_t bytes) {
  with_kind(format.codes, [&](auto kind) {
    using Kind = decltype(kind);
    require_fit(format.group_size == Kind::group && format.has_zeros == Kind::has_minimums && num_inputs % Kind::block == 0);
    require_fit(bytes == num_tiles * (num_inputs / Kind::block) * Kind::block_bytes + Kind::has_global_scale * int64_t{sizeof(double)});
  });
}

// Returns a weight [N, K], in the layout of float_weight.py for floats of `type`, of int_weight.py or of
// block_weight.py. Raises Refused if a kernel would read out of bounds. Its properties are the arguments
// PREFIX_num_outputs and so on; `number` is the index of the weight if they are lists.
Packed packed(Step &step, Type type, const std::string &prefix, std::optional<size_t> number = std::nullopt) {
  const auto argument = [&](const char *name) -> const Json & {
    const Json &value = step[prefix + name];
    if (number) require_fit(*number < value.list().size());
    return number ? value.list()[*number] : value;
  };
  const Tensor &weight = step.weight(argument("_memory"));
  const int64_t num_outputs = argument("_num_outputs").integer(), num_inputs = argument("_num_inputs").integer();
  const Format format{argument("_group_size").integer(), static_cast<Codes>(argument("_codes").integer()), argument("_has_zero_points").flag()};
  const Packed packed{weight.data, format.codes == Codes::none && weight.type == Type::uint8, num_outputs, num_inputs, format};
  if (step.call.is_checked) return packed;
  constexpr int64_t MOST = 1 << 24;
  require_fit(num_outputs > 0 && num_outputs < MOST && num_inputs > 0 && num_inputs < MOST);
  const int64_t per_step = type == Type::bfloat16 ? 2 : 1, group = format.group_size, bytes = weight.count();
  const Compressed layout{divide_up(num_outputs, LANES), divide_up(num_inputs, per_step)};
  if (format.codes == Codes::none && !packed.is_compressed) return require_fit(is_of(weight, type, {layout.num_tiles, layout.num_steps, LANES, per_step})), packed;
  require_fit(weight.type == Type::uint8);
  if (packed.is_compressed) return require_fit(type == Type::bfloat16), check_compressed(weight.data, bytes, layout), packed;
  require_fit(group > 0 && group <= num_inputs);
  if (format.codes >= Codes::q4_1 && format.codes <= Codes::nvfp4) return require_blocks(format, layout.num_tiles, num_inputs, bytes), packed;
  const int64_t numbers = layout.num_tiles * LANES * divide_up(num_inputs, group), bits = format.codes == Codes::int8 ? 8 : 4;
  require_fit((format.codes == Codes::int8 || format.codes == Codes::int4) && num_inputs < 1 << 17);
  require_fit(group == num_inputs || group == 128 || group == 64 || group == 32);
  require_fit(bytes == layout.num_tiles * LANES * divide_up(num_inputs, 8) * bits + (format.has_zeros ? 5 : 4) * numbers);
  return packed;
}

// Returns a weight for rows x [M, K].
Packed packed_for(Step &step, const Tensor &x, const std::string &prefix, std::optional<size_t> number = std::nullopt) {
  const Packed weight = packed(step, x.type, prefix, number);
  require_fit(weight.num_inputs == x.shape[1]);
  return weight;
}

bool are_alike(const Format &a, const Format &b) { return a.group_size == b.group_size && a.codes == b.codes && a.has_zeros == b.has_zeros; }

// Returns the rows of a product, which are to_floats. The codes of a8w8 are not supported.
Tensor rows_to_multiply(Step &step) {
  require(!step.find("x_scales") && !step.find("x_group_size"),
          "the runner does not support 8-bit activations: export weights in ggml's blocks with quant.block_activations=none");
  const Tensor x = step.tensor("x_codes");
  require_fit(x.rank() == 2 && x.count() > 0 && step.type("x_dtype") == x.type);
  return x;
}

void matmul_together(Step &step) {
  const Tensor x = rows_to_multiply(step);
  const size_t count = step["weights_memory"].list().size();
  const auto &biases = step["biases"].list();
  Packed weights[3];
  Tensor bias[3], out[3];
  require_fit(count > 0 && count <= 3 && biases.size() == count);
  for (size_t i = 0; i < count; ++i) {
    weights[i] = packed_for(step, x, "weights", i);
    require_fit(are_alike(weights[0].format, weights[i].format));
    bias[i] = checked_tensor(biases[i].is_null() ? nullptr : &step.tensor(biases[i]), x.type, {weights[i].num_outputs});
    out[i] = empty(x.type, {x.shape[0], weights[i].num_outputs});
  }
  const auto &[a, b, c] = weights;
  call_kernel("matmul", x.data, NONE, int64_t{0}, dtype_of(x.type), x.shape[0], x.shape[1], a.format.group_size, a.format.codes, a.format.has_zeros,
              a.memory, a.is_compressed, bias[0].data, out[0].data, a.num_outputs, b.memory, b.is_compressed, bias[1].data, out[1].data, b.num_outputs,
              c.memory, c.is_compressed, bias[2].data, out[2].data, c.num_outputs);
  for (size_t i = 0; i < count; ++i) step.set_result(i, out[i]);
}

void matmul_swiglu(Step &step) {
  const Tensor x = rows_to_multiply(step);
  const Packed gate = packed_for(step, x, "gate"), up = packed_for(step, x, "up");
  require_fit(are_alike(gate.format, up.format) && gate.num_outputs == up.num_outputs);
  const Tensor gate_bias = checked_tensor(step.optional("gate_bias"), x.type, {gate.num_outputs});
  const Tensor up_bias = checked_tensor(step.optional("up_bias"), x.type, {up.num_outputs}), out = empty(x.type, {x.shape[0], gate.num_outputs});
  call_kernel("matmul_swiglu", x.data, NONE, int64_t{0}, dtype_of(x.type), x.shape[0], x.shape[1], gate.format.group_size, gate.format.codes,
              gate.format.has_zeros, gate.memory, gate.is_compressed, gate_bias.data, up.memory, up.is_compressed, up_bias.data, out.data, gate.num_outputs);
  step.set_result(0, out);
}

void linear(Step &step) {
  const Tensor x = step.tensor("x"), weight = step.tensor("weight");
  require_fit(x.rank() == 2 && x.count() > 0 && weight.rank() == 2 && weight.type == x.type && weight.shape[1] == x.shape[1] && weight.count() > 0);
  const int64_t num_outputs = weight.shape[0];
  const Tensor bias = checked_tensor(step.optional("bias"), x.type, {num_outputs}), out = empty(x.type, {x.shape[0], num_outputs});
  call_kernel("linear", x.data, dtype_of(x.type), int64_t{1}, x.shape[0], x.shape[1], weight.data, weight.count(), weight.shape[1], int64_t{1},
              bias.data, out.data, num_outputs);
  step.set_result(0, out);
}

void take_rows(Step &step) {
  const Type type = step.type("dtype");
  const Packed weight = packed(step, type, "weight");
  const Tensor numbers = checked_tensor(&step.tensor("numbers"), Type::int64, {step.tensor("numbers").count()});
  const Tensor out = empty(type, {numbers.count(), weight.num_inputs});
  call_kernel("take_rows", weight.memory, weight.is_compressed, weight.format.group_size, weight.format.codes, weight.format.has_zeros,
              weight.num_outputs, weight.num_inputs, numbers.data, numbers.count(), dtype_of(type), out.data);
  step.set_result(0, out);
}

}  // namespace

Operator find_operator(const std::string &target) {
  static const std::map<std::string, Operator> OPERATORS = {
      {"aten.embedding.default", embedding}, {"aten.index.Tensor", index}, {"aten.unflatten.int", unflatten}, {"aten.flatten.using_ints", flatten},
      {"aten.unbind.int", unbind}, {"aten.split_with_sizes.default", split_with_sizes}, {"aten.chunk.default", chunk},
      {"aten.narrow.default", narrow_part}, {"aten.add.Tensor", add}, {"aten.mul.Tensor", mul}, {"aten.div.Tensor", div}, {"aten.relu.default", relu}, {"quintet.rms_norm.default", rms_norm},
      {"quintet.add_rms_norm.default", add_rms_norm}, {"quintet.layer_norm.default", layer_norm}, {"quintet.gelu_tanh.default", gelu_tanh},
      {"quintet.swiglu.default", swiglu}, {"quintet.take_channels.default", take_channels}, {"quintet.rope_angles.default", rope_angles}, {"quintet.kv_store.default", kv_store},
      {"quintet.rope_and_store.default", rope_and_store}, {"quintet.paged_attention.default", paged_attention}, {"quintet.short_conv.default", short_conv}, {"quintet.ssd.default", ssd}, {"quintet.gated_rms_norm.default", gated_rms_norm},
      {"quintet.matmul_together.default", matmul_together}, {"quintet.matmul_swiglu.default", matmul_swiglu}, {"quintet.linear.default", linear},
      {"quintet.take_rows.default", take_rows}};
  constexpr std::string_view LIBRARIES = "torch.ops.";
  const auto entry = target.starts_with(LIBRARIES) ? OPERATORS.find(target.substr(LIBRARIES.size())) : OPERATORS.end();
  return entry == OPERATORS.end() ? nullptr : entry->second;
}
