// What streams of the accelerator do, and when: memory, clocks, and what is left to chance.
#pragma once

#include <c10/core/Device.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace {

constexpr auto kType = c10::DeviceType::PrivateUse1;
constexpr int kStreams = 16;  // 0 is the default one
constexpr int kHost = kStreams;
using Clock = std::array<uint64_t, kStreams + 1>;

c10::Device device() { return {kType, 0}; }

struct Event {
  int stream = -1;
  uint64_t position = 0;
  Clock clock{};
  std::chrono::steady_clock::time_point when{};
};

struct Task {
  std::function<void()> run;
  const void* memory;  // of the device, that it uses
};

struct Queue {
  std::deque<Task> tasks;
  uint64_t done = 0;
  uint64_t added = 0;
};

struct Access {
  Clock read{};   // by stream, its time of the last one
  Clock write{};
};

struct Block {
  size_t bytes;
  Access access;
  int stream = 0;          // that the memory came from, and goes back to
  std::set<int> recorded;  // streams that it goes back after
};

std::recursive_mutex mutex;
std::array<Queue, kStreams> queues;
std::array<Clock, kStreams + 1> clocks;
std::map<char*, Block> blocks;  // device memory
std::map<char*, Block> pinned;  // host memory
std::map<char*, Block> places;  // parts of device memory, each used by itself
std::vector<std::string> hazards;
int64_t copies_to_device = 0, copies_to_host = 0, late_copies = 0, device_bytes = 0, peak_bytes = 0;
int next_stream = 1;
thread_local int current = 0;
thread_local bool computing = false;

void merge(Clock& into, const Clock& from) {
  for (size_t i = 0; i < into.size(); i++) into[i] = std::max(into[i], from[i]);
}

void hazard(const std::string& text) { hazards.push_back(text); }

void run_until(int stream, uint64_t position) {
  Queue& queue = queues[stream];
  while (queue.done < position) {
    Task task = std::move(queue.tasks.front());
    queue.tasks.pop_front();
    queue.done++;
    task.run();
  }
}

void run_all(int stream) { run_until(stream, queues[stream].added); }

void add(int stream, std::function<void()> run, const void* memory = nullptr) {
  queues[stream].tasks.push_back({std::move(run), memory});
  queues[stream].added++;
}

// A launch by the host: what the host has waited for happens before it.
uint64_t launch(int stream) {
  merge(clocks[stream], clocks[kHost]);
  return ++clocks[stream][stream];
}

Block* block_of(std::map<char*, Block>& memory, const void* data) {
  auto found = memory.upper_bound(const_cast<char*>(static_cast<const char*>(data)));
  if (found == memory.begin()) return nullptr;
  --found;
  if (static_cast<const char*>(data) >= found->first + std::max<size_t>(found->second.bytes, 1))
    return nullptr;
  return &found->second;
}

void check(const Clock& before, int stream, const char* what, const std::set<int>& but = {}) {
  for (int other = 0; other < kStreams; other++)
    if (other != stream && before[other] > clocks[stream][other] && !but.count(other))
      hazard(std::string(what) + " on stream " + std::to_string(stream) +
             " without waiting for stream " + std::to_string(other));
}

void access(const void* data, int stream, bool writes) {
  Block* block = block_of(places, data);
  if (!block) block = block_of(blocks, data);
  if (!block) block = block_of(pinned, data);
  if (!block) return;
  check(block->access.write, stream, writes ? "write after write" : "read after write");
  if (writes) check(block->access.read, stream, "write after read");
  (writes ? block->access.write : block->access.read)[stream] = clocks[stream][stream];
}

void release(void* data) {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  char* base = static_cast<char*>(data);
  Block& block = blocks.at(base);
  // The allocator of a GPU hands memory out again in the order of the stream that it came from: uses
  // on other streams have to come before, as the host has seen or that stream has been told to wait,
  // or the allocator, by record_stream.
  merge(clocks[block.stream], clocks[kHost]);
  for (auto at = places.lower_bound(base); at != places.end() && at->first < base + block.bytes;) {
    merge(block.access.write, at->second.access.write);
    merge(block.access.read, at->second.access.read);
    at = places.erase(at);
  }
  check(block.access.write, block.stream, "memory freed after a write", block.recorded);
  check(block.access.read, block.stream, "memory freed after a read", block.recorded);
  // A copy that is still to come would hit it: let it have its way first.
  for (int stream = 0; stream < kStreams; stream++) {
    auto uses = [&](const Task& task) { return block_of(blocks, task.memory) == &block; };
    if (std::ranges::any_of(queues[stream].tasks, uses)) run_all(stream);
  }
  device_bytes -= block.bytes;
  std::memset(base, 0xff, block.bytes);
  blocks.erase(base);
  std::free(base);
}

}  // namespace
