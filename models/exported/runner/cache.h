// The cache of a model: its formats in export.json, and its tensors among the inputs of the graph.
#pragma once

#include <algorithm>
#include <map>
#include <optional>

#include "../../../kernels/kv_format.h"
#include "json.h"

// A tensor of keys or values, or a recurrent state.
struct CacheInput {
  size_t number;  // index in the graph's inputs
  Type dtype;     // one-byte codes are uint8
  bool is_state;
  Sizes shape;  // of a token: heads, and numbers of a head; of a state: with its only slot
};

// The keys or the values of a layer, as in kernels/kv_format.py.
struct CacheVectors {
  std::string format;
  KVFormat kind;
  int64_t num_heads, channels;  // no channels: the values of latent attention, which are channels of its keys
  size_t first, num_tensors;    // graph inputs: vectors or codes, then the scales of codes if they are not static
  std::optional<size_t> static_scales = {};  // index among the weights
};

inline Type float_type(const std::string &name) {
  require(name == "float32" || name == "bfloat16" || name == "float16", "its dtype " + name + " is not supported");
  return name == "float32" ? Type::float32 : name == "bfloat16" ? Type::bfloat16 : Type::float16;
}

inline int64_t count(const Json &json) {
  const int64_t number = json.integer();
  require(number > 0 && number < int64_t{1} << 31, "a count is not a number above 0");
  return number;
}

struct Cache {
  Type dtype;  // of keys and values
  std::vector<CacheInput> inputs = {};
  std::vector<CacheVectors> vectors = {};
  bool has_states = false, has_windows = false;

  // Reads the entries of export.json. The first tensor is number `first` of the graph's inputs. Raises Refused for an
  // unknown format.
  Cache(const Json &description, size_t first) : dtype(float_type(description["dtype"].text())), first_(first) {
    const auto &entries = description["cache"].list();
    for (size_t i = 0; i < entries.size(); ++i)
      if (!entries[i].is_null()) add_vectors(entries[i], i % 2 == 1, description["weights"].list());
    const Json *states = Json::find(description.object(), "states");
    has_states = states != nullptr, has_windows = Json::find(description.object(), "windows") != nullptr;
    for (const Json &layer : states ? states->list() : Json::List())
      for (const Json &state : layer.list()) {
        add(float_type(state["dtype"].text()), {1}, true);
        for (const int64_t size : integers(state["shape"])) inputs.back().shape.push_back(size);
      }
    require(!inputs.empty(), "it has no cache");
  }

  size_t first_weight() const { return first_ + inputs.size(); }  // among the graph's inputs

 private:
  size_t first_;

  void add(Type type, const Sizes &shape, bool is_state = false) { inputs.push_back({first_weight(), type, is_state, shape}); }

  void add_vectors(const Json &entry, bool are_values, const Json::List &weights) {
    static const std::map<std::string, KVFormat> KINDS = {{"none", KVFormat::unquantised}, {"int8", KVFormat::int8}, {"fp8", KVFormat::float8},
                                                          {"int4, 4 groups", KVFormat::int4}, {"int4, 1 group", KVFormat::int4}};
    const std::string &format = entry["format"].text();
    const auto kind = KINDS.find(format);
    require(kind != KINDS.end(), "the runner does not support a cache of " + format);
    const int64_t num_heads = count(entry["num_heads"]);
    const bool is_empty = are_values && kind->second == KVFormat::unquantised && entry["channels"].integer() == 0;
    const int64_t channels = is_empty ? 0 : count(entry["channels"]);
    CacheVectors added{format, kind->second, num_heads, channels, first_weight(), 0};
    if (kind->second == KVFormat::unquantised) {
      add(dtype, {num_heads, channels});
    } else if (kind->second == KVFormat::int4) {
      const int64_t most_groups = format == "int4, 4 groups" ? 4 : 1;
      const int64_t size = std::min(std::max<int64_t>(4, 2 * divide_up(channels, 2 * most_groups)), 128 / most_groups), num_groups = divide_up(channels, size);
      add(Type::uint8, {num_heads, num_groups * size / 2}), add(Type::float16, {num_heads, num_groups, 2});
    } else {
      add(Type::uint8, {num_heads, channels});
      if (entry["scales"].is_null()) add(Type::float32, {num_heads});
    }
    added.num_tensors = first_weight() - added.first;
    if (const Json &scales = entry["scales"]; !scales.is_null()) {
      const auto weight = std::ranges::find(weights, scales.text(), &Json::text);
      require(weight != weights.end() && (kind->second == KVFormat::int8 || kind->second == KVFormat::float8), "it has no scales of its cache");
      added.static_scales = weight - weights.begin();
    }
    vectors.push_back(added);
  }
};
