// Draws one token per row of logits without sorting the vocabulary. kernels/sampling/reference.py is the specification.
//
// Sums are added in another order than in the reference. If a sum is within TOLERANCE of the value that it is compared
// with, the result of the row is UNDECIDED. All other results are equal to the reference.
#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include "../operator.h"
#include "../rows.h"
#include "../threads.h"

namespace {

constexpr int64_t UNDECIDED = -1;
constexpr double TOLERANCE = 1e-10;  // of a probability: with 2^17 tokens the rounding error of sums is at most 2^17 * 2^-53 = 1.5e-11
constexpr int64_t NUM_BUCKETS = 4096;
constexpr double BUCKETS_PER_UNIT = 64;  // per unit of logit / temperature
constexpr int64_t BLOCK = 512;           // tokens per partial sum

struct Settings {  // one row of the settings tensor
  double temperature, top_k, top_p, min_p, uniform;
};

// exp(x) for x <= 0, within 4e-16: 2^n times the Taylor series of the remainder. Plain arithmetic, which the compiler
// vectorises.
inline double exp_negative(double x) {
  constexpr double ROUND = 0x1.8p52;  // adding it leaves an integer in the lowest bits
  const double clamped = std::max(x, -700.0), shifted = clamped * 1.4426950408889634 + ROUND, n = shifted - ROUND;
  const double r = clamped - n * 6.93147180369123816490e-01 - n * 1.90821492927058770002e-10;  // ln(2) in two parts
  double series = 1.0 / 6227020800;
  for (double factorial : {479001600., 39916800., 3628800., 362880., 40320., 5040., 720., 120., 24., 6., 2., 1., 1.})
    series = series * r + 1.0 / factorial;
  const double power = std::bit_cast<double>((std::bit_cast<int64_t>(shifted) + 1023) << 52);
  return x < -700.0 ? 0.0 : series * power;
}

// In 16 lanes, because the compiler does not reorder float operations by itself.
float largest(const float *x, int64_t count) {
  float parts[16];
  std::fill_n(parts, 16, -std::numeric_limits<float>::infinity());
  int64_t i = 0;
  for (; i + 16 <= count; i += 16)
    for (int lane = 0; lane < 16; ++lane) parts[lane] = x[i + lane] > parts[lane] ? x[i + lane] : parts[lane];
  for (; i < count; ++i) parts[0] = std::max(parts[0], x[i]);
  return *std::max_element(parts, parts + 16);
}

double sum(const double *x, int64_t count) {
  double parts[8] = {};
  int64_t i = 0;
  for (; i + 8 <= count; i += 8)
    for (int lane = 0; lane < 8; ++lane) parts[lane] += x[i + lane];
  for (; i < count; ++i) parts[0] += x[i];
  return ((parts[0] + parts[1]) + (parts[2] + parts[3])) + ((parts[4] + parts[5]) + (parts[6] + parts[7]));
}

// Tokens are ordered by falling logit, then by rising id. The tokens up to RowSampler::last_ may be drawn.
struct Token {
  double scaled;
  int64_t id;

  bool operator<(const Token &other) const { return scaled != other.scaled ? scaled > other.scaled : id < other.id; }
};

class RowSampler {
 public:
  int64_t draw(const float *logits, int64_t vocab_size, const Settings &settings) {
    if (!scale(logits, vocab_size, settings.temperature)) return UNDECIDED;
    const bool has_top_k = settings.top_k > 0 && settings.top_k < vocab_size, has_top_p = settings.top_p < 1;
    last_ = {-std::numeric_limits<double>::infinity(), vocab_size};
    if ((has_top_k || has_top_p) && !fill_buckets()) return UNDECIDED;
    if (has_top_k) keep_top_k(static_cast<int64_t>(settings.top_k));
    if (has_top_p && !keep_top_p(settings.top_p)) return UNDECIDED;
    if (settings.min_p > 0 && !keep_min_p(settings.min_p)) return UNDECIDED;
    if (has_top_k || has_top_p) drop_after(last_);
    return invert(settings.uniform);
  }

 private:
  std::vector<double> scaled_, weights_;  // (logit - largest) / temperature, and exp of it
  std::vector<uint16_t> bucket_of_;       // the bucket of each token, by falling logit
  std::vector<int64_t> counts_;           // number of tokens per bucket
  std::vector<double> masses_;            // sum of weights per bucket
  std::vector<Token> candidates_;         // tokens of one bucket
  int64_t last_bucket_ = NUM_BUCKETS - 1;
  Token last_;

  bool scale(const float *logits, int64_t vocab_size, double temperature) {
    const float highest = largest(logits, vocab_size);
    scaled_.resize(vocab_size), weights_.resize(vocab_size);
    for (int64_t id = 0; id < vocab_size; ++id) {
      scaled_[id] = (static_cast<double>(logits[id]) - highest) / temperature;
      weights_[id] = exp_negative(scaled_[id]);
    }
    return std::isfinite(highest);
  }

  void drop_after(const Token last) {
    for (int64_t id = 0; id < static_cast<int64_t>(scaled_.size()); ++id) {
      const bool kept = (scaled_[id] > last.scaled) | ((scaled_[id] == last.scaled) & (id <= last.id));
      weights_[id] = kept ? weights_[id] : 0.0;
    }
  }

  // Returns false if a logit is NaN: NaN would be counted, but it has no position in the order of tokens.
  bool fill_buckets() {
    bucket_of_.resize(scaled_.size());
    counts_.assign(NUM_BUCKETS, 0), masses_.assign(NUM_BUCKETS, 0.0);
    for (size_t id = 0; id < scaled_.size(); ++id)
      bucket_of_[id] = static_cast<uint16_t>(std::min(NUM_BUCKETS - 1.0, -scaled_[id] * BUCKETS_PER_UNIT));
    for (size_t id = 0; id < scaled_.size(); ++id) {
      ++counts_[bucket_of_[id]];
      masses_[bucket_of_[id]] += weights_[id];
    }
    last_bucket_ = NUM_BUCKETS - 1;
    return !std::isnan(masses_.back());
  }

  // Sets `candidates_` to the tokens of a bucket that are still kept.
  void gather(int64_t bucket) {
    candidates_.clear();
    for (size_t id = 0; id < scaled_.size(); ++id)
      if (bucket_of_[id] == bucket && scaled_[id] >= last_.scaled) candidates_.push_back({scaled_[id], static_cast<int64_t>(id)});
  }

  // Also keeps tokens with the same logit as the last one.
  void keep_top_k(int64_t k) {
    int64_t bucket = 0;
    for (; k > counts_[bucket]; ++bucket) k -= counts_[bucket];
    gather(bucket);
    std::nth_element(candidates_.begin(), candidates_.begin() + (k - 1), candidates_.end());
    last_.scaled = candidates_[k - 1].scaled;
    last_bucket_ = bucket;
    masses_[bucket] = 0;
    for (const Token &token : candidates_)
      if (token.scaled >= last_.scaled) masses_[bucket] += weights_[token.id];
  }

  bool keep_top_p(double p) {
    const double total = sum(masses_.data(), last_bucket_ + 1), limit = p * total, tolerance = TOLERANCE * total;
    double before = 0;
    int64_t bucket = 0;
    for (; bucket < last_bucket_ && before + masses_[bucket] < limit; ++bucket) before += masses_[bucket];
    gather(bucket);
    std::sort(candidates_.begin(), candidates_.end());
    for (const Token &token : candidates_) {
      if (before >= limit + tolerance) return true;
      if (!(before <= limit - tolerance)) return false;
      last_ = token;
      before += weights_[token.id];
    }
    return bucket == last_bucket_ || before >= limit + tolerance;
  }

  bool keep_min_p(double min_p) {
    for (size_t id = 0; id < scaled_.size(); ++id) {
      if (scaled_[id] == 0) continue;  // the most likely token
      if (std::abs(weights_[id] - min_p) <= TOLERANCE * min_p) return false;
      if (weights_[id] < min_p) weights_[id] = 0;
    }
    return true;
  }

  // Returns the first token at which the cumulative weight exceeds the uniform number times the total weight.
  int64_t invert(double uniform) {
    const int64_t vocab_size = weights_.size();
    const double total = sum(weights_.data(), vocab_size), target = uniform * total, tolerance = TOLERANCE * total;
    double before = 0;
    for (int64_t first = 0; first < vocab_size; first += BLOCK) {
      const int64_t count = std::min(BLOCK, vocab_size - first);
      const double block = sum(weights_.data() + first, count);
      if (before + block > target) {
        for (int64_t id = first; id < first + count; ++id) {
          const double after = before + weights_[id];
          if (after > target) return before <= target - tolerance && after >= target + tolerance ? id : UNDECIDED;
          before = after;
        }
        return UNDECIDED;
      }
      before += block;
    }
    return UNDECIDED;
  }
};

// Reads a row in blocks, which stay in the first-level cache as floats, and searches only the block of the largest.
int64_t most_likely(const void *logits, Dtype dtype, int64_t first, int64_t vocab_size) {
  constexpr int64_t SIZE = 1024;
  float floats[SIZE], highest = -std::numeric_limits<float>::infinity();
  int64_t block_of_highest = 0;
  const auto read = [&](int64_t block) {
    const int64_t count = std::min(SIZE, vocab_size - block);
    read_floats(logits, dtype, first + block, count, floats);
    return count;
  };
  for (int64_t block = 0; block < vocab_size; block += SIZE)
    if (const float value = largest(floats, read(block)); value > highest) highest = value, block_of_highest = block;
  const float *end = floats + read(block_of_highest), *position = std::find<const float *>(floats, end, highest);
  return position == end ? 0 : block_of_highest + (position - floats);  // 0: all logits are NaN
}

}  // namespace

// logits [R, V]; tokens [R].
OPERATOR(most_likely, (const void *logits, Dtype dtype, int64_t *tokens, int64_t num_rows, int64_t vocab_size)) {
  parallel_for(num_rows, [&](int64_t row) { tokens[row] = most_likely(logits, dtype, row * vocab_size, vocab_size); });
}

// logits [R, V]; tokens [R], -1 where the result is undecided.
OPERATOR(draw, (const float *logits, const double *settings, int64_t *tokens, int64_t num_rows, int64_t vocab_size)) {
  parallel_for(num_rows, [&](int64_t row) {
    thread_local RowSampler sampler;
    tokens[row] = sampler.draw(logits + row * vocab_size, vocab_size, reinterpret_cast<const Settings *>(settings)[row]);
  });
}
