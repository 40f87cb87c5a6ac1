// Support of StarPU's CUDA workers; absent in builds without CUDA.
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

void start_cuda();  // initialises every CUDA worker, which takes long

// For the calling CUDA worker; see queue_cuda.cpp.
void start_queue();
cudaStream_t task_stream();                    // stream for the kernels of tasks
void begin_task();                             // in a profile: records the current task's start on the stream
// Ends the current task on the stream. buffers: the task's StarPU buffers, all allocated. writes: the task writes to
// all buffers, whatever their access modes are.
void end_task(void** buffers, size_t count, bool writes);

// Calls body(device) with the worker's stream as ATen's current stream. Does not synchronise: codelets are
// asynchronous.
template <class F>
void on_cuda(void** buffers, size_t count, F body, bool writes = false) {
  const auto id = static_cast<c10::DeviceIndex>(starpu_worker_get_devid(starpu_worker_get_id()));
  const c10::cuda::CUDAStreamGuard guard(c10::cuda::getStreamFromExternal(task_stream(), id));
  begin_task();
  body(c10::Device(c10::kCUDA, id));
  end_task(buffers, count, writes);
}

// Returns StarPU's data interface of tiles. It differs from StarPU's interface of variables in two points: copies wait
// for the tasks that use the memory (queue_cuda.cpp), and memory_cuda.cpp allocates the memory.
starpu_data_interface_ops* tile_interface();
const starpu_data_copy_methods* tile_copies();
// Returns a stream for which tiles are allocated and on which no kernel runs. ATen reuses freed memory only for the
// same stream, so kernels' workspaces never get the memory of tiles.
cudaStream_t key_of_tiles(int device);
void free_kept_memory();  // call it before StarPU stops

// Start and end of a watched task (see profile.h) on its stream, as times of profile::now().
struct Span {
  void* task;  // the task's callback_arg
  int64_t start, end;
};
void begin_spans();               // call it when a profile begins and no task runs
std::vector<Span> take_spans();  // waits for the tasks on all streams

// Whether the last kernel on the worker's stream was a kernel of this package. In a graph, a kernel may overlap with
// the previous kernel only then: on an H200 the overlap gained 0.4 to 1 us, but cost 1 us behind a kernel of cuBLASLt.
inline thread_local bool after_own_kernel = false;

// Run a part of a task on its worker's stream. run_launches is for parts that have Triton launches.
void run_on_cuda(const TaskBody& body, const double* floats, void** buffers, c10::Device device);
void run_launches(const TaskBody& body, const double* floats, void** buffers, c10::Device device);

}  // namespace nntile
#endif
