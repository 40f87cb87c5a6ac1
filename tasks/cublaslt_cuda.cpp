#include "cublaslt.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <limits>
#include <map>
#include <sstream>
#include <utility>
#include <vector>

#include "autotune.h"
#include "runtime.h"

namespace nntile {

int64_t rounded(int64_t size, int64_t most) {
  const auto step = (most / 16 + 127) / 128 * 128;
  return step ? std::min(most, (size + step - 1) / step * step) : size;
}

namespace {

constexpr size_t kWorkspace = 64 << 20;
constexpr int kCandidates = 8;
constexpr float kShort = 0.04f;  // ms; shorter products are timed several in a row

void require(cublasStatus_t status, const char* what) {
  if (status != CUBLAS_STATUS_SUCCESS)
    throw std::runtime_error(std::string(what) + ": " + cublasGetStatusString(status));
}

cudaDataType type_of(const View& x) {
  switch (x.dtype) {
    case at::kBFloat16: return CUDA_R_16BF;
    case at::kHalf: return CUDA_R_16F;
    case at::kFloat: return CUDA_R_32F;
    case at::kFloat8_e4m3fn: return CUDA_R_8F_E4M3;
    case at::kFloat8_e5m2: return CUDA_R_8F_E5M2;
    default: throw std::invalid_argument("cuBLASLt supports only bf16, fp16, fp32 and 8-bit tiles");
  }
}

// A matrix x as cuBLASLt's column-major matrix: a row-major x is passed as its transpose, a column-major x (`flipped`)
// as itself.
struct Operand {
  const void* data;
  bool flipped = false;
  int64_t leading = 0;
  at::Tensor copied;

  explicit Operand(const View& x) : data(x.data) {
    const auto rows = x.sizes[0], columns = x.sizes[1];
    if (x.strides[1] == 1 && (rows == 1 || x.strides[0] >= columns)) {
      leading = rows == 1 ? columns : x.strides[0];
    } else if (x.strides[0] == 1 && (columns == 1 || x.strides[1] >= rows)) {
      flipped = true;
      leading = columns == 1 ? rows : x.strides[1];
    } else {
      copied = x.tensor().contiguous();
      data = copied.data_ptr();
      leading = columns;
    }
  }
};

// Everything on which the choice of an algorithm depends.
struct Key {
  int64_t m, n, k, lda, ldb, ldd;
  int flips, in, in_b, out, epilogue, compute;
  bool adds, in_place, aligned, fast, by_row;
  auto operator<=>(const Key&) const = default;

  std::string text() const {
    std::ostringstream made;
    for (const int64_t value : {m, n, k, lda, ldb}) made << value << ' ';
    for (const int value : {flips, in, out, epilogue, compute, int{adds}, int{in_place}}) made << value << ' ';
    if (ldd != n) made << ldd << " apart ";
    if (!aligned) made << "anywhere ";
    if (in_b != in) made << in_b << " right ";
    if (fast) made << "fast ";
    if (by_row) made << "scales of rows ";
    return made.str() + "of " + std::to_string(kCandidates);
  }
};

struct Call {
  const void *a, *b, *c, *bias, *scale_a, *scale_b;
  void *d, *aux;
  double alpha;
};

class Matmul {
 public:
  Matmul(const Key& key) : key_(key) {
    const auto compute = static_cast<cublasComputeType_t>(key.compute);
    require(cublasLtMatmulDescCreate(&desc_, compute, CUDA_R_32F), "cublasLtMatmulDescCreate");
    // Column-major: D' (n x m) = B' A'.
    set(CUBLASLT_MATMUL_DESC_TRANSA, key.flips & 2 ? CUBLAS_OP_T : CUBLAS_OP_N);
    set(CUBLASLT_MATMUL_DESC_TRANSB, key.flips & 1 ? CUBLAS_OP_T : CUBLAS_OP_N);
    set(CUBLASLT_MATMUL_DESC_EPILOGUE, static_cast<cublasLtEpilogue_t>(key.epilogue));
    const auto out = static_cast<cudaDataType>(key.out), in = static_cast<cudaDataType>(key.in);
    if (key.fast) set(CUBLASLT_MATMUL_DESC_FAST_ACCUM, int8_t{1});
#if CUBLAS_VERSION >= 120900
    if (key.by_row)
      for (const auto attribute : {CUBLASLT_MATMUL_DESC_A_SCALE_MODE, CUBLASLT_MATMUL_DESC_B_SCALE_MODE})
        set(attribute, CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F);
#endif
    set(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, out);
    if (uses_aux()) {
      set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, key.n);
      set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_DATA_TYPE, out);
    }
    layout(&b_, static_cast<cudaDataType>(key.in_b), key.ldb);
    layout(&a_, in, key.lda);
    layout(&d_, out, key.ldd);
    shape({key.m, key.n, key.k});
  }

  // Computes a product of the sizes `now` by algorithm `way` if it supports these sizes, else by the library's first
  // proposal.
  void run(const Call& call, const Sizes& now, void* workspace, size_t way) {
    point(call);
    if (now != sizes_ || way != way_) {
      shape(now);
      cublasLtMatmulHeuristicResult_t result{};
      const auto status = cublasLtMatmulAlgoCheck(handle(), desc_, b_, a_, d_, d_, &found_.at(way).algo, &result);
      used_ = found_[way].algo;
      way_ = way;
      if (status != CUBLAS_STATUS_SUCCESS || result.workspaceSize > kWorkspace) {
        const auto found = proposed(1);
        if (found.empty()) {
          sizes_ = {};
          throw Unsupported();
        }
        used_ = found[0].algo;
      }
    }
    require(matmul(call, used_, workspace), "cublasLtMatmul");
  }

  // Chooses among the library's proposals for the key's sizes: the stored choice, else the fastest on a product of the
  // sizes `now`. If none of the proposals computes this product, no algorithm remains.
  void choose(const Call& call, const Sizes& now, void* workspace, const View& out) {
    point(call);  // the library's proposals depend on the alignment of the pointers
    found_ = proposed(kCandidates);
    if (found_.empty()) return;
    shape(now);
    try {
      const auto best = static_cast<size_t>(
          chosen(products_file(), key_.text(), [&] { return fastest(call, workspace, out, found_); }));
      best_ = best < found_.size() ? best : 0;
    } catch (const Unsupported&) {
      found_.clear();
    }
    sizes_ = {};
  }

  size_t count() const { return found_.size(); }  // number of algorithms
  size_t best() const { return best_; }

  static cublasLtHandle_t handle() {  // one handle per worker, for the device that is current at its creation
    thread_local const cublasLtHandle_t handle = [] {
      cublasLtHandle_t made;
      require(cublasLtCreate(&made), "cublasLtCreate");
      return made;
    }();
    return handle;
  }

 private:
  std::vector<cublasLtMatmulHeuristicResult_t> proposed(int most) {
    cublasLtMatmulPreference_t preference;
    require(cublasLtMatmulPreferenceCreate(&preference), "cublasLtMatmulPreferenceCreate");
    size_t bytes = kWorkspace;
    cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &bytes, sizeof(bytes));
    const uint32_t least = key_.in == CUDA_R_32F ? 4 : 2;  // alignment in bytes; by default the library expects 256
    if (!key_.aligned)
      for (const auto attribute :
           {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
            CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES})
        cublasLtMatmulPreferenceSetAttribute(preference, attribute, &least, sizeof(least));
    std::vector<cublasLtMatmulHeuristicResult_t> found(static_cast<size_t>(most));
    int count = 0;
    const auto status =
        cublasLtMatmulAlgoGetHeuristic(handle(), desc_, b_, a_, d_, d_, preference, most, found.data(), &count);
    cublasLtMatmulPreferenceDestroy(preference);
    if (status == CUBLAS_STATUS_NOT_SUPPORTED) return {};
    require(status, "cublasLtMatmulAlgoGetHeuristic");
    found.resize(static_cast<size_t>(count));
    return found;
  }

  int fastest(Call call, void* workspace, const View& out,
              const std::vector<cublasLtMatmulHeuristicResult_t>& found) {
    at::Tensor spare;
    if (key_.in_place) {  // each trial would add to the target
      spare = at::empty_strided(out.sizes, out.strides, at::TensorOptions(out.dtype).device(out.device));
      call.d = spare.data_ptr();
    }
    point(call);
    int best = 0;
    float least = std::numeric_limits<float>::infinity();
    for (size_t k = 0; k < found.size() && found.size() > 1; ++k) {
      const auto run = [&] { return matmul(call, found[k].algo, workspace) == CUBLAS_STATUS_SUCCESS; };
      float ms = least_ms(run);
      if (ms < kShort)  // ms includes the launch; of several calls in a row, the launches overlap with execution
        ms = least_ms([&] { return run() && run() && run() && run() && run() && run() && run() && run(); }) / 8;
      if (ms < least) least = ms, best = static_cast<int>(k);
    }
    if (found.size() > 1 && least == std::numeric_limits<float>::infinity()) throw Unsupported();
    return best;
  }

  bool uses_aux() const {
    return key_.epilogue == CUBLASLT_EPILOGUE_DGELU || key_.epilogue == CUBLASLT_EPILOGUE_GELU_AUX ||
           key_.epilogue == CUBLASLT_EPILOGUE_GELU_AUX_BIAS;
  }

  template <class T>
  void set(cublasLtMatmulDescAttributes_t attribute, T value) {
    require(cublasLtMatmulDescSetAttribute(desc_, attribute, &value, sizeof(value)), "cublasLtMatmulDescSetAttribute");
  }

  static void layout(cublasLtMatrixLayout_t* made, cudaDataType type, int64_t leading) {
    require(cublasLtMatrixLayoutCreate(made, type, 1, 1, leading), "cublasLtMatrixLayoutCreate");
  }

  void shape(const Sizes& now) {
    shape(b_, key_.flips & 2, now.n, now.k);
    shape(a_, key_.flips & 1, now.k, now.m);
    shape(d_, false, now.n, now.m);
    sizes_ = now;
  }

  static void shape(cublasLtMatrixLayout_t layout, bool flipped, int64_t rows, int64_t columns) {
    if (flipped) std::swap(rows, columns);
    for (const auto& [attribute, value] :
         {std::pair(CUBLASLT_MATRIX_LAYOUT_ROWS, rows), {CUBLASLT_MATRIX_LAYOUT_COLS, columns}}) {
      const auto size = static_cast<uint64_t>(value);
      require(cublasLtMatrixLayoutSetAttribute(layout, attribute, &size, sizeof(size)),
              "cublasLtMatrixLayoutSetAttribute");
    }
  }

  void point(const Call& call) {
    if (call.bias) set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, call.bias);
    if (call.aux) set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, call.aux);
    if (call.scale_b) set(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, call.scale_b);  // column-major: b comes first
    if (call.scale_a) set(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, call.scale_a);
  }

  cublasStatus_t matmul(const Call& call, const cublasLtMatmulAlgo_t& algo, void* workspace) {
    const auto alpha = static_cast<float>(call.alpha);
    const float beta = key_.adds ? 1 : 0;
    return cublasLtMatmul(handle(), desc_, &alpha, call.b, b_, call.a, a_, &beta, call.c, d_, call.d, d_, &algo,
                          workspace, kWorkspace, c10::cuda::getCurrentCUDAStream().stream());
  }

  Key key_;
  Sizes sizes_{};  // sizes that the layouts a_, b_ and d_ have now
  std::vector<cublasLtMatmulHeuristicResult_t> found_;
  // Indices in found_. best_: the algorithm that is the fastest if it runs alone. way_: the algorithm of the last run.
  size_t best_ = 0, way_ = 0;
  cublasLtMatmulAlgo_t used_{};  // algorithm of the last run, checked for `sizes_`
  cublasLtMatmulDesc_t desc_;
  cublasLtMatrixLayout_t a_, b_, d_;
};

// Returns the workspace of this worker thread on a device.
void* workspace(c10::Device device) {
  thread_local std::map<c10::DeviceIndex, at::Tensor> made;
  auto& block = made[device.index()];
  if (!block.defined())
    block = at::empty({static_cast<int64_t>(kWorkspace)}, at::TensorOptions(at::kByte).device(device));
  return block.data_ptr();
}

int capability(c10::Device device) {
  thread_local const auto found = [&] {  // a thread belongs to one GPU
    int major = 0, minor = 0;
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device.index());
    cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device.index());
    return 10 * major + minor;
  }();
  return found;
}

}  // namespace

void direct_matmul(const View& out, const View& a_matrix, const View& b_matrix, double alpha, const Fused& f, bool tf32,
                   const Sizes& most) {
  const Operand a(a_matrix), b(b_matrix);
  const auto compute = a_matrix.dtype == at::kFloat && tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F;
  const Sizes now{out.sizes[0], out.sizes[1], a_matrix.sizes[1]};
  bool aligned = true;
  for (const void* data : {a.data, b.data, f.c, static_cast<const void*>(out.data)})
    aligned &= reinterpret_cast<uintptr_t>(data) % kRowAlignment == 0;
  const auto leading = now.m == 1 ? now.n : out.strides[0];
  // An algorithm is chosen for rounded sizes, which must fit into the distances between rows.
  const auto most_m = a.flipped ? std::min(most.m, a.leading) : most.m;
  const auto most_k = std::min({most.k, a.flipped ? most.k : a.leading, b.flipped ? b.leading : most.k});
  const Key key{rounded(now.m, most_m), now.n, rounded(now.k, most_k), a.leading, b.leading, leading,
                a.flipped + 2 * b.flipped, type_of(a_matrix), type_of(b_matrix), type_of(out), f.epilogue, compute,
                f.c != nullptr, f.c == out.data, aligned, f.fast && a_matrix.scale, a_matrix.scale && a_matrix.by_row};
  thread_local std::map<Key, Matmul> known;
  auto found = known.find(key);
  void* const space = workspace(out.device);
  const Call call{a.data, b.data, f.c ? f.c : out.data, f.bias, a_matrix.scale, b_matrix.scale, out.data, f.aux,
                  alpha};
  if (found == known.end()) {
    Matmul made(key);
    made.choose(call, now, space, out);
    found = known.emplace(key, made).first;
  }
  auto& product = found->second;
  if (!product.count()) throw Unsupported();
  const auto name = [&] { return key.text(); };
  product.run(call, now, space, way_to_take(products_file, name, product.count(), product.best()));
}

bool has_fp8(c10::Device device) { return capability(device) >= 89; }

bool has_scales_of_rows(c10::Device device) {
#if CUBLAS_VERSION >= 120900
  return capability(device) == 90;
#else
  (void)device;
  return false;
#endif
}

std::string products_file() { return choices_file("gemm", "cublasLt-" + std::to_string(cublasLtGetVersion())); }

}  // namespace nntile
