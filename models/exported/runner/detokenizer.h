// Converts token ids to text as they arrive, without incomplete characters: the method of
// pipelines/engine/detokenizer.py.
#pragma once

#include "tokenizer.h"

class Detokenizer {
 public:
  Detokenizer(const Tokenizer &tokenizer, const std::vector<int64_t> &prompt) : tokenizer_(tokenizer) {
    for (size_t size = FIRST_TAIL; size < FIRST_TAIL + CHARACTER; ++size) {
      const std::vector<int64_t> tail(prompt.end() - std::min(size, prompt.size()), prompt.end());
      const bool is_whole = !tokenizer.decode(tail).starts_with(REPLACEMENT);
      if (is_whole || size == FIRST_TAIL) window_ = tail;
      if (is_whole) break;
    }
    std::u32string text = tokenizer.decode(window_);
    while (text.ends_with(REPLACEMENT)) text.pop_back();
    num_known_ = window_.size(), num_shown_ = text.size();
  }

  // Returns the text that is certain after this token.
  std::u32string add(int64_t token) {
    window_.push_back(token);
    const std::u32string text = tokenizer_.decode(window_);
    if (!text.ends_with(REPLACEMENT) && text.size() > num_shown_) {
      const std::u32string piece = text.substr(num_shown_);
      window_.erase(window_.begin(), window_.begin() + num_known_);
      num_known_ = window_.size(), num_shown_ = tokenizer_.decode(window_).size();
      return piece;
    }
    return window_.size() - num_known_ > MAX_PENDING ? settle(text) : U"";
  }

  // Returns the remaining text at the end.
  std::u32string flush() const { return after(tokenizer_.decode(window_), num_shown_); }

 private:
  static constexpr size_t FIRST_TAIL = 8, CHARACTER = 4, MAX_PENDING = 16;
  const Tokenizer &tokenizer_;
  std::vector<int64_t> window_;
  size_t num_known_, num_shown_;  // tokens of the window whose text was returned, and the number of characters of that text

  static std::u32string after(const std::u32string &text, size_t count) { return text.substr(std::min(count, text.size())); }

  // Shortens a window with too many pending tokens. Returns the text of the removed tokens.
  std::u32string settle(const std::u32string &text) {
    if (!text.ends_with(REPLACEMENT)) return window_.pop_back(), U"";
    size_t cut = window_.size() - CHARACTER + 1;
    const auto decoded = [&](size_t begin, size_t end) {
      return tokenizer_.decode(std::vector<int64_t>(window_.begin() + begin, window_.begin() + end));
    };
    for (size_t tried = cut; tried > num_known_; --tried) {
      cut = tried;
      const std::u32string rest = decoded(cut, window_.size());
      if (!rest.empty() && decoded(0, cut) + rest == text) break;
    }
    const std::u32string piece = after(decoded(0, cut), num_shown_);
    window_.erase(window_.begin(), window_.begin() + cut);
    num_known_ = num_shown_ = 0;
    return piece;
  }
};
