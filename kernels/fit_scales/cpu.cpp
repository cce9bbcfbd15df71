// Chooses scales and zero points of 4-bit codes by search. kernels/fit_scales/reference.py is the specification: each
// operation is its operation, in its order, so that all instruction sets choose the same scales.
#include <algorithm>
#include <limits>
#include <vector>

#include "../elements.h"
#include "../operator.h"
#include "../threads.h"

namespace {

constexpr int64_t CHUNK_CHANNELS = 1 << 13;  // channels that justify another thread
constexpr int MOST_STEPS = 15, LEAST_STEPS = 7;   // between the extreme and the zero point

float rounded_scale(float scale, Dtype dtype) {
  if (dtype == Dtype::bfloat16)
    scale = from_bfloat16(to_bfloat16(std::min(scale, from_bfloat16(0x7f7f))));
  else if (dtype == Dtype::float16)
    scale = _cvtsh_ss(_cvtss_sh(std::min(scale, 65504.0f), _MM_FROUND_TO_NEAREST_INT));
  else
    scale = std::min(scale, std::numeric_limits<float>::max());
  return scale < std::numeric_limits<float>::min() ? 1.0f : scale;
}

// A group's numbers, padded with zeros to a multiple of 16, and the best scale so far.
class Group {
public:
  Group(const float *x, int64_t count) : x_(x), count_(count) {
    Floats low = splat(0.0f), negative_high = splat(0.0f);
    for (int64_t i = 0; i < count; i += LANES) {
      low = smaller(low, load(x + i));
      negative_high = smaller(negative_high, subtract(splat(0.0f), load(x + i)));
    }
    low_ = -largest(subtract(splat(0.0f), low));
    high_ = largest(subtract(splat(0.0f), negative_high));
  }

  float low() const { return low_; }
  float high() const { return high_; }
  float scale() const { return scale_; }
  float zero() const { return zero_; }

  void consider(float scale, float zero) {
    const float error = squared_error(scale, zero);
    if (is_first_ || error < error_) scale_ = scale, zero_ = zero, error_ = error;
    is_first_ = false;
  }

private:
  float squared_error(float scale, float zero) const {
    const Floats inverse = splat(1 / scale), lowest = splat(-zero), highest = splat(15 - zero);
    Floats total = splat(0.0f);
    for (int64_t i = 0; i < count_; i += LANES) {
      const Floats ratio = multiply(load(x_ + i), inverse);
      const Floats code = to_floats(round_to_ints(smaller(larger(ratio, lowest), highest)));
      const Floats error = subtract(code, ratio);
      total = add(total, multiply(error, error));
    }
    return sum(total) * (scale * scale);
  }

  const float *x_;
  int64_t count_;
  float low_, high_, scale_ = 1, zero_ = 0, error_ = 0;
  bool is_first_ = true;
};

}  // namespace

// weight: groups of `size` numbers, one after the other. scales and zero_points: one per group; zero_points is not
// written if the codes are symmetric.
OPERATOR(fit_scales, (const void *weight, Dtype dtype, int64_t num_groups, int64_t size, bool is_symmetric, Dtype scale_dtype, float *scales, int8_t *zero_points)) {
  const int64_t chunk_size = rows_of_chunk(CHUNK_CHANNELS, size), padded = divide_up(size, LANES) * LANES;
  parallel_for(divide_up(num_groups, chunk_size), [&](int64_t chunk) {
    std::vector<float> x(padded);
    for (int64_t g = chunk * chunk_size; g < std::min((chunk + 1) * chunk_size, num_groups); ++g) {
      read_floats(weight, dtype, g * size, size, x.data());
      Group group(x.data(), padded);
      const bool is_negative = -group.low() > group.high();
      const float magnitude = std::max(-group.low(), group.high());
      if (is_symmetric) {
        const float sign = is_negative ? -1.0f : 1.0f;
        group.consider(sign * rounded_scale(magnitude / 7, scale_dtype), 8);
        group.consider(-sign * rounded_scale(magnitude / 8, scale_dtype), 8);
      } else {
        for (int steps = MOST_STEPS; steps >= LEAST_STEPS; --steps)
          group.consider(rounded_scale(magnitude / steps, scale_dtype), is_negative ? steps : 15 - steps);
        zero_points[g] = static_cast<int8_t>(group.zero());
      }
      scales[g] = group.scale();
    }
  });
}
