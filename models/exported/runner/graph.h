// A step of a model as a sequence of calls, in the JSON schema of torch.export. A file selects among the listed
// functions; their arguments are numbers, weights and earlier results.
#pragma once

#include <algorithm>
#include <limits>
#include <map>

#include "cache.h"

// The inputs of a graph that come from a batch, in order. Only recurrent models have the fields of states, and only models
// with windows the fields of windows. The cache's tensors follow, then the weights.
enum Field : size_t {
  TOKEN_IDS, POSITIONS, SLOTS, QUERY_STARTS, CONTEXT_LENGTHS, PROMPT_LENGTHS, PROMPT_FEATURES, OUTPUT_ROWS, OUTPUT_STARTS, BLOCK_TABLES,
  STATE_READS, STATE_WRITES, STATE_ENDS, WINDOW_SLOTS, WINDOW_TABLES, NUM_FIELDS
};

class Step;
using Operator = void (*)(Step &);

// Returns null if the operator is not listed in operators.cpp.
Operator find_operator(const std::string &target);

struct Call {
  std::string name;
  Operator function;
  Json::Object arguments = {};
  std::vector<size_t> outputs = {};     // the values that it computes
  std::vector<size_t> last_read = {};       // the values that no later call reads
  std::vector<std::string> known = {};  // names of the arguments that the function has requested
  bool is_checked = false;              // whether it was called before: its weights and the names of its arguments are valid
};

inline Dtype dtype_of(Type type) {
  require(type == Type::float32 || type == Type::bfloat16 || type == Type::float16, "its dtype is not a float");
  return type == Type::float32 ? Dtype::float32 : type == Type::bfloat16 ? Dtype::bfloat16 : Dtype::float16;
}

// The view that a call has of a step: its arguments by name, and its results.
class Step {
 public:
  Step(const Cache &cache, size_t num_inputs, std::vector<Tensor> &values, Call &call)
      : call(call), cache_(cache), num_inputs_(num_inputs), values_(values) {}

  Call &call;

  // Returns null if the argument is missing.
  const Json *find(std::string_view name) {
    if (!call.is_checked) call.known.emplace_back(name);
    const Json *argument = Json::find(call.arguments, name);
    return argument && !argument->is_null() ? argument : nullptr;
  }
  const Json &operator[](std::string_view name) {
    const Json *argument = find(name);
    require(argument, std::string(name) + " is missing");
    return *argument;
  }
  const Tensor &tensor(const Json &argument) const {
    require(values_[argument.tensor()].data, "a value is read that no call computed");
    return values_[argument.tensor()];
  }
  const Tensor &tensor(std::string_view name) { return tensor((*this)[name]); }
  const Tensor *optional(std::string_view name) { return find(name) ? &tensor(name) : nullptr; }
  int64_t integer(std::string_view name, int64_t missing) { return find(name) ? find(name)->integer() : missing; }
  float number(std::string_view name, double missing) { return static_cast<float>(find(name) ? find(name)->number() : missing); }
  bool flag(std::string_view name) { return find(name) && find(name)->flag(); }
  Type type(std::string_view name) { return static_cast<Type>((*this)[name].integer()); }

  // Returns a weight of the exported model, which is the same in every step. Raises Refused if the argument is another
  // value.
  const Tensor &weight(const Json &argument) const {
    const size_t number = argument.tensor();
    require(number >= cache_.first_weight() && number < num_inputs_, "a weight argument is not a weight of the exported model");
    return tensor(argument);
  }
  // Returns a field of the batch, which may also be `other`. Raises Refused if the argument is another value: kernels use
  // its numbers as memory offsets.
  const Tensor &field(std::string_view name, Field field, std::optional<Field> other = {}) {
    const size_t number = (*this)[name].tensor();
    require(number == field || number == other, std::string(name) + " is not the batch's field of this name");
    return tensor(name);
  }
  // Returns the keys or values that the arguments NAME_tensors, NAME_format and so on describe. They may have fewer
  // channels than the cache only if `may_be_narrow`.
  PagedVectors cache_vectors(const std::string &name, bool may_be_narrow = false) {
    const auto &list = (*this)[name + "_tensors"].list();
    const auto is_first = [&](const CacheVectors &vectors) { return !list.empty() && list[0].tensor() == vectors.first; };
    const auto of = std::ranges::find_if(cache_.vectors, is_first);
    require(of != cache_.vectors.end(), "keys or values are not a tensor of the cache");
    bool fits = list.size() == of->num_tensors && (*this)[name + "_format"].text() == of->format && type(name + "_dtype") == cache_.dtype;
    for (size_t i = 0; i < list.size(); ++i) fits = fits && list[i].tensor() == of->first + i;
    const Json *static_scales = find(name + "_scales");
    fits = fits && (of->static_scales ? static_scales && static_scales->tensor() == cache_.first_weight() + *of->static_scales : !static_scales);
    const int64_t channels = integer(name + "_channels", 0);
    fits = fits && (channels == of->channels || (may_be_narrow && channels > 0 && channels < of->channels));
    require(fits, name + " has a format that differs from export.json");
    const Tensor &stored = values_[of->first], *scales = static_scales ? &weight(*static_scales) : of->num_tensors == 2 ? &values_[of->first + 1] : nullptr;
    require(!static_scales || (scales->type == Type::float32 && scales->shape == Sizes{of->num_heads}), "its scales are not one number for each head");
    const int64_t scales_size = scales && !static_scales ? count_of({scales->shape.begin() + 3, scales->shape.end()}) : 0;
    constexpr int32_t HAS_MARGIN = true;  // allocated by `empty`
    return {stored.data, scales ? scales->data : nullptr, stored.shape[1], of->num_heads, channels, stored.last(), scales_size, of->kind,
            dtype_of(cache_.dtype), HAS_MARGIN};
  }
  // Returns a recurrent state, into which a kernel writes. Raises Refused if the argument is another value.
  const Tensor &state(std::string_view name) {
    const size_t number = (*this)[name].tensor();
    const auto is_it = [&](const CacheInput &input) { return input.number == number && input.is_state; };
    require(std::ranges::any_of(cache_.inputs, is_it), "a state is not a recurrent state of the cache");
    return values_[number];
  }
  void set_result(size_t output, Tensor result) {
    require(output < call.outputs.size(), "it has more results than the graph has outputs");
    values_[call.outputs[output]] = std::move(result);
  }

 private:
  const Cache &cache_;
  size_t num_inputs_;
  std::vector<Tensor> &values_;
};

class Graph {
 public:
  Cache cache;
  std::vector<Tensor> inputs;  // unset entries for fields and cache, then the weights

  // Raises Refused if the graph calls functions that are not listed.
  Graph(const Json &graph, Cache cache_, const std::vector<Tensor> &weights) : cache(std::move(cache_)) {
    inputs.resize(cache.first_weight());
    inputs.insert(inputs.end(), weights.begin(), weights.end());
    const auto is_absent = [&](size_t field) {  // the graph has no name for it
      return field >= STATE_READS && field < NUM_FIELDS && !(field < WINDOW_SLOTS ? cache.has_states : cache.has_windows);
    };
    for (const Json &input : graph["inputs"].list()) {
      while (is_absent(last_.size())) last_.push_back(0);
      new_value(input["as_tensor"]);
    }
    require(last_.size() == inputs.size(), "the inputs of its graph do not fit export.json");
    for (const Json &node : graph["nodes"].list()) {
      const std::string &target = node["target"].text();
      if (target == "torch.ops.aten._assert_tensor_metadata.default") continue;  // a check that every trace contains; it computes nothing
      Call &call = calls_.emplace_back(Call{target, find_operator(target)});
      require(call.function, "the runner does not support " + target);
      for (const Json &input : node["inputs"].list()) call.arguments.emplace_back(input["name"].text(), argument(input["arg"]));
      for (const Json &output : node["outputs"].list()) {
        const auto &[kind, value] = kind_and_value(output);
        if (kind == "as_tensors")
          for (const Json &part : value.list()) call.outputs.push_back(new_value(part));
        else if (kind != "as_none")
          call.outputs.push_back(new_value(value));
      }
    }
    const auto &outputs = graph["outputs"].list();
    require(outputs.size() == 2, "its graph does not have two outputs");
    logits_ = argument(outputs[1]).tensor();
    for (size_t number = inputs.size(); number < last_.size(); ++number)
      if (number != logits_) calls_[last_[number]].last_read.push_back(number);
  }

  // Returns logits. Raises Refused if a call cannot be executed.
  Tensor run() {
    std::vector<Tensor> values = inputs;
    values.resize(last_.size());
    for (Call &call : calls_) {
      try {
        Step step(cache, inputs.size(), values, call);
        call.function(step);
        for (const auto &[name, value] : call.arguments)
          require(call.is_checked || std::find(call.known.begin(), call.known.end(), name) != call.known.end(), name + " is not known");
        call.is_checked = true;
      } catch (const Refused &error) {
        throw Refused(call.name + " cannot be computed: " + error.what());
      }
      for (const size_t number : call.last_read) values[number] = Tensor();
    }
    return values[logits_];
  }

 private:
  std::vector<Call> calls_;
  std::map<std::string, size_t> numbers_;  // index of each value, by name
  std::vector<size_t> last_;               // per value: the last call that computes or reads it
  size_t logits_ = 0;

  static const std::pair<std::string, Json> &kind_and_value(const Json &json) {
    require(json.object().size() == 1, "an argument has several kinds");
    return json.object().front();
  }

  size_t new_value(const Json &value) {
    require(numbers_.emplace(value["name"].text(), last_.size()).second, "a value is computed twice");
    last_.push_back(calls_.size() - 1);
    return last_.size() - 1;
  }

  // Returns an argument of the last call. Names of values are replaced by their indices.
  Json argument(const Json &json) {
    const auto &[kind, value] = kind_and_value(json);
    if (kind == "as_none") return {nullptr};
    if (kind == "as_optional_tensor") return argument(value);
    if (kind == "as_tensor") {
      const auto entry = numbers_.find(value["name"].text());
      require(entry != numbers_.end(), "a value is read before it is computed");
      last_[entry->second] = calls_.size() - 1;
      return {entry->second};
    }
    if (kind == "as_tensors" || kind == "as_optional_tensors") {
      Json::List list;
      for (const Json &item : value.list()) list.push_back(argument(kind == "as_tensors" ? Json{Json::Object{{"as_tensor", item}}} : item));
      return {list};
    }
    if (kind == "as_float" && std::holds_alternative<std::string>(value.value) && value.text() == "Infinity")
      return {std::numeric_limits<double>::infinity()};
    for (const char *plain : {"as_int", "as_ints", "as_float", "as_bool", "as_bools", "as_string", "as_scalar_type"})
      if (kind == plain) return value;
    throw Refused("an argument of the kind " + kind + " is not supported");
  }
};
