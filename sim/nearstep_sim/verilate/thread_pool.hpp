// Threads for the parts of a simulation that are independent for some cycles.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <deque>
#include <thread>
#include <vector>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace nearstep {

// Only one thread at a time may call `run`. No part of a job may access data that another part
// writes, so that results do not depend on the number of threads. Threads start with the first job,
// and sleep unless the next job follows soon.
class ThreadPool {
  public:
    // `threads` in all, the caller's included; at most one for each part of a job.
    ThreadPool(unsigned threads, unsigned parts)
        : most_(std::min(threads, parts)), threads_(most_) {
        for (unsigned i = 0; i < parts; ++i) begun_.emplace_back(0);
    }
    ThreadPool(const ThreadPool&) = delete;
    ThreadPool& operator=(const ThreadPool&) = delete;

    ~ThreadPool() {
        stop_.store(true, std::memory_order_relaxed);
        if (!workers_.empty()) publish();
        for (std::thread& worker : workers_) worker.join();
    }

    // Most threads from now on, up to the number at construction.
    void use(unsigned threads) { threads_ = std::min(threads, most_); }

    // Whether the other threads were started.
    bool begun() const { return !workers_.empty(); }

    // Calls work(part) once for every part, and returns when all have returned. None may throw.
    template <class Work>
    void run(Work work) {
        const unsigned parts = static_cast<unsigned>(begun_.size());
        if (threads_ < 2) {
            for (unsigned part = 0; part < parts; ++part) work(part);
            return;
        }
        call_ = [](void* on, unsigned part) { (*static_cast<Work*>(on))(part); };
        work_ = &work;
        left_.store(parts, std::memory_order_relaxed);
        const std::uint32_t number = publish();
        while (workers_.size() + 1 < threads_) {
            const unsigned self = static_cast<unsigned>(workers_.size()) + 1;
            workers_.emplace_back([this, self, number] { live(self, number); });
        }
        take(0, number);
        await(left_, [](std::uint32_t left) { return left == 0; });
    }

  private:
    // Polls of a thread before it sleeps, some hundred microseconds at most: waking a thread takes
    // as long on a loaded machine.
    static constexpr int kLooks = 4000;

    template <class Holds>
    static std::uint32_t await(const std::atomic<std::uint32_t>& what, Holds holds) {
        std::uint32_t seen = what.load(std::memory_order_acquire);
        for (int i = 0; i < kLooks && !holds(seen); ++i) {
#if defined(__x86_64__)
            _mm_pause();
#endif
            seen = what.load(std::memory_order_acquire);
        }
        while (!holds(seen)) {
            what.wait(seen, std::memory_order_acquire);
            seen = what.load(std::memory_order_acquire);
        }
        return seen;
    }

    // Publishes the job; returns its number.
    std::uint32_t publish() {
        const std::uint32_t number = job_.fetch_add(1, std::memory_order_release) + 1;
        job_.notify_all();
        return number;
    }

    void live(unsigned self, std::uint32_t number) {
        while (!stop_.load(std::memory_order_relaxed)) {
            take(self, number);
            number = await(job_, [number](std::uint32_t seen) { return seen != number; });
        }
    }

    // Runs parts of a job that no thread has begun: its own first, then those of threads that are
    // not scheduled. After the end of a job all its parts were begun, and a part of the next job
    // can only be begun with the next job's number.
    void take(unsigned self, std::uint32_t number) {
        const unsigned parts = static_cast<unsigned>(begun_.size());
        for (unsigned i = 0; i < parts; ++i) {
            const unsigned part = (self + i) % parts;
            std::uint32_t before = number - 1;
            if (!begun_[part].compare_exchange_strong(before, number, std::memory_order_acq_rel))
                continue;
            call_(work_, part);
            if (left_.fetch_sub(1, std::memory_order_acq_rel) == 1) left_.notify_all();
        }
    }

    unsigned most_, threads_;
    std::vector<std::thread> workers_;
    std::deque<std::atomic<std::uint32_t>> begun_;  // number of the last job of each part
    std::atomic<bool> stop_ = false;
    // Of the current job; visible to every thread that has begun a part of it.
    void (*call_)(void*, unsigned) = nullptr;
    void* work_ = nullptr;
    alignas(64) std::atomic<std::uint32_t> job_ = 0;
    alignas(64) std::atomic<std::uint32_t> left_ = 0;  // parts not yet ended
};

}  // namespace nearstep
