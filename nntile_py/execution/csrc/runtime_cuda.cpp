// CUDA workers: what is made once for each, and the launching of Triton kernels.
#include <ATen/Context.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <cuda.h>
#include <torch/version.h>

#include <map>
#include <unordered_map>

#include "choices.h"
#include "on_cuda.h"
#include "internal.h"

namespace nntile {

// A cubin, loaded once for all devices.
struct CudaBinary {
  CUlibrary library = nullptr;
  CUkernel kernel = nullptr;
};

namespace {

void require(CUresult result, const char* what) {
  if (result == CUDA_SUCCESS) return;
  const char* text = nullptr;
  cuGetErrorString(result, &text);
  throw TaskError(std::string(what) + ": " + (text ? text : "unknown CUDA error"));
}

}  // namespace

std::shared_ptr<CudaBinary> load_binary(const std::string& cubin, const std::string& name, unsigned shared) {
  static std::map<std::string, std::shared_ptr<CudaBinary>> loaded;  // for as long as the process lives
  auto& binary = loaded[cubin];
  if (binary) return binary;
  auto made = std::make_shared<CudaBinary>();
  require(cuLibraryLoadData(&made->library, cubin.data(), nullptr, nullptr, 0, nullptr, nullptr, 0), name.c_str());
  require(cuLibraryGetKernel(&made->kernel, made->library, name.c_str()), name.c_str());
  if (shared > 48 * 1024) {  // more than a kernel may take unasked, on each device
    int count = 0;
    require(cuDeviceGetCount(&count), "cuDeviceGetCount");
    for (CUdevice device = 0; device < count; ++device)
      require(cuKernelSetAttribute(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, static_cast<int>(shared),
                                   made->kernel, device),
              name.c_str());
  }
  binary = made;
  return binary;
}

namespace {

void run_way(const TaskBody& body, const std::vector<Launch>& launches, const double* floats, void** buffers) {
  c10::DataPtr scratch;  // given back to ATen's allocator at once, which reuses it on this stream only: in order
  if (body.scratch) scratch = c10::cuda::CUDACachingAllocator::get()->allocate(static_cast<size_t>(body.scratch));
  const auto address = [&](const Launch::Argument& a) {
    return pointer(buffers[body.places[static_cast<size_t>(a.whole)]]);
  };
  if (!body.table.empty() && c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None)
    throw TaskError(body.name + ": a table of addresses, which is copied from main memory, is in no graph");
  if (!body.table.empty()) {  // from memory that is not pinned: copied out of `words` before the call returns
    std::vector<int64_t> words;
    for (const auto& a : body.table)
      words.push_back(a.kind == Launch::tile ? reinterpret_cast<int64_t>(address(a)) : a.whole);
    C10_CUDA_CHECK(cudaMemcpyAsync(scratch.get(), words.data(), words.size() * sizeof(int64_t),
                                   cudaMemcpyHostToDevice, task_stream()));
  }
  for (const auto& launch : launches) {
    union Value {
      void* pointer;
      int32_t int32;
      int64_t int64;
      float fp32;
    };
    std::array<Value, 64> values{};
    std::array<void*, 64> parameters{};
    size_t count = 0;
    for (const auto& a : launch.arguments) {
      auto& value = values.at(count);
      switch (a.kind) {
        case Launch::tile: value.pointer = address(a); break;
        case Launch::scratch: value.pointer = static_cast<char*>(scratch.get()) + a.whole; break;
        case Launch::int32:
        case Launch::live_int32: value.int32 = static_cast<int32_t>(a.integer(floats + body.first_float)); break;
        case Launch::int64:
        case Launch::live_int64: value.int64 = a.integer(floats + body.first_float); break;
        case Launch::fp32: value.fp32 = static_cast<float>(a.real); break;
        case Launch::fp32_of_task: value.fp32 = static_cast<float>(floats[body.first_float + static_cast<size_t>(a.whole)]); break;
        default: value.int64 = static_cast<int64_t>(floats[body.first_float + static_cast<size_t>(a.whole)]);
      }
      parameters[count++] = &value;
    }
    std::array<unsigned, 3> grid;
    for (size_t k = 0; k < grid.size(); ++k)
      grid[k] = static_cast<unsigned>(launch.grid[k].integer(floats + body.first_float));
    require(cuLaunchKernel(reinterpret_cast<CUfunction>(launch.binary->kernel), grid[0], grid[1], grid[2],
                           launch.threads, 1, 1, launch.shared, task_stream(), parameters.data(), nullptr),
            "cuLaunchKernel");
  }
}

}  // namespace

void run_launches(const TaskBody& body, const double* floats, void** buffers, c10::Device device) {
  const bool cuda = body.cuda && !body.key.empty();
  const auto run = [&](size_t way) {  // a kernel in C++ is the first: it may choose an algorithm of its own
    if (way >= size_t{cuda}) return run_way(body, body.ways[way - cuda], floats, buffers);
    Args args(body, floats, buffers, device);
    body.cuda(args);
  };
  const size_t count = body.key.empty() ? 1 : body.ways.size() + cuda;
  if (count == 1) return run(0);
  thread_local std::unordered_map<std::string, size_t> known;
  auto found = known.find(body.key);
  if (found == known.end()) {
    std::vector<std::function<void()>> ways;
    for (size_t way = 0; way < count; ++way) ways.emplace_back([&run, way] { run(way); });
    const auto file = choices_file("launches", "torch-" TORCH_VERSION);
    found = known.emplace(body.key, static_cast<size_t>(fastest_of(file, body.key, ways))).first;
  }
  run(found->second);
}

void start_cuda() {
  at::globalContext().lazyInitDevice(c10::DeviceType::CUDA);
  cudaGetLastError();  // StarPU's probing leaves one, which ATen would report at its next launch
  starpu_execute_on_each_worker(
      [](void*) {
        start_queue();
        on_cuda(nullptr, 0, [](c10::Device device) { at::empty({1}, at::TensorOptions(at::kByte).device(device)); });
        cudaStreamSynchronize(starpu_cuda_get_local_stream());  // StarPU wants it empty after what is not a task of ours
        cudaGetLastError();
      },
      nullptr, STARPU_CUDA);
}

}  // namespace nntile
