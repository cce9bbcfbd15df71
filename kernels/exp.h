// exp and tanh of 16 lanes; every lane is computed alike, wherever it stands in a row.
#pragma once

#include "simd.h"

// exp(x) = 2^n (1 + q): n whole, q = exp(r) - 1 for |r| <= ln(2) / 2, its Taylor series to degree 7 (the rest is below 2^-28 of q).
struct Exponential {
  Floats power, q;
};

inline Exponential split_exp(Floats x) {
  // Beyond these 2^n is 0 or infinite: so is exp in float32, but for its denormals. NaN passes.
  x = smaller(splat(88.8f), larger(splat(-88.1f), x));
  const Ints n = round_to_ints(multiply(x, splat(1.44269504f)));
  // ln(2) in two parts, the first of few digits, so that n times it is exact
  const Floats r = multiply_add(to_floats(n), splat(2.12194440e-4f), multiply_add(to_floats(n), splat(-0.693359375f), x));
  Floats series = splat(1 / 5040.0f);
  for (float coefficient : {1 / 720.0f, 1 / 120.0f, 1 / 24.0f, 1 / 6.0f, 0.5f}) series = multiply_add(series, r, splat(coefficient));
  return {as_floats(shift_left<23>(add(n, splat(127)))), multiply_add(multiply(r, r), series, r)};
}

// Within 2 units of the last place; below 2^-127 it is 0, and exp(0) is 1 exactly.
inline Floats exp(Floats x) {
  const Exponential e = split_exp(x);
  return multiply(e.power, add(splat(1.0f), e.q));
}

inline float exp_scalar(float x) { return first(exp(splat(x))); }

// t / (t + 2) with t = exp(2x) - 1, which has no cancellation for small x
inline Floats tanh(Floats x) {
  const Exponential e = split_exp(smaller(splat(20.0f), larger(splat(-20.0f), add(x, x))));
  const Floats t = multiply_add(e.power, e.q, subtract(e.power, splat(1.0f)));
  return divide(t, add(t, splat(2.0f)));
}
