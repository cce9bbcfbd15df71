// Mixture of experts, except the experts' products: routing, grouping rows by expert, and the weighted sum.
// kernels/moe/reference.py is the specification.
//
// T tokens, E hidden channels, N experts, K experts of each token.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "../exp.h"
#include "../operator.h"
#include "../rows.h"
#include "../threads.h"

namespace {

constexpr int64_t PIECE = 1024;              // channels converted to float32 at once
constexpr int64_t CHUNK_CHANNELS = 1 << 13;  // channels that justify another thread
constexpr int64_t TOKENS_OF_CHUNK = 16;      // tokens that justify another thread
constexpr float LEAST_SUM = 1e-20f;          // added to the sum of the chosen scores, because that sum may be 0

// Chooses the most likely experts one after the other. Among equal logits the lowest expert number is first. The order
// of NaN is undefined.
void choose(const std::vector<float> &logits, int64_t num_chosen, int64_t *chosen) {
  for (int64_t rank = 0; rank < num_chosen; ++rank) {
    int64_t best = -1;
    for (int64_t expert = 0; expert < static_cast<int64_t>(logits.size()); ++expert)
      if ((best < 0 || logits[expert] > logits[best]) && std::find(chosen, chosen + rank, expert) == chosen + rank) best = expert;
    chosen[rank] = best;
  }
}

// Converts one token's logits to scores: sigmoids or a softmax.
void score(const float *logits, bool is_softmax, std::vector<float> &scores) {
  std::copy_n(logits, scores.size(), scores.data());
  const float highest = is_softmax && !scores.empty() ? *std::max_element(scores.begin(), scores.end()) : 0;
  float total = 0;
  for (float &value : scores) total += value = is_softmax ? exp_scalar(value - highest) : 1 / (1 + exp_scalar(-value));
  if (is_softmax)
    for (float &value : scores) value /= total;
}

// Keeps the groups with the highest sum of their `num_scored` best scores, one or two. Sets the scores of other groups to
// -infinity.
void keep_groups(int64_t num_groups, int64_t num_kept, int64_t num_scored, std::vector<float> &scores) {
  const int64_t size = scores.size() / num_groups;
  std::vector<float> sums(num_groups);
  for (int64_t group = 0; group < num_groups; ++group) {
    float best = -INFINITY, second = -INFINITY;
    for (int64_t i = group * size; i < (group + 1) * size; ++i) {
      if (scores[i] > best)
        second = best, best = scores[i];
      else
        second = std::max(second, scores[i]);
    }
    sums[group] = num_scored == 1 ? best : best + second;
  }
  std::vector<int64_t> kept(num_kept);
  choose(sums, num_kept, kept.data());
  for (int64_t group = 0; group < num_groups; ++group)
    if (std::find(kept.begin(), kept.end(), group) == kept.end())
      std::fill_n(scores.begin() + group * size, size, -INFINITY);
}

}  // namespace

// logits [T, N]; weights and chosen [T, K]
OPERATOR(route, (const void *logits, Dtype dtype, float *weights, int64_t *chosen, int64_t num_tokens, int64_t num_chosen,
                 int64_t num_experts, bool renormalise)) {
  parallel_for(divide_up(num_tokens, TOKENS_OF_CHUNK), [&](int64_t chunk) {
    std::vector<float> row(num_experts);
    for (int64_t token = chunk * TOKENS_OF_CHUNK; token < std::min((chunk + 1) * TOKENS_OF_CHUNK, num_tokens); ++token) {
      float *weight = weights + token * num_chosen;
      const int64_t *expert = chosen + token * num_chosen;
      read_floats(logits, dtype, token * num_experts, num_experts, row.data());
      choose(row, num_chosen, chosen + token * num_chosen);
      const float highest = row[expert[0]];
      float total = 0, total_chosen = 0;
      for (float &logit : row) total += logit = exp_scalar(logit - highest);
      for (int64_t rank = 0; rank < num_chosen; ++rank) total_chosen += weight[rank] = row[expert[rank]];
      for (int64_t rank = 0; rank < num_chosen; ++rank) weight[rank] /= renormalise ? total_chosen : total;
    }
  });
}

// logits [T, N], correction [N]; weights and chosen [T, K]
OPERATOR(route_corrected, (const float *logits, const float *correction, float *weights, int64_t *chosen, int64_t num_tokens, int64_t num_chosen,
                           int64_t num_experts, bool renormalise, bool is_softmax, int64_t num_groups, int64_t num_kept, int64_t num_scored)) {
  parallel_for(divide_up(num_tokens, TOKENS_OF_CHUNK), [&](int64_t chunk) {
    std::vector<float> scores(num_experts), corrected(num_experts);
    for (int64_t token = chunk * TOKENS_OF_CHUNK; token < std::min((chunk + 1) * TOKENS_OF_CHUNK, num_tokens); ++token) {
      float *weight = weights + token * num_chosen;
      const int64_t *expert = chosen + token * num_chosen;
      score(logits + token * num_experts, is_softmax, scores);
      for (int64_t i = 0; i < num_experts; ++i) corrected[i] = scores[i] + correction[i];
      if (num_kept < num_groups) keep_groups(num_groups, num_kept, num_scored, corrected);
      choose(corrected, num_chosen, chosen + token * num_chosen);
      float total = LEAST_SUM;
      for (int64_t rank = 0; rank < num_chosen; ++rank) total += weight[rank] = scores[expert[rank]];
      if (renormalise)
        for (int64_t rank = 0; rank < num_chosen; ++rank) weight[rank] /= total;
    }
  });
}

// x [T, row_bytes], chosen [T, K]; rows [T * K, row_bytes], places [T, K], starts [N + 1]
OPERATOR(group_rows, (const char *x, const int64_t *chosen, char *rows, int64_t *places, int64_t *starts, int64_t num_tokens,
                      int64_t num_chosen, int64_t num_experts, int64_t row_bytes)) {
  std::fill_n(starts, num_experts + 1, 0);
  for (int64_t pair = 0; pair < num_tokens * num_chosen; ++pair) ++starts[chosen[pair] + 1];
  std::partial_sum(starts, starts + num_experts + 1, starts);
  thread_local std::vector<int64_t> next;
  next.assign(starts, starts + num_experts);
  for (int64_t pair = 0; pair < num_tokens * num_chosen; ++pair) {
    places[pair] = next[chosen[pair]]++;
    std::copy_n(x + pair / num_chosen * row_bytes, row_bytes, rows + places[pair] * row_bytes);
  }
}

// parts [T * K, E] and out [T, E] of one dtype, weights and places [T, K]
OPERATOR(combine_rows, (const void *parts, Dtype dtype, const float *weights, const int64_t *places, void *out, int64_t num_tokens,
                        int64_t num_chosen, int64_t channels)) {
  const int64_t tokens_per_chunk = rows_of_chunk(CHUNK_CHANNELS, channels * num_chosen);
  parallel_for(divide_up(num_tokens, tokens_per_chunk), [&](int64_t chunk) {
    thread_local std::vector<int64_t> pairs;  // the pairs of a token, ordered by expert: `places` has the same order
    for (int64_t token = chunk * tokens_per_chunk; token < std::min((chunk + 1) * tokens_per_chunk, num_tokens); ++token) {
      pairs.resize(num_chosen);
      std::iota(pairs.begin(), pairs.end(), token * num_chosen);
      std::sort(pairs.begin(), pairs.end(), [&](int64_t a, int64_t b) { return places[a] < places[b]; });
      for (int64_t first = 0; first < channels; first += PIECE) {
        const int64_t count = std::min(PIECE, channels - first);
        float sum[PIECE] = {}, part[PIECE];
        for (const int64_t pair : pairs) {
          read_floats(parts, dtype, places[pair] * channels + first, count, part);
          for (int64_t i = 0; i < count; ++i) sum[i] += weights[pair] * part[i];
        }
        write_floats(out, dtype, token * channels + first, count, sum);
      }
    }
  });
}
