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
    const bool is_sharded = Json::find(description.object(), "tp") || Json::find(description.object(), "part");
    require(!is_sharded, "it is sharded: run it by run.py");
    const std::string &instruction_set = description["instruction_set"].text();
    require(instruction_set == INSTRUCTION_SET, "it was exported for " + instruction_set + ", and this runner was built for " INSTRUCTION_SET);
    vocab_size_ = count(description["vocab_size"]), context_length_ = count(description["context_length"]);
    if (const Json &threshold = description["key_border"]; !threshold.is_null()) context_length_ = std::min(context_length_, count(threshold));
    for (const int64_t token : integers(description["eos_token_ids"])) ends_.insert(token);
    const auto stored = read_weights(map_file(folder + "/weights.safetensors"));
    std::vector<Tensor> weights;
    for (const Json &weight_name : description["weights"].list()) {
      const auto weight = stored.find(weight_name.text());
      require(weight != stored.end(), "it has no weight " + weight_name.text());
      weights.push_back(weight->second);
    }
    graph_.emplace(read_graph(map_file(folder + "/graph.pt2")), Cache(description, NUM_FIELDS), weights);
  }

  int64_t vocab_size() const { return vocab_size_; }
  int64_t context_length() const { return context_length_; }  // the maximum number of tokens of a sequence
  bool is_end(int64_t token) const { return ends_.contains(token); }

  // Allocates the cache for a new sequence of at most `num_tokens` tokens; the first `prompt_length` tokens are its
  // prompt. Discards the previous sequence.
  void begin(int64_t prompt_length, int64_t num_tokens) {
    prompt_length_ = prompt_length, length_ = 0;
    num_blocks_ = divide_up(num_tokens, BLOCK_SIZE);
    for (const auto &[number, dtype, is_state, shape] : graph_->cache.inputs) {
      Sizes whole = shape;
      if (!is_state) whole.insert(whole.begin(), {num_blocks_, BLOCK_SIZE});
      graph_->inputs[number] = empty(dtype, whole);
    }
  }

  // Returns the logits [1, V] after the last of these tokens, which follow the tokens of earlier steps.
  Tensor step(const std::vector<int64_t> &token_ids) {
    const int64_t num_tokens = token_ids.size(), width = std::bit_ceil(static_cast<uint64_t>(num_blocks_));
    require(num_tokens > 0 && length_ + num_tokens <= num_blocks_ * BLOCK_SIZE, "more tokens than the cache has room for");
    std::vector<int64_t> positions(num_tokens), table(width, 0);
    std::iota(positions.begin(), positions.end(), length_);
    std::iota(table.begin(), table.begin() + num_blocks_, 0);
    length_ += num_tokens;
    put(TOKEN_IDS, {num_tokens}, token_ids);
    put(POSITIONS, {num_tokens}, positions);
    put(SLOTS, {num_tokens}, positions);  // block i of the only sequence is block i of the cache
    put(QUERY_STARTS, {2}, {0, num_tokens});
    put(CONTEXT_LENGTHS, {1}, {length_});
    put(PROMPT_LENGTHS, {num_tokens}, std::vector(num_tokens, prompt_length_));
    put(PROMPT_FEATURES, {1, 0}, {});
    put(OUTPUT_ROWS, {1}, {num_tokens - 1});
    put(OUTPUT_STARTS, {2}, {0, 1});
    put(BLOCK_TABLES, {1, width}, table);
    put(STATE_READS, {1}, {length_ > num_tokens ? 0 : -1});  // slot 0 of each state; -1: a new sequence has none
    put(STATE_WRITES, {1}, {0}), put(STATE_ENDS, {1}, {num_tokens});
    put(WINDOW_SLOTS, {num_tokens}, positions), put(WINDOW_TABLES, {1, width}, table);  // all layers have the same blocks
    const Tensor logits = graph_->run();
    require(logits.data && logits.shape == Sizes{1, vocab_size_}, "its graph does not return logits");
    return logits;
  }

 private:
  static constexpr int64_t BLOCK_SIZE = 16;
  int64_t vocab_size_, context_length_, prompt_length_ = 0, length_ = 0, num_blocks_ = 0;
  std::set<int64_t> ends_;
  std::optional<Graph> graph_;

  void put(Field field, const Sizes &shape, const std::vector<int64_t> &numbers) {
    graph_->inputs[field] = empty(Type::int64, shape);
    std::copy(numbers.begin(), numbers.end(), graph_->inputs[field].as<int64_t>());
  }
};
