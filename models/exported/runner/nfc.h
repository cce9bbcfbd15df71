// Unicode normalisation form NFC, with tables from a file (models/tokenizers/runner_form.py).
#pragma once

#include <algorithm>
#include <map>

#include "json.h"

// The algorithm of Unicode Standard Annex 15.
class Composer {
 public:
  explicit Composer(const Json::List &step) {
    require(step.size() == 4, "its tables of NFC are incomplete");
    const Sizes decomposed = integers(step[1]), classes = integers(step[2]), composed = integers(step[3]);
    require(classes.size() % 2 == 0 && composed.size() % 3 == 0, "its tables of NFC are incomplete");
    for (auto at = decomposed.begin(); at != decomposed.end();) {
      const auto end = std::find(at, decomposed.end(), 0);
      require(end != decomposed.end() && end - at > 1, "its tables of NFC are incomplete");
      decomposed_[*at].assign(at + 1, end);
      at = end + 1;
    }
    for (size_t i = 0; i < classes.size(); i += 2) classes_[classes[i]] = static_cast<uint8_t>(classes[i + 1]);
    for (size_t i = 0; i < composed.size(); i += 3) composed_[{composed[i], composed[i + 1]}] = composed[i + 2];
  }

  std::u32string operator()(std::u32string_view text) const {
    std::u32string marks = decomposed(text), composed;
    for (auto at = marks.begin(); at != marks.end();) {  // sorts consecutive marks by combining class
      const auto end = std::find_if(at, marks.end(), [&](char32_t code) { return class_of(code) == 0; });
      std::stable_sort(at, end, [&](char32_t left, char32_t right) { return class_of(left) < class_of(right); });
      at = end == marks.end() ? end : end + 1;
    }
    size_t starter = std::u32string::npos;
    int last = -1;  // combining class of the last character after the starter; -1: none
    for (const char32_t code : marks) {
      const int combining_class = class_of(code);
      const auto joined = starter != composed.npos && last < combining_class ? compose(composed[starter], code) : std::nullopt;
      if (joined) {
        composed[starter] = *joined;
        continue;
      }
      if (combining_class == 0) starter = composed.size();
      last = combining_class == 0 ? -1 : combining_class;
      composed += code;
    }
    return composed;
  }

 private:
  static constexpr char32_t S = 0xAC00, L = 0x1100, V = 0x1161, T = 0x11A7, NUM_L = 19, NUM_V = 21, NUM_T = 28;  // Hangul (Unicode 15, 3.12)
  std::map<char32_t, std::u32string> decomposed_;
  std::map<char32_t, uint8_t> classes_;
  std::map<std::pair<char32_t, char32_t>, char32_t> composed_;

  uint8_t class_of(char32_t code) const {
    const auto entry = code < 0x300 ? classes_.end() : classes_.find(code);
    return entry == classes_.end() ? 0 : entry->second;
  }
  std::u32string decomposed(std::u32string_view text) const {
    std::u32string result;
    for (const char32_t code : text) {
      const auto known = code < 0xC0 ? decomposed_.end() : decomposed_.find(code);
      if (known != decomposed_.end()) {
        result += known->second;
      } else if (code >= S && code < S + NUM_L * NUM_V * NUM_T) {
        const char32_t number = code - S;
        result += {L + number / (NUM_V * NUM_T), V + number / NUM_T % NUM_V};
        if (number % NUM_T) result += T + number % NUM_T;
      } else {
        result += code;
      }
    }
    return result;
  }
  std::optional<char32_t> compose(char32_t first, char32_t second) const {
    if (first >= L && first < L + NUM_L && second >= V && second < V + NUM_V) return S + ((first - L) * NUM_V + second - V) * NUM_T;
    const bool lacks_tail = first >= S && first < S + NUM_L * NUM_V * NUM_T && (first - S) % NUM_T == 0;
    if (lacks_tail && second > T && second < T + NUM_T) return first + second - T;
    const auto entry = composed_.find({first, second});
    return entry == composed_.end() ? std::nullopt : std::optional(entry->second);
  }
};
