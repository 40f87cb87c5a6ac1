// Python tasks outside of programs.
#include "internal.h"
#include "on_cuda.h"
#include "profile.h"

namespace nntile {
namespace {

struct PythonTask {
  std::string name;
  std::vector<std::shared_ptr<Tile>> tiles;
  PythonKernel kernel;
  bool always;
  std::shared_ptr<Submitted> submitted;
};

void run_python_task(void** buffers, void* cl_arg, int device, void* stream) {
  const std::unique_ptr<PythonTask> task(static_cast<PythonTask*>(cl_arg));
  guarded(task->name, [&] {
    if (g.dropping) return;
    std::vector<void*> pointers;
    for (size_t k = 0; k < task->tiles.size(); ++k) pointers.push_back(pointer(buffers[k]));
    task->kernel.call(pointers, nullptr, device, stream);
  }, task->always);
  task->submitted->end();
  announce();
}

starpu_codelet* python_codelet(bool cpu, bool cuda) {
  static starpu_codelet* codelets[4] = {};
  auto*& cl = codelets[2 * cpu + cuda];
  if (cl) return cl;
  cl = new_codelet("python", {}, nullptr, nullptr);
  cl->nbuffers = STARPU_VARIABLE_NBUFFERS;
  if (cpu) cl->cpu_funcs[0] = [](void** buffers, void* arg) { run_python_task(buffers, arg, -1, nullptr); };
#ifdef NNTILE_CUDA
  cl->cuda_flags[0] = STARPU_CUDA_ASYNC;
  if (cuda)
    cl->cuda_funcs[0] = [](void** buffers, void* arg) {
      const size_t count = static_cast<PythonTask*>(arg)->tiles.size();
      on_cuda(buffers, count,
              [&](c10::Device device) { run_python_task(buffers, arg, device.index(), task_stream()); });
    };
#endif
  return cl;
}

}  // namespace

void Submitted::wait() {
  if (!ended_) {
    require_running();
    require_main_thread();
    wake();
    wait_until([this] { return ended_.load(); }, true);
    sleep_if_idle();
  }
  if (running()) check();
}

std::shared_ptr<Submitted> submit_python(const std::string& name, const std::vector<std::string>& labels,
                                         std::vector<std::shared_ptr<Tile>> tiles, const std::vector<int>& modes,
                                         PythonKernel kernel, const Options& options) {
  require_running();
  const bool cpu = g.cpus && options.cpu, cuda = g.cuda && options.cuda && kernel.cuda;
  if (options.worker >= (options.cuda ? g.cuda : g.cpus) || (!cpu && !cuda))
    throw TaskError(name + ": no worker of this runtime may run it; it has " + std::to_string(g.cpus) + " CPU and " +
                    std::to_string(g.cuda) + " CUDA workers" + (kernel.cuda ? "" : ", and the task has no CUDA variant"));
  if (!options.always) check();
  for (const auto& tile : tiles) require(*tile);
  for (size_t k = 0; k < tiles.size(); ++k) {
    if (reads(modes[k]) && !tiles[k]->initialised)
      throw TaskError(name + ": " + labels.at(k) + " is read before any task wrote it");
    if ((modes[k] & STARPU_REDUX) && !tiles[k]->reducible) add_by_reduction(*tiles[k], Monoid::sum);
  }
  wake();
  for (const auto& tile : tiles) before_use(*tile);  // an interrupt may end this wait
  auto* task = starpu_task_create();
  task->cl = python_codelet(cpu, cuda);
  set_tiles(task, tiles, modes);
  auto submitted = std::make_shared<Submitted>();
  auto* arg = new PythonTask{name, std::move(tiles), std::move(kernel), options.always, submitted};
  task->cl_arg = arg;
  task->cl_arg_size = sizeof(*arg);
  task->name = "python";
  task->priority = options.priority;
  if (options.worker >= 0) {
    const auto kind = cuda ? STARPU_CUDA_WORKER : STARPU_CPU_WORKER;
    task->execute_on_a_specific_worker = 1;
    task->workerid = static_cast<unsigned>(starpu_worker_get_by_type(kind, options.worker));
  }
  submitted->run = profile::begin_run();  // in a profile, each task counts as a program
  if (submitted->run) profile::watch(task, submitted->run, 0);
  submit(task, name);
  return submitted;
}

}  // namespace nntile
