// cuDNN's fused attention through its frontend: a graph for each set of shapes and strides, built once a worker.
#include "cudnn.h"

#if __has_include(<cudnn_frontend.h>)
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAStream.h>
#define CUDNN_FRONTEND_SKIP_JSON_LIB
// Torch exports the symbols of a version of its own, with other layouts, which the loader would take for ours.
#define cudnn_frontend nntile_cudnn_frontend
#include <cudnn_frontend.h>

#include <map>

namespace nntile::cudnn {
namespace {

namespace fe = cudnn_frontend;

enum Uid : int64_t { kQ = 1, kK, kV, kOut, kStats, kDOut, kDQ, kDK, kDV, kBias };
using Operands = std::vector<std::pair<Uid, at::Tensor>>;
using Attributes = std::shared_ptr<fe::graph::Tensor_attributes>;

// The handle of this worker's device; it lives as long as the worker.
cudnnHandle_t handle() {
  thread_local std::map<c10::DeviceIndex, cudnnHandle_t> handles;
  const auto stream = c10::cuda::getCurrentCUDAStream();
  auto& made = handles[stream.device_index()];
  if (!made && cudnnCreate(&made) != CUDNN_STATUS_SUCCESS) throw std::runtime_error("cuDNN does not start");
  if (cudnnSetStream(made, stream) != CUDNN_STATUS_SUCCESS) throw std::runtime_error("cuDNN refuses the stream");
  return made;
}

fe::DataType_t type_of(const at::Tensor& x) {
  if (x.scalar_type() == at::kFloat) return fe::DataType_t::FLOAT;
  return x.scalar_type() == at::kHalf ? fe::DataType_t::HALF : fe::DataType_t::BFLOAT16;
}

template <class Target>
void describe(Target&& target, Uid uid, const at::Tensor& x) {
  target.set_uid(uid)
      .set_dim(x.sizes().vec())
      .set_stride(x.strides().vec())
      .set_data_type(type_of(x));
}

struct Plan {
  std::shared_ptr<fe::graph::Graph> graph;  // null: cuDNN has none
  int64_t workspace = 0;
};

Plan build(const Operands& operands, bool causal, double scale) {
  auto graph = std::make_shared<fe::graph::Graph>();
  graph->set_io_data_type(type_of(operands[0].second))
      .set_intermediate_data_type(fe::DataType_t::FLOAT)
      .set_compute_data_type(fe::DataType_t::FLOAT);
  const std::map<Uid, at::Tensor> by_uid(operands.begin(), operands.end());
  const auto input = [&](Uid uid) {
    fe::graph::Tensor_attributes attributes;
    describe(attributes, uid, by_uid.at(uid));
    return graph->tensor(attributes);
  };
  const auto output = [&](const Attributes& made, Uid uid) {
    made->set_output(true);
    describe(*made, uid, by_uid.at(uid));
  };
  const auto q = input(kQ), k = input(kK), v = input(kV);
  if (by_uid.contains(kDOut)) {
    auto options = fe::graph::SDPA_backward_attributes().set_name("attention_grad");
    options.set_attn_scale(static_cast<float>(scale)).set_causal_mask(causal);
    if (by_uid.contains(kBias)) options.set_bias(input(kBias));
    const auto out = input(kOut), d_out = input(kDOut), stats = input(kStats);
    const auto [dq, dk, dv] = graph->sdpa_backward(q, k, v, out, d_out, stats, options);
    output(dq, kDQ);
    output(dk, kDK);
    output(dv, kDV);
  } else {
    auto options = fe::graph::SDPA_attributes().set_name("attention").set_generate_stats(true);
    options.set_attn_scale(static_cast<float>(scale)).set_causal_mask(causal);
    if (by_uid.contains(kBias)) options.set_bias(input(kBias));
    const auto [out, stats] = graph->sdpa(q, k, v, options);
    output(out, kOut);
    output(stats, kStats);
  }
  Plan plan;
  if (graph->build(handle(), {fe::HeurMode_t::A}).is_bad() || graph->get_workspace_size(plan.workspace).is_bad()) return {};
  plan.graph = graph;
  return plan;
}

bool run(const Operands& operands, bool causal, double scale) {
  const auto& q = operands[0].second;
  std::vector<int64_t> key{causal, q.get_device(), static_cast<int64_t>(q.scalar_type()), static_cast<int64_t>(operands.size())};
  std::unordered_map<int64_t, void*> pointers;
  for (const auto& [uid, x] : operands) {
    // Of the log-sum-exp it writes fp32, whatever is asked for.
    if (reinterpret_cast<uintptr_t>(x.data_ptr()) % 16 || (uid == kStats && x.scalar_type() != at::kFloat)) return false;
    pointers[uid] = x.data_ptr();
    key.insert(key.end(), x.sizes().begin(), x.sizes().end());
    key.insert(key.end(), x.strides().begin(), x.strides().end());
  }
  thread_local std::map<std::pair<std::vector<int64_t>, double>, Plan> plans;
  auto found = plans.find({key, scale});
  if (found == plans.end()) found = plans.emplace(std::pair(key, scale), build(operands, causal, scale)).first;
  const auto& plan = found->second;
  if (!plan.graph) return false;
  const auto space = at::empty({plan.workspace}, operands[0].second.options().dtype(at::kByte));
  auto status = plan.graph->execute(handle(), pointers, space.data_ptr());
  if (status.is_bad()) throw std::runtime_error("cuDNN: " + status.get_message());
  return true;
}

}  // namespace

bool attention(const Triple& x, const at::Tensor& out, const at::Tensor& lse, const at::Tensor& bias, bool causal,
               double scale) {
  Operands operands{{kQ, x.q}, {kK, x.k}, {kV, x.v}, {kOut, out}, {kStats, lse.unsqueeze(-1)}};
  if (bias.defined()) operands.emplace_back(kBias, bias);
  return run(operands, causal, scale);
}

bool attention_grad(const Triple& x, const at::Tensor& out, const at::Tensor& lse, const at::Tensor& d_out,
                    const Triple& grads, const at::Tensor& bias, bool causal, double scale) {
  Operands operands{{kQ, x.q}, {kK, x.k}, {kV, x.v}, {kOut, out}, {kStats, lse.unsqueeze(-1)}, {kDOut, d_out},
                    {kDQ, grads.q}, {kDK, grads.k}, {kDV, grads.v}};
  if (bias.defined()) operands.emplace_back(kBias, bias);
  return run(operands, causal, scale);
}

}  // namespace nntile::cudnn

#else

namespace nntile::cudnn {
bool attention(const Triple&, const at::Tensor&, const at::Tensor&, const at::Tensor&, bool, double) { return false; }
bool attention_grad(const Triple&, const at::Tensor&, const at::Tensor&, const at::Tensor&, const Triple&,
                    const at::Tensor&, bool, double) { return false; }
}  // namespace nntile::cudnn

#endif
