// CUDA workers: initialisation, and launches of Triton kernels.
#include <ATen/Context.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <cuda.h>
#include <torch/version.h>

#include <algorithm>
#include <map>
#include <unordered_map>

#include "graph_params.h"
#include "autotune.h"
#include "on_cuda.h"
#include "internal.h"

namespace nntile {

// A cubin, loaded once for all devices.
struct CudaBinary {
  CUlibrary library = nullptr;
  CUkernel kernel = nullptr;
};

void require(CUresult result, const char* what) {
  if (result == CUDA_SUCCESS) return;
  const char* text = nullptr;
  cuGetErrorString(result, &text);
  throw TaskError(std::string(what) + ": " + (text ? text : "unknown CUDA error"));
}

std::shared_ptr<CudaBinary> load_binary(const std::string& cubin, const std::string& name, unsigned shared) {
  static std::map<std::string, std::shared_ptr<CudaBinary>> loaded;  // for the lifetime of the process
  auto& binary = loaded[cubin];
  if (binary) return binary;
  auto made = std::make_shared<CudaBinary>();
  require(cuLibraryLoadData(&made->library, cubin.data(), nullptr, nullptr, 0, nullptr, nullptr, 0), name.c_str());
  require(cuLibraryGetKernel(&made->kernel, made->library, name.c_str()), name.c_str());
  if (shared > 48 * 1024) {  // above the default limit, must be set on each device
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

// Encodes a matrix for Triton's tensor descriptors, as triton/backends/nvidia/driver.c does.
CUtensorMap tensor_map(const std::array<int64_t, 6>& how, void* address, int64_t rows) {
  const auto [columns, bytes, type, block_rows, block_columns, swizzle] = how;
  const std::array<cuuint64_t, 2> sizes{static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
  const std::array<cuuint64_t, 1> strides{static_cast<cuuint64_t>(columns * bytes)};
  const std::array<cuuint32_t, 2> block{static_cast<cuuint32_t>(block_columns), static_cast<cuuint32_t>(block_rows)};
  const std::array<cuuint32_t, 2> steps{1, 1};
  CUtensorMap map;
  require(cuTensorMapEncodeTiled(&map, static_cast<CUtensorMapDataType>(type), 2, address, sizes.data(), strides.data(),
                                 block.data(), steps.data(), CU_TENSOR_MAP_INTERLEAVE_NONE,
                                 static_cast<CUtensorMapSwizzle>(swizzle), CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                                 CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
          "cuTensorMapEncodeTiled");
  return map;
}

void run_way(const TaskBody& body, const std::vector<Launch>& launches, const double* floats, void** buffers) {
  // Returned to ATen's allocator at the end of this function, before the kernels end: ATen reuses the memory only on
  // this stream, after these kernels.
  c10::DataPtr scratch;
  if (body.scratch) scratch = c10::cuda::CUDACachingAllocator::get()->allocate(static_cast<size_t>(body.scratch));
  const auto address = [&](const Launch::Argument& a) {
    return pointer(buffers[body.places[static_cast<size_t>(a.whole)]]);
  };
  const bool captured = c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None;
  std::vector<int64_t> words;
  for (const auto& a : body.table)
    words.push_back(a.kind == Launch::tile ? reinterpret_cast<int64_t>(address(a)) : a.whole);
  auto* table = static_cast<char*>(scratch.get());
  if (!words.empty() && captured)  // scratch memory is shared by the kernels of a graph
    table = static_cast<char*>(changing->constant(words));
  else if (!words.empty())  // `words` is not pinned, so it is copied before the call returns
    C10_CUDA_CHECK(cudaMemcpyAsync(table, words.data(), words.size() * sizeof(int64_t), cudaMemcpyHostToDevice,
                                   task_stream()));
  const auto in_table = [&](int64_t offset) { return static_cast<size_t>(offset) < words.size() * sizeof(int64_t); };
  for (const auto& launch : launches) {
    std::array<Parameter, 64> values{};
    std::array<void*, 64> parameters{};
    std::array<CUtensorMap, 8> maps;
    size_t count = 0, mapped = 0;
    for (const auto& a : launch.arguments) {
      auto& value = values.at(count);
      if (a.kind == Launch::matrix) {
        const auto rows = launch.arguments.at(count + 1).integer(floats + body.first_float);
        parameters[count++] = &(maps.at(mapped++) = tensor_map(a.map, address(a), std::max<int64_t>(rows, 1)));
        continue;
      }
      switch (a.kind) {
        case Launch::tile: value.pointer = address(a); break;
        case Launch::scratch: value.pointer = (in_table(a.whole) ? table : static_cast<char*>(scratch.get())) + a.whole; break;
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
    const bool overlap = captured ? launch.overlaps != Launch::never && after_own_kernel : launch.overlaps == Launch::always;
    CUlaunchAttribute overlaps{};
    overlaps.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
    overlaps.value.programmaticStreamSerializationAllowed = 1;
    const CUlaunchConfig config{grid[0], grid[1], grid[2], launch.threads, 1, 1, launch.shared, task_stream(), &overlaps,
                                overlap ? 1u : 0u};
    require(cuLaunchKernelEx(&config, reinterpret_cast<CUfunction>(launch.binary->kernel), parameters.data(), nullptr),
            "cuLaunchKernelEx");
    if (changing) changing->add(launch, values.data(), task_stream());
    after_own_kernel = true;
  }
}

}  // namespace

void run_launches(const TaskBody& body, const double* floats, void** buffers, c10::Device device) {
  const bool cuda = body.cuda && !body.key.empty();
  const auto run = [&](size_t way) {  // a C++ kernel comes first, as it may choose an algorithm itself
    if (way >= size_t{cuda}) return run_way(body, body.ways[way - cuda], floats, buffers);
    if (changing) changing->refuse();
    after_own_kernel = false;
    Args args(body, floats, buffers, device);
    body.cuda(args);
  };
  const size_t count = body.key.empty() ? 1 : body.ways.size() + cuda;
  if (count == 1) return run(0);
  const auto file = [] { return choices_file("launches", "torch-" TORCH_VERSION); };
  thread_local std::unordered_map<std::string, size_t> known;
  auto found = known.find(body.key);
  if (found == known.end()) {
    std::vector<std::function<void()>> ways;
    for (size_t way = 0; way < count; ++way) ways.emplace_back([&run, way] { run(way); });
    found = known.emplace(body.key, static_cast<size_t>(fastest_of(file(), body.key, ways))).first;
  }
  run(way_to_take(file, [&] { return body.key; }, count, found->second));
}

void start_cuda() {
  at::globalContext().lazyInitDevice(c10::DeviceType::CUDA);
  cudaGetLastError();  // StarPU's probing leaves an error, which ATen would report at its next launch
  starpu_execute_on_each_worker(
      [](void*) {
        start_queue();
        on_cuda(nullptr, 0, [](c10::Device device) { at::empty({1}, at::TensorOptions(at::kByte).device(device)); });
        cudaStreamSynchronize(starpu_cuda_get_local_stream());  // StarPU expects an empty stream after its own tasks
        cudaGetLastError();
      },
      nullptr, STARPU_CUDA);
}

}  // namespace nntile
