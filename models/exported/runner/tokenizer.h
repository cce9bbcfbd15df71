// Converts texts to token ids and back, as described in models/tokenizers/runner_form.py.
#pragma once

#include <queue>
#include <unordered_map>
#include <unordered_set>

#include "archive.h"
#include "decoder.h"

class Tokenizer {
 public:
  // Reads the file. Raises Refused if it is damaged, or if it contains a reason why there is no tokenizer.
  explicit Tokenizer(const std::string &file) {
    const Json form = parse_json(map_file(file));
    if (const Json *reason = Json::find(form.object(), "refused")) throw Refused(reason->text());
    for (const Json &set : form["sets"].list()) sets_.emplace_back(set);
    normalizer_ = read_steps(form["normalizer"], sets_), splitter_ = read_steps(form["splitter"], sets_);
    for (const Json &step : form["decoder"].list()) decoder_.push_back(read_decoder_step(step));
    if (const Json &pieces = form["pieces"]; !pieces.is_null()) {
      require(pieces.list().size() == 2, "its pieces do not have two values");
      pieces_ = Pieces{pieces.list()[0].flag(), pieces.list()[1].flag()};
    }
    read_vocabulary(form);
    for (const Json &entry : form["added"].list()) read_added(entry);
    for (auto &[letter, tokens] : raw_) std::ranges::stable_sort(tokens, std::ranges::greater(), [](const Added &token) { return token.text.size(); });
    for (auto &[letter, tokens] : normalized_)
      std::ranges::stable_sort(tokens, std::ranges::greater(), [](const Added &token) { return token.text.size(); });
    for (const int64_t id : integers(form["special"])) special_.insert(id);
    begin_ = integers(form["begin"]), end_ = integers(form["end"]);
    if (!form["bos"].is_null()) bos_ = form["bos"].integer();
    const int64_t number = form["white_space"].integer();
    require(number >= 0 && number < static_cast<int64_t>(sets_.size()), "its white space is not the number of a set");
    white_space_ = &sets_[number];
  }

  Tokenizer(const Tokenizer &) = delete;  // steps point to its sets

  // Returns the token ids of a prompt. Added tokens in the text are recognised.
  std::vector<int64_t> encode(const std::u32string &text) const {
    std::vector<int64_t> ids = begin_;
    cut(raw_, {text, true}, ids, [&](Piece piece) {
      Piece normalized{{}, piece.is_first};
      for (const Piece &part : run_steps(normalizer_, std::move(piece))) normalized.text += part.text;
      cut(normalized_, normalized, ids, [&](Piece rest) {
        for (const Piece &word : run_steps(splitter_, std::move(rest)))
          if (!word.text.empty()) encode_word(word.text, ids);
      });
    });
    ids.insert(ids.end(), end_.begin(), end_.end());
    if (ids.empty() && bos_) ids.push_back(*bos_);
    return ids;
  }

  // Returns the text of tokens, without special tokens.
  std::u32string decode(const std::vector<int64_t> &ids) const {
    if (pieces_) return decode_pieces(ids);
    Texts texts;
    for (const int64_t id : ids) {
      if (special_.contains(id)) continue;
      const auto added = added_texts_.find(id);
      if (added != added_texts_.end())
        texts.push_back(added->second);
      else if (id >= 0 && id < static_cast<int64_t>(tokens_.size()) && tokens_[id])
        texts.push_back(*tokens_[id]);
    }
    for (const DecoderStep &step : decoder_) texts = step(std::move(texts));
    std::string joined;
    for (const std::string &text : texts) joined += text;
    return decode_lossy(joined);
  }

 private:
  struct Added {
    int64_t id;
    std::u32string text;
    bool takes_left, takes_right;  // whether the token consumes white space on this side
  };
  struct Pieces {
    bool drops_space, in_each_run;
  };
  struct Merge {
    int64_t rank, place, id;
    bool operator>(const Merge &other) const { return std::pair(rank, place) > std::pair(other.rank, other.place); }
  };
  struct Symbol {
    int64_t id, before, after;  // indices of neighbours; -1: none
    bool is_gone = false;
  };
  using Finder = std::map<char32_t, std::vector<Added>>;  // by the first character; longest first

  std::vector<Set> sets_;
  std::vector<TextStep> normalizer_, splitter_;
  std::vector<DecoderStep> decoder_;
  std::optional<Pieces> pieces_;
  std::vector<std::optional<std::string>> tokens_;
  std::unordered_map<std::string, int64_t> ids_;
  std::unordered_map<uint64_t, std::pair<int64_t, int64_t>> merges_;  // by a pair of ids: rank and id of the merged token
  std::vector<std::optional<int64_t>> bytes_;
  std::optional<int64_t> unknown_, bos_;
  bool fuses_unknown_, whole_words_first_;
  Finder raw_, normalized_;
  std::unordered_map<int64_t, std::string> added_texts_;
  std::unordered_set<int64_t> special_;
  std::vector<int64_t> begin_, end_;
  const Set *white_space_;

  std::u32string decode_pieces(const std::vector<int64_t> &ids) const {
    std::string text;
    Texts run;
    const auto end_run = [&] {
      text += join_pieces(run, pieces_->drops_space && (text.empty() || pieces_->in_each_run));
      run.clear();
    };
    for (const int64_t id : ids) {
      const auto added = added_texts_.find(id);
      const bool is_piece = !special_.contains(id) && added == added_texts_.end() && id >= 0 && id < static_cast<int64_t>(tokens_.size());
      if (is_piece)
        run.push_back(tokens_[id].value_or(""));
      else
        end_run(), text += special_.contains(id) || added == added_texts_.end() ? "" : added->second;
    }
    end_run();
    return decode_lossy(text);
  }

  static std::optional<int64_t> id_or_null(const Json &json) { return json.is_null() ? std::nullopt : std::optional(json.integer()); }
  static uint64_t pair_of(int64_t left, int64_t right) { return static_cast<uint64_t>(left) << 32 | static_cast<uint32_t>(right); }

  void read_vocabulary(const Json &form) {
    for (const Json &token : form["tokens"].list()) {
      if (!token.is_null()) ids_.emplace(token.text(), tokens_.size());
      tokens_.push_back(token.is_null() ? std::nullopt : std::optional(token.text()));
    }
    const Json::List &merges = form["merges"].list();
    require(merges.size() % 4 == 0, "its merges are incomplete");
    merges_.reserve(merges.size() / 4);
    for (size_t i = 0; i < merges.size(); i += 4) {
      int64_t numbers[4];
      for (int j = 0; j < 4; ++j) numbers[j] = merges[i + j].integer();
      require(std::ranges::all_of(numbers, [&](int64_t number) { return number >= 0 && number < int64_t{1} << 31; }), "a merge has a number that is not a token id");
      merges_[pair_of(numbers[0], numbers[1])] = {numbers[3], numbers[2]};
    }
    for (const Json &entry : form["bytes"].list()) bytes_.push_back(id_or_null(entry));
    require(bytes_.empty() || bytes_.size() == 256, "it has no token for each byte");
    unknown_ = id_or_null(form["unknown"]);
    fuses_unknown_ = form["fuses_unknown"].flag(), whole_words_first_ = form["whole_words_first"].flag();
  }

  void read_added(const Json &json) {
    const std::u32string text = characters(json["text"]);
    const bool is_normalized = json["is_normalized"].flag();
    Added token{json["id"].integer(), text, json["lstrip"].flag(), json["rstrip"].flag()};
    added_texts_[token.id] = json["text"].text();
    if (is_normalized) {
      token.text.clear();
      for (const Piece &piece : run_steps(normalizer_, {text, true})) token.text += piece.text;
    }
    if (!token.text.empty()) (is_normalized ? normalized_ : raw_)[token.text[0]].push_back(std::move(token));
  }

  // Calls `rest` for the texts between added tokens, and appends the ids of the added tokens.
  template <class Rest> void cut(const Finder &finder, const Piece &piece, std::vector<int64_t> &ids, const Rest &rest) const {
    const std::u32string_view text = piece.text;
    size_t done = 0;
    for (size_t at = 0; at < text.size();) {
      const auto listed = finder.find(text[at]);
      const Added *token = nullptr;
      if (listed != finder.end())
        for (const Added &candidate : listed->second)
          if (!token && text.substr(at).starts_with(candidate.text)) token = &candidate;
      if (!token) {
        ++at;
        continue;
      }
      size_t begin = at, end = at += token->text.size();
      while (token->takes_left && begin > done && white_space_->holds(text[begin - 1])) --begin;
      while (token->takes_right && end < text.size() && white_space_->holds(text[end])) ++end;
      if (done < begin) rest(Piece{std::u32string(text.substr(done, begin - done)), piece.is_first && done == 0});
      ids.push_back(token->id);
      done = end;
    }
    if (done < text.size()) rest(Piece{std::u32string(text.substr(done)), piece.is_first && done == 0});
  }

  void encode_word(const std::u32string &word, std::vector<int64_t> &ids) const {
    if (whole_words_first_) {
      const auto entry = ids_.find(encode_utf8(word));
      if (entry != ids_.end()) return ids.push_back(entry->second);
    }
    std::vector<Symbol> symbols;
    for (const int64_t id : letters_of(word)) {
      const int64_t place = symbols.size();
      symbols.push_back({id, place - 1, place + 1});
    }
    if (symbols.empty()) return;
    symbols.back().after = -1;
    merge(symbols);
    for (const Symbol &symbol : symbols)
      if (!symbol.is_gone) ids.push_back(symbol.id);
  }

  // Returns the ids of a word's characters. The unknown id is held back, because consecutive unknown characters may
  // share it: it is inserted before the next known character, but after the bytes of a byte fallback, as in the library
  // tokenizers.
  std::vector<int64_t> letters_of(const std::u32string &word) const {
    std::vector<int64_t> ids;
    bool is_pending = false;
    for (const char32_t letter : word) {
      const std::string text = encode_utf8({&letter, 1});
      const auto known = ids_.find(text);
      if (known != ids_.end()) {
        if (is_pending) ids.push_back(*unknown_);
        is_pending = false;
        ids.push_back(known->second);
      } else if (!bytes_.empty() && std::ranges::all_of(text, [&](uint8_t byte) { return bytes_[byte].has_value(); })) {
        for (const uint8_t byte : text) ids.push_back(*bytes_[byte]);
      } else if (unknown_) {
        if (is_pending && !fuses_unknown_) ids.push_back(*unknown_);
        is_pending = true;
      }
    }
    if (is_pending) ids.push_back(*unknown_);
    return ids;
  }

  // Merges neighbours, lowest rank first. A priority queue avoids quadratic time for long words.
  void merge(std::vector<Symbol> &symbols) const {
    std::priority_queue<Merge, std::vector<Merge>, std::greater<>> queue;
    const auto find_merge = [&](int64_t place) {
      return symbols[place].after < 0 ? merges_.end() : merges_.find(pair_of(symbols[place].id, symbols[symbols[place].after].id));
    };
    const auto offer = [&](int64_t place) {
      const auto next = find_merge(place);
      if (next != merges_.end()) queue.push({next->second.first, place, next->second.second});
    };
    for (size_t place = 0; place < symbols.size(); ++place) offer(place);
    while (!queue.empty()) {
      const Merge best = queue.top();
      queue.pop();
      if (symbols[best.place].is_gone) continue;
      const auto current = find_merge(best.place);
      if (current == merges_.end() || current->second.second != best.id) continue;
      Symbol &left = symbols[best.place], &right = symbols[left.after];
      right.is_gone = true;
      left.id = best.id, left.after = right.after;
      if (left.after >= 0) symbols[left.after].before = best.place;
      if (left.before >= 0) offer(left.before);
      offer(best.place);
    }
  }
};
