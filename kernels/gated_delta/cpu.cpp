// The gated delta rule of recurrent layers. kernels/gated_delta/reference.py is the specification.
//
// All tokens of a column are computed by one fixed list of operations in their order, so that no cut of a prompt, batch
// or thread changes a bit.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "../elements.h"
#include "../exp.h"
#include "../operator.h"
#include "../threads.h"

namespace {

constexpr int64_t COLUMNS = 2 * LANES;     // of a panel
constexpr int64_t MAX_KEY_CHANNELS = 256;  // a panel of them is as large as the first cache
constexpr int64_t TOKENS = LANES;          // whose gates and keys are computed together
constexpr int64_t CHUNK_WORK = 1 << 14;    // numbers of the state, times tokens, that justify another thread

struct Call {
  const void *qkv, *decay, *write_gate;
  const float *decay_log, *decay_bias;
  float *states;
  const int64_t *query_starts, *reads, *writes, *ends;
  void *out;
  int64_t num_heads, num_key_heads, key_channels, value_channels, group;
};

// ln(1 + x) for x from 0 to 1: 2 atanh(x / (2 + x)), by its Taylor series (error below 2^-30).
Floats log1p(Floats x) {
  const Floats s = divide(x, add(splat(2.0f), x)), square = multiply(s, s);
  Floats series = splat(1 / 15.0f);
  for (float coefficient : {1 / 13.0f, 1 / 11.0f, 1 / 9.0f, 1 / 7.0f, 0.2f, 1 / 3.0f, 1.0f}) series = multiply_add(series, square, splat(coefficient));
  return multiply(add(s, s), series);
}

Floats softplus(Floats x) {
  const Floats zero = splat(0.0f);
  return add(larger(zero, x), log1p(exp(smaller(x, subtract(zero, x)))));  // NaN stays NaN
}

// The values that all columns of a head share, for up to TOKENS tokens.
struct Block {
  alignas(64) float keys[TOKENS][MAX_KEY_CHANNELS], queries[TOKENS][MAX_KEY_CHANNELS];
  alignas(64) float decays[TOKENS], write_gates[TOKENS];
};

template <Dtype DTYPE> class Panel {
public:
  Panel(const Call &call, int64_t head, int64_t number) : call(call), head(head), number(number) {}

  // Computes all tokens of a sequence for these columns.
  void advance(int64_t sequence) {
    const int64_t start = call.query_starts[sequence], end = call.query_starts[sequence + 1];
    const int64_t read = call.reads[sequence], write = call.writes[sequence], kept = call.ends[sequence];
    alignas(64) float working[MAX_KEY_CHANNELS * COLUMNS];
    float *const stored = write < 0 ? nullptr : slot(write);
    const float *from = read < 0 ? working : slot(read);
    if (read < 0) std::fill_n(working, size(), 0.0f);
    if (stored && kept <= start && stored != from) std::memcpy(stored, from, size() * sizeof(float));
    for (int64_t first = start; first < end; first += TOKENS) {
      const int64_t count = std::min(TOKENS, end - first);
      prepare(first, count);
      for (int64_t t = 0; t < count; ++t) {
        float *const to = stored && first + t == kept - 1 ? stored : working;
        step(first + t, t, from, to);
        from = to;
      }
    }
  }

private:
  int64_t size() const { return call.key_channels * COLUMNS; }
  float *slot(int64_t index) const {
    const int64_t num_panels = divide_up(call.value_channels, COLUMNS);
    return call.states + ((index * call.num_heads + head) * num_panels + number) * size();
  }
  const char *at(const void *rows, int64_t element) const { return static_cast<const char *>(rows) + element * ELEMENT_BYTES<DTYPE>; }
  int64_t key_size() const { return call.num_key_heads * call.key_channels; }
  int64_t row_of(int64_t t) const { return t * (2 * key_size() + call.num_heads * call.value_channels); }

  void prepare(int64_t first, int64_t count) {
    alignas(64) float decays[TOKENS] = {}, write_gates[TOKENS] = {};
    const int64_t key = head / call.group % call.num_key_heads * call.key_channels;
    for (int64_t t = 0; t < count; ++t) {
      const int64_t gate = (first + t) * call.num_heads + head;
      decays[t] = ::first(load_elements<DTYPE>(at(call.decay, gate), 0, 1));
      write_gates[t] = ::first(load_elements<DTYPE>(at(call.write_gate, gate), 0, 1));
      normalise(at(call.qkv, row_of(first + t) + key), block.queries[t]);
      normalise(at(call.qkv, row_of(first + t) + key_size() + key), block.keys[t]);
    }
    const Floats zero = splat(0.0f), rate = exp(splat(call.decay_log[head]));
    const Floats steps = multiply(rate, softplus(add(load(decays), splat(call.decay_bias[head]))));
    store(block.decays, exp(subtract(zero, steps)));
    store(block.write_gates, divide(splat(1.0f), add(splat(1.0f), exp(subtract(zero, load(write_gates))))));
  }

  void normalise(const void *from, float *to) const {
    Floats squares = splat(0.0f);
    for (int64_t i = 0; i < call.key_channels; i += LANES) {
      const Floats x = load_elements<DTYPE>(from, i, call.key_channels);
      squares = multiply_add(x, x, squares);
      store(to + i, x);
    }
    const Floats inverse = splat(1.0f / std::sqrt(sum(squares) + 1e-6f));
    for (int64_t i = 0; i < call.key_channels; i += LANES) store(to + i, multiply(load(to + i), inverse));
  }

  // Applies token t of the step, number `i` of the block. A column's sums of even and of odd channels are added last: one
  // chain of additions would wait for each result.
  void step(int64_t t, int64_t i, const float *from, float *to) const {
    const float *keys = block.keys[i], *queries = block.queries[i];
    const Floats decay = splat(block.decays[i]), write_gate = splat(block.write_gates[i]);
    Floats even[2] = {splat(0.0f), splat(0.0f)}, odd[2] = {splat(0.0f), splat(0.0f)};
    int64_t n = 0;
    for (; n + 1 < call.key_channels; n += 2)
      UNROLL
      for (int64_t v = 0; v < 2; ++v) {
        even[v] = multiply_add(splat(keys[n]), load(from + n * COLUMNS + v * LANES), even[v]);
        odd[v] = multiply_add(splat(keys[n + 1]), load(from + (n + 1) * COLUMNS + v * LANES), odd[v]);
      }
    Floats deltas[2];
    for (int64_t v = 0; v < 2; ++v) {
      if (n < call.key_channels) even[v] = multiply_add(splat(keys[n]), load(from + n * COLUMNS + v * LANES), even[v]);
      const int64_t column = number * COLUMNS + v * LANES;
      const void *value = at(call.qkv, row_of(t) + 2 * key_size() + head * call.value_channels);
      const Floats known = multiply(decay, add(even[v], odd[v]));
      deltas[v] = multiply(write_gate, subtract(load_elements<DTYPE>(value, column, call.value_channels), known));
      even[v] = odd[v] = splat(0.0f);
    }
    const auto update = [&](int64_t channel, int64_t v) {
      const int64_t place = channel * COLUMNS + v * LANES;
      const Floats state = multiply_add(splat(keys[channel]), deltas[v], multiply(decay, load(from + place)));
      store(to + place, state);
      return state;
    };
    for (n = 0; n + 1 < call.key_channels; n += 2)
      UNROLL
      for (int64_t v = 0; v < 2; ++v) {
        even[v] = multiply_add(splat(queries[n]), update(n, v), even[v]);
        odd[v] = multiply_add(splat(queries[n + 1]), update(n + 1, v), odd[v]);
      }
    const Floats scale = splat(1.0f / std::sqrt(static_cast<float>(call.key_channels)));
    for (int64_t v = 0; v < 2; ++v) {
      if (n < call.key_channels) even[v] = multiply_add(splat(queries[n]), update(n, v), even[v]);
      void *out = const_cast<char *>(at(call.out, (t * call.num_heads + head) * call.value_channels));
      store_elements<DTYPE>(out, number * COLUMNS + v * LANES, call.value_channels, rounded<DTYPE>(multiply(scale, add(even[v], odd[v]))));
    }
  }

  const Call &call;
  const int64_t head, number;
  Block block;
};

}  // namespace

// qkv, decay, write_gate and out of one dtype; states [slots, heads, panels, key channels, COLUMNS]. Rows of `out` after
// the last sequence are not written.
OPERATOR(gated_delta, (const void *qkv, const void *decay, const void *write_gate, const float *decay_log, const float *decay_bias,
                       float *states, const int64_t *query_starts, const int64_t *reads, const int64_t *writes,
                       const int64_t *ends, void *out, Dtype dtype, int64_t num_sequences, int64_t num_heads, int64_t num_key_heads,
                       int64_t key_channels, int64_t value_channels, int64_t group)) {
  const Call call{qkv,    decay, write_gate, decay_log, decay_bias,    states,       query_starts,   reads,
                  writes, ends,  out,        num_heads, num_key_heads, key_channels, value_channels, group};
  const int64_t num_panels = divide_up(value_channels, COLUMNS), count = num_sequences * num_heads * num_panels;
  const int64_t tokens = divide_up(query_starts[num_sequences], std::max<int64_t>(num_sequences, 1));  // mean of a sequence
  const int64_t size = rows_of_chunk(CHUNK_WORK, tokens * key_channels * COLUMNS);
  parallel_for(divide_up(count, size), [&](int64_t chunk) {
    for (int64_t unit = chunk * size; unit < std::min((chunk + 1) * size, count); ++unit) {
      const int64_t sequence = unit / (num_heads * num_panels), panel = unit % (num_heads * num_panels);
      if (query_starts[sequence] == query_starts[sequence + 1]) continue;
      for_dtype(dtype, [&]<Dtype DTYPE>() { Panel<DTYPE>(call, panel / num_panels, panel % num_panels).advance(sequence); });
    }
  });
}
