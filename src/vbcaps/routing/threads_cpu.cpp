// Threads for the C++ kernels.
//
// Helpers sleep until there is work, and are not waited for unless they have begun some: where another program holds a
// processor, the caller does the work itself. (A team of OpenMP threads must meet at every end, and spins: with one
// processor busy it was four times slower than one thread.)

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>
#if defined(__unix__) || defined(__APPLE__)
#include <unistd.h>
#endif

#include "lanes_cpu.h"

namespace {

struct Job {
  void (*body)(const void*, Long);
  const void* context;
  Long tasks;
  std::atomic<Long> next{0};

  void work() {
    for (Long task; (task = next.fetch_add(1)) < tasks;) body(context, task);
  }
};

struct Pool {
  std::mutex caller;  // one job at a time
  std::mutex mutex;   // for what follows
  std::condition_variable wake, done;
  Job* job = nullptr;
  Long welcome = 0, inside = 0, helpers = 0;

  void help() {
    std::unique_lock<std::mutex> lock(mutex);
    while (true) {
      wake.wait(lock, [&] { return job && welcome > 0; });
      Job* const mine = job;
      welcome--, inside++;
      lock.unlock();
      mine->work();
      lock.lock();
      if (--inside == 0) done.notify_one();
    }
  }

  void run(Long threads, Job& mine) {
    std::unique_lock<std::mutex> lock(mutex);
    for (; helpers < threads - 1; helpers++) {
      try {
        std::thread([this] { help(); }).detach();
      } catch (const std::system_error&) {  // no more to be had
        break;
      }
    }
    job = &mine, welcome = threads - 1;
    lock.unlock();
    for (Long k = 1; k < threads; k++) wake.notify_one();
    mine.work();
    lock.lock();
    job = nullptr;  // who is not here by now need not come
    done.wait(lock, [&] { return inside == 0; });
  }
};

// Never destroyed: helpers sleep in it until the process ends. A forked process has no helpers, and gets a new one.
Pool& the_pool() {
#if defined(__unix__) || defined(__APPLE__)
  static std::mutex mutex;
  static Pool* pool = nullptr;
  static pid_t owner = 0;
  const std::lock_guard<std::mutex> lock(mutex);
  if (!pool || owner != getpid()) pool = new Pool, owner = getpid();
#else
  static Pool* const pool = new Pool;
#endif
  return *pool;
}

}  // namespace

void in_parallel(Long threads, Long tasks, void (*body)(const void*, Long), const void* context) {
  Job job{body, context, tasks};
  if (threads > tasks) threads = tasks;
  if (threads > 1) {
    Pool& pool = the_pool();
    const std::unique_lock<std::mutex> turn(pool.caller, std::try_to_lock);
    if (turn) return pool.run(threads, job);
  }
  job.work();
}
