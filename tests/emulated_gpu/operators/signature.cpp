#include "signature.h"

#include <map>
#include <memory>
#include <mutex>
#include <tuple>

namespace emulated_gpu {
namespace {

bool is_written(const c10::Argument& argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

int argument_of(const c10::FunctionSchema& schema, const c10::Argument& returned) {
  int found = Signature::kNew;
  if (returned.alias_info() == nullptr) {
    return found;
  }
  for (std::size_t i = 0; i < schema.arguments().size(); ++i) {
    const auto* alias = schema.arguments()[i].alias_info();
    if (alias != nullptr && *alias == *returned.alias_info()) {
      found = static_cast<int>(i);
    }
  }
  return found;
}

std::unique_ptr<Signature> read(const c10::OperatorHandle& op) {
  const c10::FunctionSchema& schema = op.schema();
  auto signature = std::make_unique<Signature>();
  signature->name = c10::toString(op.operator_name());
  for (const c10::Argument& argument : schema.arguments()) {
    const bool is_generator = argument.type()->str().find("Generator") != std::string::npos;
    signature->arguments.push_back({is_written(argument), argument.is_out(), is_generator});
    signature->has_out |= argument.is_out();
  }
  for (const c10::Argument& returned : schema.returns()) {
    const int argument = argument_of(schema, returned);
    const bool is_new = argument == Signature::kNew;
    signature->returns.push_back(argument);
    signature->makes_tensors |= is_new;
    signature->returns_arguments |= !is_new;
    signature->returns_only_tensors &=
        !is_new || returned.type()->str().find("Tensor") != std::string::npos;
  }
  return signature;
}

}  // namespace

const Signature& signature_of(const c10::OperatorHandle& op) {
  static auto* mutex = new std::mutex;
  static auto* known = new std::map<c10::OperatorName, std::unique_ptr<Signature>,
                                    bool (*)(const c10::OperatorName&, const c10::OperatorName&)>(
      [](const c10::OperatorName& one, const c10::OperatorName& other) {
        return std::tie(one.name, one.overload_name) < std::tie(other.name, other.overload_name);
      });
  const std::lock_guard<std::mutex> lock(*mutex);
  std::unique_ptr<Signature>& signature = (*known)[op.operator_name()];
  if (signature == nullptr) {
    signature = read(op);
  }
  return *signature;
}

}  // namespace emulated_gpu
