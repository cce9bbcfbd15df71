// Prints the logits of the C++ runner: for each token id of standard input, a line with the bits of the logits after it.
// The first line of the input is the prompt of the first step.
#include <iostream>
#include <sstream>

#include "../../models/exported/runner/kernels.h"
#include "../../models/exported/runner/model.h"

int main(int, char **words) {
  Model model(words[1]);
  model.begin(std::stoll(words[2]), std::stoll(words[3]));
  for (std::string line; std::getline(std::cin, line);) {
    std::vector<int64_t> tokens;
    std::istringstream numbers(line);
    for (int64_t token; numbers >> token;) tokens.push_back(token);
    const Tensor logits = model.step(tokens);
    std::vector<float> floats(logits.last());
    read_floats(logits.data, dtype_of(logits.type), 0, logits.last(), floats.data());
    for (const float number : floats) std::cout << std::bit_cast<uint32_t>(number) << ' ';
    std::cout << std::endl;
  }
}
