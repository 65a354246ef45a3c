#include "machine/pool.h"

#include <xmmintrin.h>

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace emu {
namespace {

struct Job {
  const std::function<void(size_t)>* body;
  size_t count;
  std::atomic<size_t> next{0};
  std::atomic<size_t> done{0};
};

class Pool {
 public:
  ~Pool() {
    {
      std::lock_guard lock(mutex_);
      stop_ = true;
    }
    wake_.notify_all();
    for (std::thread& t : threads_) t.join();
  }
  void run(uint32_t threads, size_t count, const std::function<void(size_t)>& body) {
    auto job = std::make_shared<Job>();
    job->body = &body;
    job->count = count;
    const size_t helpers = std::min<size_t>(threads - 1, count - 1);
    {
      std::lock_guard lock(mutex_);
      while (threads_.size() < helpers) threads_.emplace_back([this] { serve(); });
      for (size_t i = 0; i < helpers; ++i) jobs_.push_back(job);
    }
    wake_.notify_all();
    work(*job);
    std::unique_lock lock(mutex_);
    finished_.wait(lock, [&] { return job->done == job->count; });
    std::erase(jobs_, job);
  }

 private:
  void work(Job& job) {
    for (size_t i; (i = job.next++) < job.count;) {
      (*job.body)(i);
      if (++job.done == job.count) {
        std::lock_guard lock(mutex_);
        finished_.notify_all();
      }
    }
  }
  void serve() {
    _mm_setcsr(0x1f80);  // IEEE arithmetic, whatever mode the creating thread was in
    std::unique_lock lock(mutex_);
    while (true) {
      wake_.wait(lock, [&] { return stop_ || !jobs_.empty(); });
      if (stop_) return;
      const std::shared_ptr<Job> job = jobs_.back();
      jobs_.pop_back();
      lock.unlock();
      work(*job);
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_, finished_;
  std::vector<std::thread> threads_;
  std::vector<std::shared_ptr<Job>> jobs_;
  bool stop_ = false;
};

}  // namespace

void parallel_for(uint32_t threads, size_t count, const std::function<void(size_t)>& body) {
  if (threads <= 1 || count <= 1) {
    for (size_t i = 0; i < count; ++i) body(i);
    return;
  }
  // Never destroyed: its threads may outlive static destructors of other libraries at exit.
  static Pool* const pool = new Pool;
  pool->run(threads, count, body);
}

}  // namespace emu
