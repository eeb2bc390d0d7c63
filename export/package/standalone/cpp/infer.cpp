// Run a graph of this package with ONNX Runtime's C++ API: token ids in, token ids or logits out.
//
//     infer GRAPH [NAME=NUMBER ...] < IDS
//
// GRAPH: ../model.onnx, or ../generate.onnx of a model that generates text. IDS: the token ids of a text per
// line, separated by spaces, as the tokenizer of this package returns them. For each line one line is printed:
// the first output of the graph. NAME=NUMBER sets an integer input, such as max_new_tokens=20.

#include <cstdint>
#include <exception>
#include <iomanip>
#include <iostream>
#include <map>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include <onnxruntime_cxx_api.h>

namespace {

// Return the names of a graph's inputs that have no default.
std::vector<std::string> input_names(const Ort::Session& session) {
  Ort::AllocatorWithDefaultOptions allocator;
  std::vector<std::string> names;
  for (std::size_t i = 0; i < session.GetInputCount(); ++i)
    names.emplace_back(session.GetInputNameAllocated(i, allocator).get());
  return names;
}

// Copies a text's ids into [batch, length], as the graph was exported: a fixed length is padded with mask 0,
// and a fixed batch repeats the text.
struct Inputs {
  std::vector<std::int64_t> shape, ids, mask, types;

  Inputs(const std::vector<std::int64_t>& text, const std::vector<std::int64_t>& fixed) {
    const auto tokens = static_cast<std::int64_t>(text.size());
    const std::int64_t batch = fixed.at(0) > 0 ? fixed[0] : 1;
    const std::int64_t length = fixed.at(1) > 0 ? fixed[1] : tokens;
    if (tokens > length)
      throw std::runtime_error("a text has " + std::to_string(tokens) + " tokens; the graph takes " +
                               std::to_string(length));
    shape = {batch, length};
    for (std::int64_t row = 0; row < batch; ++row)
      for (std::int64_t i = 0; i < length; ++i) {
        ids.push_back(i < tokens ? text[static_cast<std::size_t>(i)] : 0);
        mask.push_back(i < tokens ? 1 : 0);
      }
    types.assign(ids.size(), 0);
  }
};

template <typename T>
void print_first_row(const Ort::Value& output) {
  const auto info = output.GetTensorTypeAndShapeInfo();
  const std::size_t count = info.GetElementCount() / static_cast<std::size_t>(info.GetShape().at(0));
  const T* values = output.GetTensorData<T>();
  for (std::size_t i = 0; i < count; ++i) std::cout << (i ? " " : "") << values[i];
  std::cout << std::endl;
}

void run(Ort::Session& session, const std::vector<std::int64_t>& text,
         std::map<std::string, std::int64_t>& settings) {
  const Ort::MemoryInfo memory = Ort::MemoryInfo::CreateCpu(OrtArenaAllocator, OrtMemTypeDefault);
  Inputs inputs(text, session.GetInputTypeInfo(0).GetTensorTypeAndShapeInfo().GetShape());
  const std::map<std::string, std::vector<std::int64_t>*> tensors = {
      {"input_ids", &inputs.ids}, {"attention_mask", &inputs.mask}, {"token_type_ids", &inputs.types}};
  std::vector<Ort::Value> values;
  std::vector<std::string> names = input_names(session);
  for (const std::string& name : names) {
    const auto found = tensors.find(name);
    if (found == tensors.end()) throw std::runtime_error("the graph has an unknown input: " + name);
    values.push_back(Ort::Value::CreateTensor<std::int64_t>(memory, found->second->data(), found->second->size(),
                                                            inputs.shape.data(), inputs.shape.size()));
  }
  for (auto& setting : settings) {
    names.push_back(setting.first);
    values.push_back(Ort::Value::CreateTensor<std::int64_t>(memory, &setting.second, 1, nullptr, 0));
  }
  std::vector<const char*> name_pointers;
  for (const std::string& name : names) name_pointers.push_back(name.c_str());
  Ort::AllocatorWithDefaultOptions allocator;
  const auto output_name = session.GetOutputNameAllocated(0, allocator);
  const char* output = output_name.get();
  const auto outputs = session.Run(Ort::RunOptions{nullptr}, name_pointers.data(), values.data(), values.size(),
                                   &output, 1);
  const auto type = outputs[0].GetTensorTypeAndShapeInfo().GetElementType();
  if (type == ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64)
    print_first_row<std::int64_t>(outputs[0]);
  else
    print_first_row<float>(outputs[0]);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    std::cerr << "usage: infer GRAPH [NAME=NUMBER ...] < IDS" << std::endl;
    return 2;
  }
  try {
    std::map<std::string, std::int64_t> settings;
    for (int i = 2; i < argc; ++i) {
      const std::string word = argv[i];
      const auto equals = word.find('=');
      if (equals == std::string::npos) throw std::runtime_error("expected NAME=NUMBER, got " + word);
      settings[word.substr(0, equals)] = std::stoll(word.substr(equals + 1));
    }
    Ort::Env environment(ORT_LOGGING_LEVEL_ERROR, "infer");
    Ort::SessionOptions options;
    // as the graph was scored
    options.AddConfigEntry("optimization.disable_specified_optimizers", "SkipLayerNormFusion");
#ifdef _WIN32
    const std::string graph = argv[1];
    Ort::Session session(environment, std::wstring(graph.begin(), graph.end()).c_str(), options);
#else
    Ort::Session session(environment, argv[1], options);
#endif
    std::cout << std::setprecision(9);
    for (std::string line; std::getline(std::cin, line);) {
      std::istringstream stream(line);
      std::vector<std::int64_t> text;
      for (std::int64_t id; stream >> id;) text.push_back(id);
      if (!stream.eof()) throw std::runtime_error("not a list of token ids: " + line);
      if (text.empty()) throw std::runtime_error("a line has no token ids");
      run(session, text, settings);
    }
  } catch (const std::exception& error) {
    std::cerr << "error: " << error.what() << std::endl;
    return 1;
  }
  return 0;
}
