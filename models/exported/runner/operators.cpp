// The functions that graphs may call, except products. They call the kernels as kernels/*/__init__.py do. Arguments come
// from a file that is not trusted: every function makes the checks that its kernel does not make.
#include <algorithm>
#include <cstring>
#include <numeric>

#include "operators.h"

namespace {

// Returns the number of an axis, which may be negative to count from the end.
int64_t axis_of(const Tensor &x, int64_t axis) {
  if (axis < 0) axis += x.rank();
  require(axis >= 0 && axis < x.rank(), "an axis does not exist");
  return axis;
}

// Returns a copy of a part of an axis, or the tensor if the part is the whole axis.
Tensor narrow(const Tensor &x, int64_t axis, int64_t start, int64_t length) {
  const int64_t size = x.shape[axis];
  require(start >= 0 && length >= 0 && start <= size && length <= size - start, "a part ends after the end of its tensor");
  if (length == size) return x;
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
  require_indices(numbers, table.shape[0]);
  for (int64_t i = 0; i < shape[0]; ++i) std::memcpy(out.data + i * bytes, table.data + numbers.as<int64_t>()[i] * bytes, bytes);
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
void cat(Step &step) {
  const auto &parts = step["tensors"].list();
  require_fit(!parts.empty());
  Tensor out = step.tensor(parts[0]);
  const int64_t axis = axis_of(out, step.integer("dim", 0)), outer = count_of({out.shape.begin(), out.shape.begin() + axis});
  Sizes lengths;
  for (const Json &part : parts) {
    const Tensor &x = step.tensor(part);
    require_fit(x.rank() == out.rank());
    Sizes shape = out.shape;
    shape[axis] = x.shape[axis];
    require_fit(is_of(x, out.type, shape));
    lengths.push_back(x.shape[axis]);
  }
  const int64_t inner = count_of({out.shape.begin() + axis + 1, out.shape.end()}) * bytes_of(out.type);
  out.shape[axis] = std::accumulate(lengths.begin(), lengths.end(), int64_t{0});
  out = empty(out.type, out.shape);
  uint8_t *to = out.data;
  for (int64_t i = 0; i < outer; ++i)
    for (size_t part = 0; part < lengths.size(); to += lengths[part++] * inner)
      std::memcpy(to, step.tensor(parts[part]).data + i * lengths[part] * inner, lengths[part] * inner);
  step.set_result(0, out);
}
void narrow_part(Step &step) {
  const Tensor &x = step.tensor("self");
  step.set_result(0, narrow(x, axis_of(x, step["dim"].integer()), step["start"].integer(), step["length"].integer()));
}

void slice(Step &step) {
  const Tensor &x = step.tensor("self");
  const int64_t axis = axis_of(x, step.integer("dim", 0)), start = step.integer("start", 0);
  require_fit(start >= 0 && step.integer("step", 1) == 1);
  step.set_result(0, narrow(x, axis, start, std::min(step.integer("end", x.shape[axis]), x.shape[axis]) - start));
}
void unsqueeze(Step &step) {
  Tensor x = step.tensor("self");
  const int64_t axis = step["dim"].integer();
  require_fit(axis >= 0 && axis <= x.rank());
  x.shape.insert(x.shape.begin() + axis, 1);
  step.set_result(0, x);
}

std::vector<float> to_floats(const Tensor &x) {
  std::vector<float> numbers(x.count());
  read_floats(x.data, dtype_of(x.type), 0, x.count(), numbers.data());
  return numbers;
}

// Sets a tensor of x's shape and of `type` with the results of compute(number of x, index).
template <class Compute> void set_each(Step &step, const Tensor &x, Type type, const Compute &compute) {
  std::vector<float> numbers = to_floats(x);
  for (size_t i = 0; i < numbers.size(); ++i) numbers[i] = compute(numbers[i], i);
  const Tensor out = empty(type, x.shape);
  write_floats(out.data, dtype_of(type), 0, x.count(), numbers.data());
  step.set_result(0, out);
}

void relu(Step &step) {
  const Tensor &x = step.tensor("self");
  set_each(step, x, x.type, [](float number, size_t) { return number < 0 ? 0 : number; });  // NaN stays NaN
}

void to(Step &step) {
  set_each(step, step.tensor("self"), step.type("dtype"), [](float number, size_t) { return number; });
}

// Combines the numbers of `self` with a number, with the numbers of a tensor that has its last axes, or with a number for
// each index of the first axis.
template <class Combine> void set_combined(Step &step, const Combine &combine) {
  const Tensor &x = step.tensor("self");
  if (!step["other"].is_tensor())
    return set_each(step, x, x.type, [&, number = step.number("other", 0)](float left, size_t) { return combine(left, number); });
  const Tensor &other = step.tensor("other");
  require_fit(other.count() > 0 && other.rank() <= x.rank() && x.count() > 0);
  const bool has_last_axes = std::equal(other.shape.rbegin(), other.shape.rend(), x.shape.rbegin());
  require_fit(has_last_axes || (other.rank() == x.rank() && other.shape[0] == x.shape[0] && other.count() == x.shape[0]));
  const std::vector<float> others = to_floats(other);
  const size_t repeats = has_last_axes ? 1 : x.count() / others.size();
  set_each(step, x, x.type == other.type ? x.type : Type::float32,
           [&](float left, size_t i) { return combine(left, others[i / repeats % others.size()]); });
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
void floor_divide(Step &step) {  // of positions
  const Tensor &x = step.tensor("self"), out = like(x);
  const int64_t divisor = step["other"].integer();
  require_fit(x.type == Type::int64 && divisor > 0);
  for (int64_t i = 0; i < x.count(); ++i) out.as<int64_t>()[i] = x.as<int64_t>()[i] / divisor - (x.as<int64_t>()[i] % divisor < 0);
  step.set_result(0, out);
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

void sigmoid_gate(Step &step) {
  const Tensor &x = step.tensor("x"), &gate = step.tensor("gate"), out = like(x);
  require_fit(x.rank() == 2 && x.count() > 0 && (gate.shape == x.shape || gate.shape == Sizes{x.shape[0], 1}) && gate.type == x.type);
  call_kernel("sigmoid_gate", x.data, gate.data, out.data, dtype_of(x.type), x.shape[0], x.shape[1], gate.shape[1]);
  step.set_result(0, out);
}

void gated_rms_norm(Step &step) {
  const Tensor &x = step.tensor("x"), gate = checked_tensor(&step.tensor("gate"), x.type, x.shape), out = like(x);
  const int64_t group_size = step["group_size"].integer();
  require_fit(x.rank() == 2 && x.count() > 0 && group_size > 0 && x.last() % group_size == 0);
  const Tensor weight = checked_tensor(&step.tensor("weight"), x.type, {x.last()});
  call_kernel("gated_rms_norm", x.data, gate.data, weight.data, out.data, dtype_of(x.type), x.shape[0], x.last(), x.last(), x.last(), group_size,
              step.number("eps", 0), step.flag("gates_output"));
  step.set_result(0, out);
}

void take_channels(Step &step) {
  const Tensor &x = step.tensor("x"), &order = step.tensor("order");
  require_fit(x.rank() == 2 && x.count() > 0 && is_integers(order, 1) && order.count() > 0);
  const Tensor out = empty(x.type, {x.shape[0], order.shape[0]});
  require_indices(order, x.shape[1]);
  call_kernel("take_channels", x.data, x.shape[1], order.data, out.data, bytes_of(x.type), x.shape[0], order.shape[0]);
  step.set_result(0, out);
}

void rope(Step &step) {
  const Tensor &x = step.tensor("x"), &cos = step.tensor("cos"), sin = checked_tensor(&step.tensor("sin"), x.type, cos.shape), out = like(x);
  require_fit(x.rank() == 3 && x.count() > 0 && cos.type == x.type && cos.rank() == 2 && cos.shape[0] == x.shape[0] && cos.shape[1] * 2 <= x.last());
  call_kernel("rope", x.data, cos.data, sin.data, out.data, dtype_of(x.type), x.shape[0], x.shape[1], x.last(), cos.shape[1], x.shape[1] * x.last(),
              step.flag("interleaved"));
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
      : keys(step.cache_vectors("key_cache")), values(step.cache_vectors("value_cache")), slots(step.field("slots", SLOTS, WINDOW_SLOTS)),
        key(step.tensor("key")), value(step.tensor("value")), count(slots.shape[0]) {
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
  call_kernel("rope_and_store", query.data, key.data, value.data, query.shape[1] * query.shape[2], size_of(keys), size_of(values), query.shape[1],
              cos.data, sin.data, cos.shape[1], step.flag("interleaved"), query_norm.data, key_norm.data, step.number("eps", 0), out.data,
              &keys, &values, slots.data, count);
  step.set_result(0, out);
}

void paged_attention(Step &step) {
  const PagedVectors keys = step.cache_vectors("key_cache"), values = step.cache_vectors("value_cache", true);
  const Tensor &tables = step.field("block_tables", BLOCK_TABLES, WINDOW_TABLES), &lengths = step.field("context_lengths", CONTEXT_LENGTHS);
  const Tensor &starts = step.field("query_starts", QUERY_STARTS, OUTPUT_STARTS);
  const Tensor query = step.tensor("query");
  require_fit(query.rank() == 3 && dtype_of(query.type) == keys.dtype && query.shape[2] == keys.channels && query.shape[1] > 0);
  require_fit(values.channels > 0 && keys.num_heads == values.num_heads && query.shape[1] % keys.num_heads == 0);
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

// A sequence whose state is a matrix for each head. The shapes bound its numbers before they are multiplied. Kernels of a
// GPU read context_lengths; the CPU computes token by token.
struct MatrixSequence : Sequence {
  int64_t num_heads, rows, columns, group, size;  // size: of all heads' outputs

  MatrixSequence(Step &step, const char *columns_name) : Sequence(step), columns(step[columns_name].integer()), group(step["group"].integer()) {
    constexpr int64_t COLUMNS = 32, MAX_ROWS = 256;  // of a panel (kernels/state_panels)
    require_fit(states.type == Type::float32 && states.rank() == 5 && columns > 0 && group > 0);
    num_heads = states.shape[1], rows = states.shape[3], size = num_heads * columns;
    const bool fits = states.shape[2] == (columns - 1) / COLUMNS + 1 && rows > 0 && rows <= MAX_ROWS && states.last() == COLUMNS;
    require_fit(num_heads > 0 && fits);
    step.field("context_lengths", CONTEXT_LENGTHS);
  }
  // Returns the number of groups of `rows` channels, of which x has two for each; the outputs' channels are in x, too.
  int64_t num_groups(const Tensor &x) const {
    const int64_t count = x.rank() == 2 ? (x.last() - size) / (2 * rows) : 0;
    require_fit(count > 0 && is_of(x, x.type, {num_tokens, size + 2 * count * rows}));
    return count;
  }
};

void ssd(Step &step) {
  const MatrixSequence of(step, "head_channels");
  const Tensor xbc = step.tensor("xbc"), dt = checked_tensor(&step.tensor("dt"), xbc.type, {of.num_tokens, of.num_heads});
  const int64_t num_groups = of.num_groups(xbc);
  require_fit((of.num_heads - 1) / of.group < num_groups);
  Tensor of_heads[3], out = empty(xbc.type, {of.num_tokens, of.size});
  for (size_t i = 0; const char *name : {"dt_bias", "decay_log", "skip"}) of_heads[i++] = checked_tensor(&step.tensor(name), Type::float32, {of.num_heads});
  call_kernel("ssd", xbc.data, dt.data, of_heads[0].data, of_heads[1].data, of_heads[2].data, of.states.data, of.starts.data, of.reads.data,
              of.writes.data, of.ends.data, out.data, dtype_of(xbc.type), int64_t{1}, of.num_heads, num_groups, of.rows, of.columns, of.group,
              step.number("min_step", 0), step.number("max_step", 0));
  step.set_result(0, out);
}

void gated_delta(Step &step) {
  const MatrixSequence of(step, "value_channels");
  const Tensor qkv = step.tensor("qkv"), write_gate = checked_tensor(&step.tensor("write_gate"), qkv.type, {of.num_tokens, of.num_heads});
  const int64_t num_key_heads = of.num_groups(qkv), num_decays = step.tensor("decay_bias").count() > of.num_heads ? of.rows : 1;
  const Tensor decay = checked_tensor(&step.tensor("decay"), qkv.type, {of.num_tokens, of.num_heads * num_decays});
  const Tensor decay_log = checked_tensor(&step.tensor("decay_log"), Type::float32, {of.num_heads});
  const Tensor decay_bias = checked_tensor(&step.tensor("decay_bias"), Type::float32, {of.num_heads * num_decays});
  const Tensor out = empty(qkv.type, {of.num_tokens, of.size});
  call_kernel("gated_delta", qkv.data, decay.data, write_gate.data, decay_log.data, decay_bias.data, of.states.data, of.starts.data, of.reads.data,
              of.writes.data, of.ends.data, out.data, dtype_of(qkv.type), int64_t{1}, of.num_heads, num_key_heads, of.rows, of.columns, of.group,
              num_decays);
  step.set_result(0, out);
}

}  // namespace

Operator find_operator(const std::string &target) {
  static const std::map<std::string, Operator> OPERATORS = {
      {"aten.embedding.default", embedding}, {"aten.index.Tensor", index}, {"aten.unflatten.int", unflatten}, {"aten.flatten.using_ints", flatten},
      {"aten.unbind.int", unbind}, {"aten.split_with_sizes.default", split_with_sizes}, {"aten.chunk.default", chunk},
      {"aten.narrow.default", narrow_part}, {"aten.slice.Tensor", slice}, {"aten.unsqueeze.default", unsqueeze}, {"aten.floor_divide.default", floor_divide},
      {"aten.cat.default", cat}, {"aten.add.Tensor", add}, {"aten.mul.Tensor", mul}, {"aten.div.Tensor", div}, {"aten.relu.default", relu}, {"aten.to.dtype", to}, {"quintet.rms_norm.default", rms_norm},
      {"quintet.add_rms_norm.default", add_rms_norm}, {"quintet.layer_norm.default", layer_norm}, {"quintet.gelu_tanh.default", gelu_tanh},
      {"quintet.swiglu.default", swiglu}, {"quintet.take_channels.default", take_channels}, {"quintet.rope.default", rope}, {"quintet.rope_angles.default", rope_angles}, {"quintet.kv_store.default", kv_store},
      {"quintet.rope_and_store.default", rope_and_store}, {"quintet.paged_attention.default", paged_attention}, {"quintet.short_conv.default", short_conv}, {"quintet.ssd.default", ssd}, {"quintet.gated_rms_norm.default", gated_rms_norm},
      {"quintet.matmul_together.default", matmul_together}, {"quintet.matmul_swiglu.default", matmul_swiglu}, {"quintet.linear.default", linear},
      {"quintet.take_rows.default", take_rows}, {"quintet.matmul_per_head.default", matmul_per_head},
      {"quintet.grouped_matmul.default", grouped_matmul}, {"quintet.route.default", route}, {"quintet.route_corrected.default", route_corrected},
      {"quintet.group_rows.default", group_rows}, {"quintet.combine_rows.default", combine_rows}, {"quintet.sigmoid_gate.default", sigmoid_gate},
      {"quintet.gated_delta.default", gated_delta}};
  constexpr std::string_view LIBRARIES = "torch.ops.";
  const auto entry = target.starts_with(LIBRARIES) ? OPERATORS.find(target.substr(LIBRARIES.size())) : OPERATORS.end();
  return entry == OPERATORS.end() ? nullptr : entry->second;
}
