// What StarPU's CUDA workers need; nothing of it is there in a build without CUDA.
#pragma once
#ifdef NNTILE_CUDA
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda.h>
#include <starpu.h>
#include <starpu_cuda.h>

#include "kernel.h"

namespace nntile {

void require(CUresult result, const char* what);  // throws TaskError

void start_cuda();  // on every CUDA worker: what is slow the first time

// Of the CUDA worker that calls; see queue_cuda.cpp.
void start_queue();
cudaStream_t task_stream();                    // where tasks put their kernels
// StarPU's buffers of the task, all there. writes: to all of them, whatever their modes are.
void end_task(void** buffers, size_t count, bool writes);

// body(device) with the worker's stream as ATen's current one. Work is left on the stream: the codelets are asynchronous.
template <class F>
void on_cuda(void** buffers, size_t count, F body, bool writes = false) {
  const auto id = static_cast<c10::DeviceIndex>(starpu_worker_get_devid(starpu_worker_get_id()));
  const c10::cuda::CUDAStreamGuard guard(c10::cuda::getStreamFromExternal(task_stream(), id));
  body(c10::Device(c10::kCUDA, id));
  end_task(buffers, count, writes);
}

// StarPU's variables, but copies wait for the tasks that use the memory (queue_cuda.cpp), and it comes from memory_cuda.cpp.
starpu_data_interface_ops* tile_interface();
const starpu_data_copy_methods* tile_copies();
cudaStream_t key_of_tiles(int device);  // nothing runs on it: ATen gives what is freed under a stream to that one alone
void free_kept_memory();  // before StarPU stops

// Whether the last kernel on the worker's stream was one of ours. In a graph only those that follow one may overlap: one
// behind a kernel of cuBLASLt became 1 us slower by it on an H200, where it gained 0.4 to 1 us behind one of ours.
inline thread_local bool after_own_kernel = false;

// A task's part, on its worker's stream; launches: those that have some.
void run_on_cuda(const TaskBody& body, const double* floats, void** buffers, c10::Device device);
void run_launches(const TaskBody& body, const double* floats, void** buffers, c10::Device device);

}  // namespace nntile
#endif
