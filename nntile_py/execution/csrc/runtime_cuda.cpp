// CUDA workers: what is made once for each, and the launching of Triton kernels.
#include <ATen/Context.h>
#include <ATen/ops/empty.h>
#include <cuda.h>

#include <map>

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

void run_launches(const TaskBody& body, const double* floats, void** buffers, c10::Device device) {
  at::Tensor scratch;  // given back to ATen's allocator at once, which reuses it on this stream only: in order
  if (body.scratch) scratch = at::empty({body.scratch}, at::TensorOptions(at::kByte).device(device));
  const auto address = [&](const Launch::Argument& a) {
    return pointer(buffers[body.places[static_cast<size_t>(a.whole)]]);
  };
  if (!body.table.empty()) {  // from memory that is not pinned: copied out of `words` before the call returns
    std::vector<int64_t> words;
    for (const auto& a : body.table)
      words.push_back(a.kind == Launch::tile ? reinterpret_cast<int64_t>(address(a)) : a.whole);
    C10_CUDA_CHECK(cudaMemcpyAsync(scratch.data_ptr<uint8_t>(), words.data(), words.size() * sizeof(int64_t),
                                   cudaMemcpyHostToDevice, task_stream()));
  }
  for (const auto& launch : body.launches) {
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
        case Launch::scratch: value.pointer = scratch.data_ptr<uint8_t>() + a.whole; break;
        case Launch::int32: value.int32 = static_cast<int32_t>(a.whole); break;
        case Launch::int64: value.int64 = a.whole; break;
        case Launch::fp32: value.fp32 = static_cast<float>(a.real); break;
        case Launch::fp32_of_task: value.fp32 = static_cast<float>(floats[body.first_float + static_cast<size_t>(a.whole)]); break;
        default: value.int64 = static_cast<int64_t>(floats[body.first_float + static_cast<size_t>(a.whole)]);
      }
      parameters[count++] = &value;
    }
    require(cuLaunchKernel(reinterpret_cast<CUfunction>(launch.binary->kernel), launch.grid[0], launch.grid[1],
                           launch.grid[2], launch.threads, 1, 1, launch.shared, task_stream(),
                           parameters.data(), nullptr),
            "cuLaunchKernel");
  }
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
