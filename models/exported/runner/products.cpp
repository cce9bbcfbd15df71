// Products with weights, and mixtures of experts. Arguments come from a file that is not trusted, as in operators.cpp.
#include <algorithm>
#include <cstring>
#include <optional>

#include "../../../kernels/linear/block_weight.h"
#include "../../../kernels/linear/compressed.h"
#include "../../../kernels/linear/products.h"
#include "operators.h"

namespace {

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
// PREFIX_num_outputs and so on; `number` is the weight's index in lists.
Packed packed(Step &step, Type type, const std::string &prefix, std::optional<size_t> number = std::nullopt) {
  const auto argument = [&](const char *name) -> const Json & {
    const Json &value = step[prefix + name];
    if (!value.is_list()) return value;
    require_fit(number && *number < value.list().size());
    return value.list()[*number];
  };
  const Tensor &weight = step.weight(argument(step.find(prefix + "_memories") ? "_memories" : "_memory"));
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

// Returns a weight for rows x [..., K].
Packed packed_for(Step &step, const Tensor &x, const std::string &prefix, std::optional<size_t> number = std::nullopt) {
  const Packed weight = packed(step, x.type, prefix, number);
  require_fit(weight.num_inputs == x.last());
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

// Weights of one shape and format, one for each expert or head.
struct Group {
  std::vector<const uint8_t *> memories;
  std::vector<uint8_t> are_compressed;  // as bool
  Packed first;

  Group(Step &step, const Tensor &x, const std::string &prefix) {
    for (const char *name : {"_num_outputs", "_num_inputs", "_group_size", "_codes", "_has_zero_points"}) step.find(prefix + name);  // known also without weights
    for (size_t i = 0; i < step[prefix + "_memories"].list().size(); ++i) {
      const Packed weight = packed_for(step, x, prefix, i);
      if (i == 0) first = weight;
      require_fit(are_alike(weight.format, first.format) && weight.num_outputs == first.num_outputs);
      memories.push_back(weight.memory), are_compressed.push_back(weight.is_compressed);
    }
  }
  int64_t count() const { return memories.size(); }
};

// Returns x [M, H, *] as [H, M, *].
Tensor heads_first(const Tensor &x) {
  if (x.shape[0] == 1 || x.shape[1] == 1) return {x.type, {x.shape[1], x.shape[0], x.last()}, x.data, x.owner};
  const Tensor out = empty(x.type, {x.shape[1], x.shape[0], x.last()});
  const int64_t bytes = x.last() * bytes_of(x.type);
  for (int64_t row = 0; row < x.shape[0]; ++row)
    for (int64_t head = 0; head < x.shape[1]; ++head)
      std::memcpy(out.data + (head * x.shape[0] + row) * bytes, x.data + (row * x.shape[1] + head) * bytes, bytes);
  return out;
}

// The experts of each token and their weights, [T, K], for logits [T, N].
struct Choice {
  Tensor logits, weights, chosen;
  int64_t num_tokens, num_chosen, num_experts;

  explicit Choice(Step &step) : logits(step.tensor("logits")), num_chosen(step["num_chosen"].integer()) {
    require_fit(logits.rank() == 2 && logits.count() > 0 && num_chosen > 0 && num_chosen <= logits.last());
    num_tokens = logits.shape[0], num_experts = logits.last();
    weights = empty(Type::float32, {num_tokens, num_chosen}), chosen = empty(Type::int64, weights.shape);
    step.set_result(0, weights), step.set_result(1, chosen);
  }
};

}  // namespace

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

void matmul_per_head(Step &step) {
  const Tensor x = step.tensor("x");
  require_fit(x.rank() == 3 && x.count() > 0);
  const Group weights(step, x, "weights");
  require_fit(weights.count() == x.shape[1] && weights.first.format.codes == Codes::none);
  const Tensor by_head = heads_first(x), out = empty(x.type, {x.shape[1], x.shape[0], weights.first.num_outputs});
  call_kernel("matmul_per_head", by_head.data, dtype_of(x.type), x.shape[1], x.shape[0], x.last(), weights.memories.data(), weights.are_compressed.data(),
              out.data, out.last());
  step.set_result(0, heads_first(out));
}

void grouped_matmul(Step &step) {
  const Tensor x = rows_to_multiply(step);
  const Group weights(step, x, "weights"), ups(step, x, "ups");
  const auto &[first, up] = std::pair{weights.first, ups.first};
  require_fit(weights.count() > 0);
  if (ups.count()) require_fit(ups.count() == weights.count() && are_alike(up.format, first.format) && up.num_outputs == first.num_outputs);
  const Tensor starts = checked_tensor(&step.tensor("starts"), Type::int64, {weights.count() + 1}), out = empty(x.type, {x.shape[0], first.num_outputs});
  const Tensor biases = checked_tensor(step.optional("biases"), x.type, {weights.count(), first.num_outputs});
  require_fit(!biases.data || !ups.count());
  const int64_t *start = starts.as<int64_t>();
  require_fit(start[0] == 0 && start[weights.count()] == x.shape[0] && std::is_sorted(start, start + weights.count() + 1));
  call_kernel("grouped_matmul", x.data, NONE, int64_t{0}, dtype_of(x.type), x.shape[1], first.format.group_size, first.format.codes,
              first.format.has_zeros, weights.memories.data(), weights.are_compressed.data(), ups.count() ? ups.memories.data() : nullptr,
              ups.are_compressed.data(), biases.data, starts.data, out.data, weights.count(), first.num_outputs);
  step.set_result(0, out);
}

void route(Step &step) {
  const auto [logits, weights, chosen, num_tokens, num_chosen, num_experts] = Choice(step);
  call_kernel("route", logits.data, dtype_of(logits.type), weights.data, chosen.data, num_tokens, num_chosen, num_experts, step["renormalise"].flag());
}

void route_corrected(Step &step) {
  const auto [logits, weights, chosen, num_tokens, num_chosen, num_experts] = Choice(step);
  const Tensor correction = checked_tensor(&step.tensor("correction"), Type::float32, {num_experts});
  const int64_t num_groups = step.integer("num_groups", 1), num_kept = step.integer("num_kept", 1), num_scored = step.integer("num_scored", 2);
  require_fit(logits.type == Type::float32 && num_groups > 0 && num_experts % num_groups == 0 && num_kept > 0 && num_kept <= num_groups);
  const int64_t size = num_experts / num_groups;
  require_fit((num_scored == 1 || num_scored == 2) && (num_kept == num_groups || size >= num_scored) && num_chosen <= num_kept * size);
  call_kernel("route_corrected", logits.data, correction.data, weights.data, chosen.data, num_tokens, num_chosen, num_experts,
              step["renormalise"].flag(), step.flag("is_softmax"), num_groups, num_kept, num_scored);
}

void group_rows(Step &step) {
  const Tensor &x = step.tensor("x"), &chosen = step.tensor("chosen");
  const int64_t num_experts = step["num_experts"].integer();
  require_fit(x.rank() == 2 && x.count() > 0 && is_integers(chosen, 2) && chosen.count() > 0 && chosen.shape[0] == x.shape[0] && num_experts < 1 << 16);
  require_indices(chosen, num_experts);
  const Tensor rows = empty(x.type, {chosen.count(), x.last()}), starts = empty(Type::int64, {num_experts + 1}), places = like(chosen);
  call_kernel("group_rows", x.data, chosen.data, rows.data, places.data, starts.data, x.shape[0], chosen.last(), num_experts,
              x.last() * bytes_of(x.type));
  step.set_result(0, rows), step.set_result(1, starts), step.set_result(2, places);
}

void combine_rows(Step &step) {
  const Tensor &parts = step.tensor("parts"), &places = step.tensor("places");
  require_fit(parts.rank() == 2 && parts.count() > 0 && is_integers(places, 2) && places.count() > 0);
  require_indices(places, parts.shape[0]);
  const Tensor weights = checked_tensor(&step.tensor("weights"), Type::float32, places.shape), out = empty(parts.type, {places.shape[0], parts.last()});
  call_kernel("combine_rows", parts.data, dtype_of(parts.type), weights.data, places.data, out.data, places.shape[0], places.last(), parts.last());
  step.set_result(0, out);
}
