// A model of task=export: its graph, its weights, and the KV cache of one sequence.
#pragma once

#include <algorithm>
#include <bit>
#include <numeric>
#include <set>

#include "archive.h"
#include "graph.h"

class Model {
 public:
  // Maps the files of the folder. Raises Refused if one is missing, damaged, or made for another instruction set.
  explicit Model(const std::string &folder) {
    const Json description = parse_json(map_file(folder + "/export.json"));
    const bool is_divided = Json::find(description.object(), "tp") || Json::find(description.object(), "part");
    require(!is_divided, "it is divided among ranks, which run.py alone runs");
    const std::string &made_for = description["instruction_set"].text(), &name = description["dtype"].text();
    require(made_for == INSTRUCTION_SET, "it was exported for " + made_for + ", and this runner computes with " INSTRUCTION_SET);
    require(name == "float32" || name == "bfloat16" || name == "float16", "its dtype is " + name);
    const Type dtype = name == "float32" ? Type::float32 : name == "bfloat16" ? Type::bfloat16 : Type::float16;
    vocab_size_ = count(description["vocab_size"]), context_length_ = count(description["context_length"]);
    if (const Json &border = description["key_border"]; !border.is_null()) context_length_ = std::min(context_length_, count(border));
    for (const int64_t token : integers(description["eos_token_ids"])) ends_.insert(token);
    std::vector<Side> sides;
    for (const Json &each : description["cache"].list()) {
      require(each["format"].text() == "none", "the runner does not compute with a cache of " + each["format"].text());
      sides.push_back({count(each["num_heads"]), count(each["channels"]), NUM_FIELDS + sides.size(), dtype});
    }
    const auto found = read_weights(map_file(folder + "/weights.safetensors"));
    std::vector<Tensor> weights;
    for (const Json &each : description["weights"].list()) {
      const auto weight = found.find(each.text());
      require(weight != found.end(), "it has no weight " + each.text());
      weights.push_back(weight->second);
    }
    graph_.emplace(read_graph(map_file(folder + "/graph.pt2")), sides, weights);
  }

  int64_t vocab_size() const { return vocab_size_; }
  int64_t context_length() const { return context_length_; }  // the maximum number of tokens of a sequence
  bool is_end(int64_t token) const { return ends_.contains(token); }

  // Allocates the cache for a new sequence of at most `num_tokens` tokens; the first `prompt_length` tokens are its
  // prompt. Discards the previous sequence.
  void begin(int64_t prompt_length, int64_t num_tokens) {
    prompt_length_ = prompt_length, length_ = 0;
    num_blocks_ = divide_up(num_tokens, BLOCK_SIZE);
    for (const Side &side : graph_->sides)
      graph_->inputs[side.number] = empty(side.dtype, {num_blocks_, BLOCK_SIZE, side.num_heads, side.channels});
  }

  // Returns the logits [1, V] after the last of these tokens, which follow the tokens of earlier steps.
  Tensor step(const std::vector<int64_t> &token_ids) {
    const int64_t num_tokens = token_ids.size(), width = std::bit_ceil(static_cast<uint64_t>(num_blocks_));
    require(num_tokens > 0 && length_ + num_tokens <= num_blocks_ * BLOCK_SIZE, "more tokens than there is room for");
    std::vector<int64_t> places(num_tokens), table(width, 0);
    std::iota(places.begin(), places.end(), length_);
    std::iota(table.begin(), table.begin() + num_blocks_, 0);
    length_ += num_tokens;
    put(TOKEN_IDS, {num_tokens}, token_ids);
    put(POSITIONS, {num_tokens}, places);
    put(SLOTS, {num_tokens}, places);  // block i of the only sequence is block i of the cache
    put(QUERY_STARTS, {2}, {0, num_tokens});
    put(CONTEXT_LENGTHS, {1}, {length_});
    put(PROMPT_LENGTHS, {num_tokens}, std::vector(num_tokens, prompt_length_));
    put(PROMPT_FEATURES, {1, 0}, {});
    put(OUTPUT_ROWS, {1}, {num_tokens - 1});
    put(OUTPUT_STARTS, {2}, {0, 1});
    put(BLOCK_TABLES, {1, width}, table);
    const Tensor logits = graph_->run();
    require(logits.data && logits.shape == Sizes{1, vocab_size_}, "its graph does not give logits");
    return logits;
  }

 private:
  static constexpr int64_t BLOCK_SIZE = 16;
  int64_t vocab_size_, context_length_, prompt_length_ = 0, length_ = 0, num_blocks_ = 0;
  std::set<int64_t> ends_;
  std::optional<Graph> graph_;

  static int64_t count(const Json &json) {
    const int64_t number = json.integer();
    require(number > 0 && number < int64_t{1} << 31, "a count is no number above 0");
    return number;
  }

  void put(Field field, const Sizes &shape, const std::vector<int64_t> &numbers) {
    graph_->inputs[field] = empty(Type::int64, shape);
    std::copy(numbers.begin(), numbers.end(), graph_->inputs[field].as<int64_t>());
  }
};
