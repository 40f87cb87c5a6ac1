// cuDNN's fused attention through cuDNN's frontend: one graph per set of shapes and strides, built once per worker.
#include "attention_cudnn.h"

#if __has_include(<cudnn_frontend.h>)
#include <ATen/cuda/CUDAContext.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/sub.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAStream.h>
#define CUDNN_FRONTEND_SKIP_JSON_LIB
// Torch exports symbols of another version of the frontend, with other layouts. With a namespace of its own, the loader
// does not mix the versions.
#define cudnn_frontend nntile_cudnn_frontend
#include <cudnn_frontend.h>

#include <map>

namespace nntile::cudnn {
namespace {

namespace fe = cudnn_frontend;

// Numbers of a graph's tensors. kLengths, kKeyLengths: number of positions of each segment. kOffsets and larger
// numbers: offsets of segments.
enum Uid : int64_t { kQ = 1, kK, kV, kOut, kStats, kDOut, kDQ, kDK, kDV, kBias, kLengths, kKeyLengths, kOffsets };
using Attributes = std::shared_ptr<fe::graph::Tensor_attributes>;

struct Operand {
  int64_t uid;
  at::Tensor x;
  int64_t offsets = 0;  // uid of the tensor with the segments' offsets in elements; 0: not ragged
};
using Operands = std::vector<Operand>;  // q first

struct Options {
  bool causal;
  double scale;
  int64_t rows = 0;  // maximum rows of ragged operands; 0: not ragged
};

// Returns cuDNN's handle for this worker's device. The handle lives as long as the worker.
cudnnHandle_t handle() {
  thread_local std::map<c10::DeviceIndex, cudnnHandle_t> handles;
  const auto stream = c10::cuda::getCurrentCUDAStream();
  auto& made = handles[stream.device_index()];
  if (!made && cudnnCreate(&made) != CUDNN_STATUS_SUCCESS) throw std::runtime_error("cuDNN does not start");
  if (cudnnSetStream(made, stream) != CUDNN_STATUS_SUCCESS) throw std::runtime_error("cuDNN refuses the stream");
  return made;
}

fe::DataType_t type_of(const at::Tensor& x) {
  switch (x.scalar_type()) {
    case at::kFloat: return fe::DataType_t::FLOAT;
    case at::kHalf: return fe::DataType_t::HALF;
    case at::kInt: return fe::DataType_t::INT32;
    case at::kLong: return fe::DataType_t::INT64;
    default: return fe::DataType_t::BFLOAT16;
  }
}

struct Plan {
  std::shared_ptr<fe::graph::Graph> graph;  // null: cuDNN has no kernel
  int64_t workspace = 0;
  std::string refused;  // the reason
};

// Adds operands to a graph, as inputs or as outputs of an operation.
class Builder {
 public:
  Builder(fe::graph::Graph& graph, const Operands& operands) : graph_(graph) {
    for (const auto& one : operands) operands_.emplace(one.uid, &one);
  }
  bool has(int64_t uid) const { return operands_.contains(uid); }

  Attributes input(int64_t uid) {
    auto& made = inputs_[uid];
    if (!made) {
      fe::graph::Tensor_attributes attributes;
      describe(attributes, uid);
      made = graph_.tensor(attributes);
    }
    return made;
  }
  void output(const Attributes& made, int64_t uid) {
    made->set_output(true);
    describe(*made, uid);
  }
  template <class Attention>
  void configure(Attention& attention, const Options& options) {
    attention.set_attn_scale(static_cast<float>(options.scale)).set_causal_mask(options.causal);
    if (has(kBias)) attention.set_bias(input(kBias));
    if (options.rows)
      attention.set_padding_mask(true).set_seq_len_q(input(kLengths)).set_seq_len_kv(input(kKeyLengths));
  }

 private:
  void describe(fe::graph::Tensor_attributes& target, int64_t uid) {
    const auto& [_, x, offsets] = *operands_.at(uid);
    target.set_uid(uid).set_dim(x.sizes().vec()).set_stride(x.strides().vec()).set_data_type(type_of(x));
    if (offsets) target.set_ragged_offset(input(offsets));
  }

  fe::graph::Graph& graph_;
  std::map<int64_t, const Operand*> operands_;
  std::map<int64_t, Attributes> inputs_;
};

Plan build(const Operands& operands, const Options& options) {
  auto graph = std::make_shared<fe::graph::Graph>();
  graph->set_io_data_type(type_of(operands[0].x))
      .set_intermediate_data_type(fe::DataType_t::FLOAT)
      .set_compute_data_type(fe::DataType_t::FLOAT);
  Builder all(*graph, operands);
  const auto q = all.input(kQ), k = all.input(kK), v = all.input(kV);
  if (all.has(kDOut)) {
    auto attention = fe::graph::SDPA_backward_attributes().set_name("attention_grad");
    all.configure(attention, options);
    // Without this limit, cuDNN's workspace has room for (number of segments) x (longest segment) positions.
    if (options.rows) attention.set_max_total_seq_len_q(options.rows).set_max_total_seq_len_kv(options.rows);
    const auto out = all.input(kOut), d_out = all.input(kDOut), stats = all.input(kStats);
    const auto [dq, dk, dv] = graph->sdpa_backward(q, k, v, out, d_out, stats, attention);
    all.output(dq, kDQ);
    all.output(dk, kDK);
    all.output(dv, kDV);
  } else {
    auto attention = fe::graph::SDPA_attributes().set_name("attention").set_generate_stats(true);
    all.configure(attention, options);
    // cuDNN prefers its other implementation where it exists, but that implementation does not support offsets.
    if (options.rows) attention.set_implementation(fe::AttentionImplementation_t::COMPOSITE);
    const auto [out, stats] = graph->sdpa(q, k, v, attention);
    all.output(out, kOut);
    all.output(stats, kStats);
  }
  Plan plan;
  auto status = graph->build(handle(), {fe::HeurMode_t::A});
  if (status.is_good()) status = graph->get_workspace_size(plan.workspace);
  if (status.is_bad()) return {nullptr, 0, "cuDNN: " + status.get_message()};
  plan.graph = graph;
  return plan;
}

// Computes an attention pass. Returns the reason if cuDNN does not support the case; an empty text on success.
std::string run(const Operands& operands, const Options& options) {
  const auto& q = operands[0].x;
  std::vector<int64_t> key{options.causal, options.rows, q.get_device(), static_cast<int64_t>(q.scalar_type()),
                           static_cast<int64_t>(operands.size())};
  std::unordered_map<int64_t, void*> pointers;
  for (const auto& [uid, x, _] : operands) {
    if (reinterpret_cast<uintptr_t>(x.data_ptr()) % 16) return "a tensor does not begin at a multiple of 16 bytes";
    // cuDNN always writes the log-sum-exp as fp32.
    if (uid == kStats && x.scalar_type() != at::kFloat) return "the log-sum-exp is not fp32";
    pointers[uid] = x.data_ptr();
    key.insert(key.end(), x.sizes().begin(), x.sizes().end());
    key.insert(key.end(), x.strides().begin(), x.strides().end());
  }
  thread_local std::map<std::pair<std::vector<int64_t>, double>, Plan> plans;
  auto found = plans.find({key, options.scale});
  if (found == plans.end()) found = plans.emplace(std::pair(key, options.scale), build(operands, options)).first;
  const auto& plan = found->second;
  if (!plan.graph) return plan.refused;
  const auto space = at::empty({plan.workspace}, q.options().dtype(at::kByte));
  auto status = plan.graph->execute(handle(), pointers, space.data_ptr());
  if (status.is_bad()) throw std::runtime_error("cuDNN: " + status.get_message());
  return {};
}

// Collects operands [1, h, tokens, d] of packed sequences in cuDNN's ragged form: [segments, h, longest, d], with an
// offset and a length for each segment.
class Ragged {
 public:
  Ragged(const PairMask& mask, int64_t most)
      : mask_(mask), count_(mask.segments.numel() - 1), rows_((most + kRows - 1) / kRows * kRows) {
    if (mask.window) refused_ = "a window";
    // Other GPUs are refused: later versions of the cuDNN frontend reject ragged statistics on these GPUs, although
    // this version accepts such graphs.
    const auto major = at::cuda::getCurrentDeviceProperties()->major;
    if (major != 9 && major != 10) refused_ = "a GPU of compute capability " + std::to_string(major);
  }

  // Adds operand `uid`. It shares the offsets of operand `like` (an earlier operand, or `uid` itself) if both have the
  // same stride from token to token.
  void add(Uid uid, const at::Tensor& x, Uid like) {
    const auto heads = x.size(1), width = x.size(3), pitch = x.stride(2);
    if (width % 16 && uid != kStats) refused_ = "head_dim " + std::to_string(width) + ", no multiple of 16";
    if (x.stride(3) != 1 || (heads - 1) * x.stride(1) + width > pitch)
      refused_ = "the heads of a token do not lie together";
    const auto whole = at::for_blob(x.data_ptr(), {count_, heads, mask_.longest, width})
                           .strides({mask_.longest * pitch, x.stride(1), pitch, 1})
                           .options(x.options())
                           .target_device(x.device())
                           .make_tensor();
    const auto next = kOffsets + static_cast<int64_t>(uids_.size());
    const auto [offsets, is_new] = uids_.try_emplace({like, pitch}, next);
    operands_.push_back({uid, whole, offsets->second});
    auto& values = by_pitch_[pitch];
    if (!values.defined()) values = mask_.segments.mul(pitch).view({-1, 1, 1, 1});
    if (is_new) operands_.push_back({offsets->second, values});
  }

  std::string run(double scale) {
    if (!refused_.empty()) return refused_;
    auto lengths = at::empty({count_}, mask_.segments.options().dtype(at::kInt));
    at::sub_out(lengths, mask_.segments.narrow(0, 1, count_), mask_.segments.narrow(0, 0, count_));
    for (const auto uid : {kLengths, kKeyLengths}) operands_.push_back({uid, lengths.view({-1, 1, 1, 1})});
    return cudnn::run(operands_, {mask_.diagonal, scale, rows_});
  }

 private:
  static constexpr int64_t kRows = 64;  // cuDNN's kernels add blocks of this number of rows in the workspace
  const PairMask& mask_;
  int64_t count_, rows_;
  std::string refused_;
  Operands operands_;
  std::map<std::pair<int64_t, int64_t>, int64_t> uids_;  // uids of offsets
  std::map<int64_t, at::Tensor> by_pitch_;
};

// Returns a view [1, h, tokens] of statistics [tokens, h], the layout that cuDNN writes for ragged operands.
at::Tensor as_lse(const at::Tensor& stats) { return stats.t().unsqueeze(0); }

}  // namespace

bool attention(const Triple& x, const at::Tensor& out, const at::Tensor& lse, const at::Tensor& bias, bool causal,
               double scale) {
  Operands operands{{kQ, x.q}, {kK, x.k}, {kV, x.v}, {kOut, out}, {kStats, lse.unsqueeze(-1)}};
  if (bias.defined()) operands.push_back({kBias, bias});
  return run(operands, {causal, scale}).empty();
}

bool attention_grad(const Triple& x, const at::Tensor& out, const at::Tensor& lse, const at::Tensor& d_out,
                    const Triple& grads, const at::Tensor& bias, bool causal, double scale) {
  Operands operands{{kQ, x.q}, {kK, x.k}, {kV, x.v}, {kOut, out}, {kStats, lse.unsqueeze(-1)}, {kDOut, d_out},
                    {kDQ, grads.q}, {kDK, grads.k}, {kDV, grads.v}};
  if (bias.defined()) operands.push_back({kBias, bias});
  return run(operands, {causal, scale}).empty();
}

// cuDNN does not write results of tokens outside all segments, so the outputs are cleared first.
std::string attention_of_segments(const Triple& x, const PairMask& mask, const at::Tensor& out, const at::Tensor& lse,
                                  int64_t most, double scale) {
  Ragged all(mask, most);
  const auto stats = at::zeros({lse.size(2), lse.size(1)}, lse.options());
  all.add(kQ, x.q, kQ);
  all.add(kK, x.k, kK);
  all.add(kV, x.v, kV);
  all.add(kOut, out, kOut);
  all.add(kStats, as_lse(stats).unsqueeze(-1), kStats);
  out.zero_();
  const auto why = all.run(scale);
  if (why.empty()) lse.copy_(as_lse(stats));
  return why;
}

std::string attention_of_segments_grad(const Triple& x, const PairMask& mask, const at::Tensor& out,
                                       const at::Tensor& lse, const at::Tensor& d_out, const Triple& grads,
                                       int64_t most, double scale) {
  Ragged all(mask, most);
  const auto stats = at::empty({lse.size(2), lse.size(1)}, lse.options());
  as_lse(stats).copy_(lse);
  all.add(kQ, x.q, kQ);
  all.add(kK, x.k, kK);
  all.add(kV, x.v, kV);
  all.add(kOut, out, kOut);
  all.add(kStats, as_lse(stats).unsqueeze(-1), kStats);
  all.add(kDOut, d_out, kOut);
  all.add(kDQ, grads.q, kQ);
  all.add(kDK, grads.k, kK);
  all.add(kDV, grads.v, kV);
  for (const auto& grad : {grads.q, grads.k, grads.v}) grad.zero_();
  return all.run(scale);
}

size_t version() { return cudnnGetVersion(); }

}  // namespace nntile::cudnn

#else

namespace nntile::cudnn {
bool attention(const Triple&, const at::Tensor&, const at::Tensor&, const at::Tensor&, bool, double) { return false; }
bool attention_grad(const Triple&, const at::Tensor&, const at::Tensor&, const at::Tensor&, const Triple&,
                    const at::Tensor&, bool, double) { return false; }
constexpr auto kNone = "this build found no cuDNN frontend (pip install '.[cuda]', then make setup)";
std::string attention_of_segments(const Triple&, const PairMask&, const at::Tensor&, const at::Tensor&, int64_t,
                                  double) { return kNone; }
std::string attention_of_segments_grad(const Triple&, const PairMask&, const at::Tensor&, const at::Tensor&,
                                       const at::Tensor&, const Triple&, int64_t, double) { return kNone; }
size_t version() { return 0; }
}  // namespace nntile::cudnn

#endif
