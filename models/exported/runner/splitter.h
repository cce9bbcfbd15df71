// The steps of a tokenizer on texts (models/tokenizers/runner_form.py), and the programs that split texts
// (split_program.py).
#pragma once

#include <functional>

#include "nfc.h"

// A text, or a part of a text.
struct Piece {
  std::u32string text;
  bool is_first;  // whether it is at the start of the whole text
};

class Set {
 public:
  explicit Set(const Json &json) : ranges_(integers(json)) {
    require(ranges_.size() % 2 == 0 && std::ranges::is_sorted(ranges_), "a set has no ranges");
    for (char32_t code = 0; code < 128; ++code) ascii_[code] = is_in_ranges(code);
  }
  bool holds(char32_t code) const { return code < 128 ? ascii_[code] : is_in_ranges(code); }

 private:
  Sizes ranges_;
  bool ascii_[128];

  bool is_in_ranges(char32_t code) const {
    const auto after = std::ranges::upper_bound(ranges_, static_cast<int64_t>(code));
    const bool is_last = after != ranges_.begin() && *(after - 1) == code;
    return is_last || (after - ranges_.begin()) % 2 == 1;
  }
};

// A compiled regular expression. Instructions jump only to later instructions, so every match terminates.
class Program {
 public:
  Program(const Json &json, const std::vector<Set> &sets) {
    const Json::List &list = json.list();
    const auto number = [&](const Json &value, int64_t least, size_t end) {
      const int64_t integer = value.integer();
      require(integer >= least && integer < static_cast<int64_t>(end), "a number of an instruction is not allowed");
      return static_cast<size_t>(integer);
    };
    for (size_t at = 0; at < list.size(); ++at) {
      const Json::List &instruction = list[at].list();
      const auto is = [&](std::string_view name, size_t size) { return instruction.size() == size && instruction[0].text() == name; };
      const auto target = [&](size_t i) { return number(instruction[i], at + 1, list.size()); };
      if (is("set", 2))
        code_.push_back({Kind::set, &sets[number(instruction[1], 0, sets.size())]});
      else if (is("run", 5))
        code_.push_back({Kind::run, &sets[number(instruction[1], 0, sets.size())], number(instruction[2], 0, ANY), number(instruction[3], -1, ANY), mode(instruction[4].text())});
      else if (is("fork", 3))
        code_.push_back({Kind::fork, nullptr, target(1), target(2)});
      else if (is("jump", 2))
        code_.push_back({Kind::jump, nullptr, target(1)});
      else if (is("ahead", 3))
        code_.push_back({instruction[1].flag() ? Kind::ahead : Kind::not_ahead, nullptr, target(2)});
      else
        require(is("match", 1), "an instruction is not known"), code_.push_back({Kind::match});
    }
    require(!code_.empty() && code_.back().kind == Kind::match, "a program has no end");
  }

  // Returns the end of the match that begins at `at`, or npos.
  size_t match(std::u32string_view text, size_t at, size_t instruction = 0) const {
    std::vector<State> alternatives{{instruction, at, at}};  // alternatives to try if the current path fails
    while (!alternatives.empty()) {
      State &alternative = alternatives.back();
      size_t next = alternative.instruction, place = alternative.place;
      if (place == alternative.last)
        alternatives.pop_back();
      else
        place < alternative.last ? ++alternative.place : --alternative.place;
      while (next != FAILED) {
        const Instruction &step = code_[next++];
        switch (step.kind) {
          case Kind::match: return place;
          case Kind::set: place < text.size() && step.set->holds(text[place]) ? ++place : next = FAILED; break;
          case Kind::fork: alternatives.push_back({step.b, place, place}); [[fallthrough]];
          case Kind::jump: next = step.a; break;
          case Kind::ahead:
          case Kind::not_ahead: next = (match(text, place, next) != text.npos) == (step.kind == Kind::ahead) ? step.a : FAILED; break;
          case Kind::run: {
            size_t end = place, least = place + step.a;
            while (end < text.size() && end - place < step.b && step.set->holds(text[end])) ++end;
            if (end < least) {
              next = FAILED;
            } else if (step.mode == Mode::lazy) {
              if (least < end) alternatives.push_back({next, least + 1, end});
              place = least;
            } else {
              if (least < end && step.mode == Mode::greedy) alternatives.push_back({next, end - 1, least});
              place = end;
            }
          }
        }
      }
    }
    return text.npos;
  }

 private:
  static constexpr size_t FAILED = -1, ANY = INT32_MAX;
  enum class Kind { set, run, fork, jump, ahead, not_ahead, match };
  enum class Mode { greedy, lazy, possessive };
  struct Instruction {
    Kind kind;
    const Set *set = nullptr;
    size_t a = 0, b = 0;  // targets; or the minimum and maximum of a run, where -1 is the largest number
    Mode mode = Mode::greedy;
  };
  struct State {
    size_t instruction, place, last;  // positions from `place` to `last` are tried in order
  };
  std::vector<Instruction> code_;

  static Mode mode(const std::string &name) {
    require(name == "greedy" || name == "lazy" || name == "possessive", "the mode " + name + " of a run is not known");
    return name == "greedy" ? Mode::greedy : name == "lazy" ? Mode::lazy : Mode::possessive;
  }
};

inline std::u32string replaced(std::u32string_view text, const std::u32string &old, const std::u32string &by) {
  std::u32string result;
  for (size_t at = 0;;) {
    const size_t next = text.find(old, at);
    result += text.substr(at, next - at);
    if (next == text.npos) return result;
    result += by, at = next + old.size();
  }
}

// A step that converts a text to pieces.
using TextStep = std::function<std::vector<Piece>(Piece)>;

// Splits texts at the matches of a program. The treatment of matches is as in tokenizers.Split.
inline TextStep read_split(const Json::List &values, const std::vector<Set> &sets) {
  require(values.size() == 4, "a split does not have four values");
  const std::string behavior = values[3].text();
  const std::vector<std::string> known = {"Isolated", "Removed", "MergedWithPrevious", "MergedWithNext", "Contiguous"};
  require(std::ranges::find(known, behavior) != known.end(), "the behavior " + behavior + " of a split is not known");
  return [program = Program(values[1], sets), inverts = values[2].flag(), behavior](const Piece &piece) {
    const std::u32string_view text = piece.text;
    std::vector<Piece> pieces;
    bool was_match = false, is_new = true;
    const auto add = [&](size_t begin, size_t end, bool is_inside) {
      if (begin == end) return;
      const bool is_match = is_inside != inverts;
      const bool is_joined = behavior == "MergedWithPrevious" ? is_match && !was_match
                             : behavior == "MergedWithNext"   ? was_match && !is_match
                             : behavior == "Contiguous"       ? is_match == was_match
                                                              : false;
      if (is_joined && !is_new && !pieces.empty())
        pieces.back().text += text.substr(begin, end - begin);
      else if (behavior != "Removed" || !is_match)
        pieces.push_back({std::u32string(text.substr(begin, end - begin)), piece.is_first && begin == 0});
      was_match = is_match, is_new = false;
    };
    size_t done = 0;
    for (size_t at = 0; at < text.size();) {
      const size_t end = program.match(text, at);
      if (end == text.npos || end == at) {
        ++at;
        continue;
      }
      add(done, at, false), add(at, end, true);
      done = at = end;
    }
    add(done, text.size(), false);
    return pieces;
  };
}

// Reads the characters that represent bytes.
inline std::vector<std::u32string> read_letters(const Json::List &values) {
  require(values.size() == 2 && values[1].list().size() == 256, "it has no letter for each byte");
  std::vector<std::u32string> letters;
  for (const Json &entry : values[1].list()) letters.push_back(characters(entry));
  for (const auto &letter : letters) require(letter.size() == 1, "a letter of a byte is not one character");
  return letters;
}

inline TextStep read_step(const Json &json, const std::vector<Set> &sets) {
  const Json::List &values = json.list();
  require(!values.empty(), "a step has no name");
  const std::string &name = values[0].text();
  if (name == "split") return read_split(values, sets);
  if (name == "nfc")
    return [compose = Composer(values)](const Piece &piece) { return std::vector<Piece>{{compose(piece.text), piece.is_first}}; };
  if (name == "letters")
    return [letters = read_letters(values)](const Piece &piece) {
      std::vector<Piece> pieces{{{}, piece.is_first}};
      for (const char byte : encode_utf8(piece.text)) pieces[0].text += letters[static_cast<uint8_t>(byte)];
      return pieces;
    };
  if (name == "replace" && values.size() == 3 && !values[1].text().empty())
    return [old = characters(values[1]), by = characters(values[2])](const Piece &piece) {
      return std::vector<Piece>{{replaced(piece.text, old, by), piece.is_first}};
    };
  require(name == "prepend" && values.size() == 4, "the step " + name + " is not known");
  return [prefix = characters(values[1]), unless_there = values[2].flag(), only_first = values[3].flag()](Piece piece) {
    const bool is_there = unless_there && piece.text.starts_with(prefix);
    if (!piece.text.empty() && !is_there && (piece.is_first || !only_first)) piece.text = prefix + piece.text;
    return std::vector<Piece>{std::move(piece)};
  };
}

inline std::vector<TextStep> read_steps(const Json &json, const std::vector<Set> &sets) {
  std::vector<TextStep> steps;
  for (const Json &step : json.list()) steps.push_back(read_step(step, sets));
  return steps;
}

inline std::vector<Piece> run_steps(const std::vector<TextStep> &steps, Piece text) {
  std::vector<Piece> pieces{std::move(text)};
  for (const TextStep &step : steps) {
    std::vector<Piece> next_pieces;
    for (Piece &piece : pieces)
      for (Piece &part : step(std::move(piece))) next_pieces.push_back(std::move(part));
    pieces = std::move(next_pieces);
  }
  return pieces;
}
