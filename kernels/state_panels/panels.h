// Recurrent layers whose state is a matrix for each head. A slot has the matrices of all heads, by panels of COLUMNS
// columns. One thread computes all tokens of a sequence for a panel.
//
// All tokens of a column are computed by one fixed list of operations in their order, so that no cut of a prompt, batch
// or thread changes a bit.
#pragma once

#include <algorithm>
#include <cstring>

#include "../elements.h"
#include "../exp.h"
#include "../threads.h"

constexpr int64_t VECTORS = 2;                // of a panel's row
constexpr int64_t COLUMNS = VECTORS * LANES;  // of a panel
constexpr int64_t MAX_ROWS = 256;             // a panel of them is as large as the first cache
constexpr int64_t TOKENS = LANES;             // whose gates are computed together
constexpr int64_t CHUNK_WORK = 1 << 14;       // numbers of the state, times tokens, that justify another thread

// States [slots, heads, panels, rows, COLUMNS], and the tokens and slots of sequences as in `short_conv`.
struct States {
  float *numbers;
  const int64_t *query_starts, *reads, *writes, *ends;
  int64_t num_sequences, num_heads, num_rows, num_columns;

  int64_t num_panels() const { return divide_up(num_columns, COLUMNS); }  // of a head
  int64_t panel_size() const { return num_rows * COLUMNS; }
};

struct Panel {
  const States &states;
  int64_t head, number;

  float *in_slot(int64_t slot) const {
    return states.numbers + ((slot * states.num_heads + head) * states.num_panels() + number) * states.panel_size();
  }
  int64_t column(int64_t v) const { return number * COLUMNS + v * LANES; }  // the first of vector `v`
};

// ln(1 + x) for x from 0 to 1: 2 atanh(x / (2 + x)), by its Taylor series (error below 2^-30).
inline Floats log1p(Floats x) {
  const Floats s = divide(x, add(splat(2.0f), x)), square = multiply(s, s);
  Floats series = splat(1 / 15.0f);
  for (float coefficient : {1 / 13.0f, 1 / 11.0f, 1 / 9.0f, 1 / 7.0f, 0.2f, 1 / 3.0f, 1.0f}) series = multiply_add(series, square, splat(coefficient));
  return multiply(add(s, s), series);
}

inline Floats softplus(Floats x) {
  const Floats zero = splat(0.0f);
  return add(larger(zero, x), log1p(exp(smaller(x, subtract(zero, x)))));  // NaN stays NaN
}

// The address of element number `index` of rows of the dtype.
template <Dtype DTYPE> const char *address(const void *rows, int64_t index) {
  return static_cast<const char *>(rows) + index * ELEMENT_BYTES<DTYPE>;
}

// The head's gates [tokens, heads] of `count` tokens from `first`; 0 after them.
template <Dtype DTYPE> Floats load_gates(const Panel &panel, const void *gates, int64_t first, int64_t count) {
  alignas(64) float of_tokens[TOKENS] = {};
  for (int64_t i = 0; i < count; ++i) {
    const int64_t index = (first + i) * panel.states.num_heads + panel.head;
    of_tokens[i] = ::first(load_elements<DTYPE>(address<DTYPE>(gates, index), 0, 1));
  }
  return load(of_tokens);
}

// Stores the output of token t [tokens, heads * columns], rounded to the dtype.
template <Dtype DTYPE> void store_output(const Panel &panel, void *out, int64_t t, const Floats (&columns)[VECTORS]) {
  const int64_t count = panel.states.num_columns;
  void *row = const_cast<char *>(address<DTYPE>(out, (t * panel.states.num_heads + panel.head) * count));
  for (int64_t v = 0; v < VECTORS; ++v) store_elements<DTYPE>(row, panel.column(v), count, rounded<DTYPE>(columns[v]));
}

// Writes decay * M + keys deltas^T to `to`, where M is the panel `from` and decay_of(row) is the decay of a row. Returns
// the transposed result times the queries in `products`. A column's sums of even and of odd rows are added last: one chain of additions would wait for each
// result. The operands of both vectors do not fit in AVX2's registers: one vector after the other takes 0.7 of the time.
template <class Decay>
void update_panel(const float *from, float *to, int64_t num_rows, Decay decay_of, const float *keys, const Floats (&deltas)[VECTORS],
                  const float *queries, Floats (&products)[VECTORS]) {
  for (int64_t v = 0; v < VECTORS; ++v) {
    Floats even = splat(0.0f), odd = splat(0.0f);
    const auto add_row = [&, delta = deltas[v], decay_of](int64_t row, Floats &sum) {
      const int64_t place = row * COLUMNS + v * LANES;
      const Floats state = multiply_add(splat(keys[row]), delta, multiply(decay_of(row), load(from + place)));
      store(to + place, state);
      sum = multiply_add(splat(queries[row]), state, sum);
    };
    int64_t n = 0;
    for (; n + 1 < num_rows; n += 2) add_row(n, even), add_row(n + 1, odd);
    if (n < num_rows) add_row(n, even);
    products[v] = add(even, odd);
  }
}

// Computes all tokens of a sequence for one panel. rule.prepare(first, count) computes the gates of at most TOKENS tokens.
// rule.step(t, i, from, to) computes token t, number `i` of them: it reads the panel `from`, and writes the panel `to`,
// which may be the same, and the token's output.
template <class Rule> void advance(const Panel &panel, int64_t sequence, Rule &&rule) {
  const States &states = panel.states;
  const int64_t start = states.query_starts[sequence], end = states.query_starts[sequence + 1], size = states.panel_size();
  const int64_t read = states.reads[sequence], write = states.writes[sequence], kept = states.ends[sequence];
  alignas(64) float working[MAX_ROWS * COLUMNS];
  float *const stored = write < 0 ? nullptr : panel.in_slot(write);
  const float *from = read < 0 ? working : panel.in_slot(read);
  if (read < 0) std::fill_n(working, size, 0.0f);
  if (stored && kept <= start && stored != from) std::memcpy(stored, from, size * sizeof(float));
  for (int64_t first = start; first < end; first += TOKENS) {
    const int64_t count = std::min(TOKENS, end - first);
    rule.prepare(first, count);
    for (int64_t i = 0; i < count; ++i) {
      float *const to = stored && first + i == kept - 1 ? stored : working;
      rule.step(first + i, i, from, to);
      from = to;
    }
  }
}

// Computes all sequences. `call.states` are the states, and Rule<DTYPE>(call, panel) is the rule of `advance`.
template <template <Dtype> class Rule, class Call> void advance_all(Dtype dtype, const Call &call) {
  const States &states = call.states;
  const int64_t num_panels = states.num_panels(), units = states.num_heads * num_panels, count = states.num_sequences * units;
  const int64_t mean_tokens = divide_up(states.query_starts[states.num_sequences], std::max<int64_t>(states.num_sequences, 1));
  const int64_t size = rows_of_chunk(CHUNK_WORK, mean_tokens * states.panel_size());
  parallel_for(divide_up(count, size), [&](int64_t chunk) {
    for (int64_t unit = chunk * size; unit < std::min((chunk + 1) * size, count); ++unit) {
      const int64_t sequence = unit / units;
      const Panel panel{states, unit % units / num_panels, unit % num_panels};
      if (states.query_starts[sequence] == states.query_starts[sequence + 1]) continue;
      for_dtype(dtype, [&]<Dtype DTYPE>() { advance(panel, sequence, Rule<DTYPE>(call, panel)); });
    }
  });
}
