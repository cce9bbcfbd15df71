// exp and tanh of 16 lanes. The result of a lane does not depend on its index.
#pragma once

#include "simd.h"

// exp(x) = 2^n (1 + q): n is an integer, q = exp(r) - 1 for |r| <= ln(2) / 2, by its Taylor series to degree 7 (error
// below 2^-28 of q).
struct Exponential {
  Floats power, q;
};

inline Exponential split_exp(Floats x) {
  // Beyond these bounds 2^n is 0 or infinity, and so is exp in float32, except for denormals. NaN passes through.
  x = smaller(splat(88.8f), larger(splat(-88.1f), x));
  const Ints n = round_to_ints(multiply(x, splat(1.44269504f)));
  // ln(2) in two parts: the first has few digits, so that n times it is exact.
  const Floats r = multiply_add(to_floats(n), splat(2.12194440e-4f), multiply_add(to_floats(n), splat(-0.693359375f), x));
  Floats series = splat(1 / 5040.0f);
  for (float coefficient : {1 / 720.0f, 1 / 120.0f, 1 / 24.0f, 1 / 6.0f, 0.5f}) series = multiply_add(series, r, splat(coefficient));
  return {as_floats(shift_left<23>(add(n, splat(127)))), multiply_add(multiply(r, r), series, r)};
}

// The error is at most 2 units in the last place. The result is 0 below 2^-127, and exp(0) is exactly 1.
inline Floats exp(Floats x) {
  const Exponential e = split_exp(x);
  return multiply(e.power, add(splat(1.0f), e.q));
}

inline float exp_scalar(float x) { return first(exp(splat(x))); }

// t / (t + 2) with t = exp(2x) - 1, which has no cancellation for small x.
inline Floats tanh(Floats x) {
  const Exponential e = split_exp(smaller(splat(20.0f), larger(splat(-20.0f), add(x, x))));
  const Floats t = multiply_add(e.power, e.q, subtract(e.power, splat(1.0f)));
  return divide(t, add(t, splat(2.0f)));
}
