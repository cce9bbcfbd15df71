// The decoder steps of a tokenizer on the texts of tokens (models/tokenizers/runner_form.py), as in `decoders` of the
// library tokenizers.
#pragma once

#include <functional>

#include "splitter.h"

using Texts = std::vector<std::string>;
using DecoderStep = std::function<Texts(Texts)>;

// A step that changes each token separately. The change may depend on whether the token is first.
inline DecoderStep each_of(std::function<std::u32string(const std::u32string &, bool is_first)> change) {
  return [change = std::move(change)](Texts tokens) {
    for (size_t i = 0; i < tokens.size(); ++i) tokens[i] = encode_utf8(change(decode_lossy(tokens[i]), i == 0));
    return tokens;
  };
}

// Converts tokens that consist only of byte letters to bytes; other tokens keep their text.
inline DecoderStep read_bytes_of_letters(const Json::List &values) {
  std::map<char32_t, char> bytes;
  const auto letters = read_letters(values);
  for (size_t i = 0; i < letters.size(); ++i) bytes[letters[i][0]] = static_cast<char>(i);
  return [bytes](const Texts &tokens) {
    std::string joined;
    for (const std::string &token : tokens) {
      const std::u32string text = decode_lossy(token);
      if (std::ranges::all_of(text, [&](char32_t letter) { return bytes.contains(letter); }))
        for (const char32_t letter : text) joined += bytes.at(letter);
      else
        joined += token;
    }
    return Texts{encode_utf8(decode_lossy(joined))};
  };
}

// Returns the byte of a token such as <0x0A>.
inline std::optional<char> byte_of(const std::string &token) {
  uint8_t byte = 0;
  const bool is_byte =
      token.size() == 6 && token.starts_with("<0x") && token.back() == '>' && std::from_chars(&token[3], &token[5], byte, 16).ptr == &token[5];
  return is_byte ? std::optional(static_cast<char>(byte)) : std::nullopt;
}

// Joins consecutive tokens such as <0x0A> into one text. If their bytes are not UTF-8, each byte becomes a replacement
// character.
inline Texts join_bytes(const Texts &tokens) {
  Texts texts;
  std::string bytes;
  const auto end_row = [&] {
    if (bytes.empty()) return;
    const std::u32string marks(bytes.size(), REPLACEMENT);
    texts.push_back(encode_utf8(decode_utf8(bytes).value_or(marks)));
    bytes.clear();
  };
  for (const std::string &token : tokens) {
    if (const auto byte = byte_of(token))
      bytes += *byte;
    else
      end_row(), texts.push_back(token);
  }
  end_row();
  return texts;
}

// Joins pieces as sentencepiece does. Each byte that is not UTF-8 becomes a replacement character.
inline std::string join_pieces(const Texts &pieces, bool drops_space) {
  static const std::string SPACE = "\u2581";
  std::string text, bytes;
  const auto end_row = [&] {
    for (size_t at = 0; at < bytes.size();) {
      const size_t begin = at;
      const auto letter = next_character(bytes, at);
      if (!letter) at = begin + 1;
      text += encode_utf8(std::u32string(1, letter.value_or(REPLACEMENT)));
    }
    bytes.clear();
  };
  for (const std::string &piece : pieces) {
    if (const auto byte = byte_of(piece)) {
      bytes += *byte;
      continue;
    }
    end_row();
    const bool loses_space = drops_space && text.empty() && piece.starts_with(SPACE);
    drops_space &= !loses_space;
    for (size_t at = loses_space ? SPACE.size() : 0; at < piece.size();) {
      const bool is_space = piece.compare(at, SPACE.size(), SPACE) == 0;
      text += is_space ? ' ' : piece[at];
      at += is_space ? SPACE.size() : 1;
    }
  }
  end_row();
  return text;
}

inline std::u32string stripped(std::u32string_view text, char32_t letter, int64_t left, int64_t right) {
  for (; left > 0 && text.starts_with(letter); --left) text.remove_prefix(1);
  for (; right > 0 && text.ends_with(letter); --right) text.remove_suffix(1);
  return std::u32string(text);
}

inline DecoderStep read_decoder_step(const Json &json) {
  const Json::List &values = json.list();
  require(!values.empty(), "a step has no name");
  const std::string &name = values[0].text();
  const auto is = [&](std::string_view wanted, size_t size) { return name == wanted && values.size() == size; };
  const auto letter = [&] {
    const std::u32string text = characters(values[1]);
    require(text.size() == 1, "a letter is not one character");
    return text[0];
  };
  if (name == "letters") return read_bytes_of_letters(values);
  if (is("byte_fallback", 1)) return join_bytes;
  if (is("fuse", 1))
    return [](const Texts &tokens) {
      std::string text;
      for (const std::string &token : tokens) text += token;
      return Texts{text};
    };
  if (is("replace", 3) && !values[1].text().empty())
    return each_of([old = characters(values[1]), by = characters(values[2])](const std::u32string &token, bool) { return replaced(token, old, by); });
  if (is("strip", 4))
    return each_of([letter = letter(), left = values[2].integer(), right = values[3].integer()](const std::u32string &token, bool) {
      return stripped(token, letter, left, right);
    });
  require(is("spaces", 3), "the step " + name + " is not known");
  return each_of([space = std::u32string(1, letter()), drops_first = values[2].flag()](const std::u32string &token, bool is_first) {
    return replaced(token, space, is_first && drops_first ? U"" : U" ");
  });
}
